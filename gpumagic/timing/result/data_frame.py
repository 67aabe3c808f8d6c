"""A comparison as a pandas DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpumagic.errors import GpuError

if TYPE_CHECKING:
    from pandas import DataFrame

    from gpumagic.timing.comparison import Comparison
    from gpumagic.timing.result.timing import Timing


def to_pandas(comparison: Comparison) -> DataFrame:
    """A row for each timing; see `Comparison.to_pandas`."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise GpuError(
            "to_pandas() needs pandas, which is not installed here; type: pip install pandas"
        ) from None
    return pandas.DataFrame([_row(comparison, timing) for timing in comparison.timings])


def _row(comparison: Comparison, timing: Timing) -> dict[str, Any]:
    first, third = timing.quartiles or (None, None)
    low, high = timing.interval or (None, None)
    return {
        "where": timing.where,
        **timing.values,
        "name": timing.name,
        "virtual": timing.virtual,
        "median_s": timing.median,
        "first_quartile_s": first,
        "third_quartile_s": third,
        "median_low_s": low,
        "median_high_s": high,
        "host_s": timing.host_median,
        "device_s": timing.device_median,
        "repeats": len(timing.seconds),
        "runs_per_repeat": timing.number,
        "items_per_s": timing.rate(comparison.items),
        "energy_j": timing.energy,
        "peak_bytes": max(timing.peak.values(), default=None),
        "copied_bytes": timing.copied,
        "copy_s": timing.copy_seconds,
        "scaling": timing.scaling,
        "steady": timing.steady,
        "error": timing.error,
    }
