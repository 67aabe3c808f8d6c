"""Keep what `%%gputime` and `compare` measured, and answer questions about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gpumagic.display import table
from gpumagic.errors import GpuError, library_needed
from gpumagic.timing import lookup as changing
from gpumagic.timing.lookup import Lookup
from gpumagic.timing.timing import Agreement, Timing
from gpumagic.usercode import sweep as sweeping

if TYPE_CHECKING:
    from pandas import DataFrame


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
        "repeats": len(timing.seconds),
        "runs_per_repeat": timing.number,
        "items_per_s": timing.rate(items),
        "compile_s": timing.compiled,
        "first_s": timing.first,
        "peak_bytes": max(timing.peak.values(), default=None),
        "copied_bytes": timing.copied,
        "copy_s": timing.copy_seconds,
        "scaling": timing.scaling,
        "steady": timing.steady,
        "error": timing.error,
    }


_TITLE = 60


@dataclass(frozen=True, repr=False)
class Comparison(Lookup, table.Shown):
    """The same code, timed on several devices.

    Attributes
    ----------
    code : str
    timings : tuple of Timing
        In the order in which they were measured.
    agreements : tuple of Agreement
        Of every device but the first, against the first.
    time : float
        Unix time of the end.
    sweep : dict
        The values asked for, measured or not: ``{"n": (64, 256)}``.
    items : float or None
        Items in one run, for the throughput.
    setup : str
    notes : tuple of str
        Notes on how it was measured, a line each.
    interrupted : bool
        Whether Ctrl-C ended it; the finished timings are here.
    change : tuple of Change
        Each timing against an earlier comparison; empty without one.
    differences : tuple of str
        Other differences from the earlier one: code, set-up, devices; a line each.
    """

    code: str
    timings: tuple[Timing, ...]
    agreements: tuple[Agreement, ...]
    time: float
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    items: float | None = None
    setup: str = ""
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    change: tuple[changing.Change, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The first line of the code, cut if it is long."""
        lines = [line.strip() for line in self.code.splitlines()]
        told = [line for line in lines if line and not line.startswith("#")]
        if not told:
            return "no code"
        first = told[0] if len(told[0]) < _TITLE else told[0][: _TITLE - 2]
        return first if [first] == told else f"{first} …"

    def speedup(self, where: object, reference: object, **values: Any) -> float:
        """Return how many times faster `where` is than `reference`; less than 1 if it is slower.

        Raises
        ------
        GpuError
            Like `median`, or one of them is a virtual GPU.
        """
        self._real(where, reference)
        return self.median(reference, **values) / self.median(where, **values)

    def _real(self, *asked: object) -> list[str]:
        """Return the names of devices, none of them virtual."""
        names = [self.among(where) for where in asked]
        if found := [w for w in self.virtual if any(w in name.split("+") for name in names)]:
            raise GpuError(f"{changing.virtual(found)}; see .median()")
        return names

    @property
    def best(self) -> str:
        """The fastest device; in a sweep, the one that is fastest at most values.

        Devices with other results than the first do not count, nor do several at the same time,
        which do more work.

        Raises
        ------
        GpuError
            Nothing was measured.
        """
        fastest = map(self.fastest, sweeping.points(self.sweep))
        wins = Counter(timing.where for timing in fastest if timing is not None)
        if not wins:
            raise GpuError("nothing was measured, so that no device is the fastest")
        return wins.most_common(1)[0][0]

    def fastest(self, values: Mapping[str, Any]) -> Timing | None:
        """Return the timing with the smallest median at a point, among the candidates of `best`."""
        timed = [self.at(where, values) for where in self.alone if not self.disagreement(where)]
        known = [t for t in timed if t is not None and t.median is not None]
        return min(known, key=lambda t: t.median or 0.0, default=None)

    def crossover(self, a: object, b: object) -> float | None:
        """Return the value from which on the order of two devices no longer changes.

        Parameters
        ----------
        a, b : object
            Two devices, in either order.

        Returns
        -------
        float or None
            Interpolated on a log-log line between two measured values; None if the order does not
            change by more than the spread.

        Raises
        ------
        GpuError
            One of them is not in this comparison, or a virtual GPU.
        """
        pair = set(self._real(a, b))
        return max((c.at for c in self.crossovers if {c.faster, c.slower} == pair), default=None)

    @property
    def remarks(self) -> list[str]:
        """How it was measured, and how certain it is; the text shows the first three."""
        found: list[str] = table.view(self).remarks(self)
        return found

    def against(self, earlier: Comparison, *, alike: bool = False) -> Comparison:
        """Return this comparison with its `change` and `differences` against an earlier one.

        With `alike`, an earlier one with other code or devices is not compared, and
        `differences` says why.
        """
        if alike and (why := changing.unlike(self, earlier)):
            return replace(self, change=(), differences=why)
        return replace(
            self,
            change=changing.changes(self, earlier),
            differences=changing.other_text(self, earlier),
        )

    def to_pandas(self) -> DataFrame:
        """Return a row for each timing: its value, seconds and bytes.

        Raises
        ------
        GpuError
            pandas is not installed.
        """
        with library_needed("pandas", "to_pandas()", "pandas"):
            import pandas
        return pandas.DataFrame([_row(timing, self.items) for timing in self.timings])
