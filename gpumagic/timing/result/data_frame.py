"""Make a pandas DataFrame of timings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpumagic.errors import GpuError
from gpumagic.timing.result.timing import Timing

if TYPE_CHECKING:
    from pandas import DataFrame


def to_pandas(timings: Iterable[Timing], items: float | None) -> DataFrame:
    """A row for each timing; see `Comparison.to_pandas`."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise GpuError(
            "to_pandas() needs pandas, which is not installed here; type: pip install pandas"
        ) from None
    return pandas.DataFrame([_row(timing, items) for timing in timings])


def _row(timing: Timing, items: float | None) -> dict[str, Any]:
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
        "items_per_s": timing.rate(items),
        "energy_j": timing.energy,
        "peak_bytes": max(timing.peak.values(), default=None),
        "copied_bytes": timing.copied,
        "copy_s": timing.copy_seconds,
        "scaling": timing.scaling,
        "steady": timing.steady,
        "error": timing.error,
    }
