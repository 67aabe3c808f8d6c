"""Keep what `%%gputime` and `compare` measured: it shows itself, and can be kept in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumagic.display import table
from gpumagic.errors import GpuError
from gpumagic.timing.result import change as changing
from gpumagic.timing.result import stored
from gpumagic.timing.result.lookup import Lookup
from gpumagic.timing.result.machine import Machine
from gpumagic.timing.result.timing import Agreement, Timing
from gpumagic.usercode import sweep as sweeping

if TYPE_CHECKING:
    from pandas import DataFrame

_TITLE = 60


class Speedup(float):
    """A ratio of two times; of a virtual GPU, whose time is the CPU's, it says so."""

    virtual: str  # the device, or nothing

    # By a default, so that copy and pickle can make it: they put the name back.
    def __new__(cls, ratio: float, virtual: str = "") -> Speedup:
        """Remember which device was virtual."""
        made = super().__new__(cls, ratio)
        made.virtual = virtual
        return made

    def __repr__(self) -> str:
        about = f" ({self.virtual} is virtual: its time is the CPU's)" if self.virtual else ""
        return f"{float(self)!r}{about}"


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
    machine : Machine
    time : float
        Unix time of the end.
    sweep : dict
        Of each variable the values asked for, measured or not: ``{"n": (64, 256)}``.
    items : float or None
        What one run works through, for the throughput.
    setup : str
    notes : tuple of str
        What the user should know of how it was measured, a line each.
    interrupted : bool
        Whether Ctrl-C ended it: what was finished by then is here.
    change : tuple of Change
        Against an earlier comparison, of each timing; empty if none was asked for.
    differences : tuple of str
        What is another machine, version or device in that earlier one, a line each.
    """

    code: str
    timings: tuple[Timing, ...]
    agreements: tuple[Agreement, ...]
    machine: Machine
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

    def speedup(self, where: object, reference: object, **values: Any) -> Speedup:
        """How many times faster `where` is than `reference`; less than 1 if it is slower.

        A float; that of a virtual GPU displays with what it is worth.

        Raises
        ------
        GpuError
            Like `median`.
        """
        ratio = self.median(reference, **values) / self.median(where, **values)
        virtual = [t.where for w in (where, reference) if (t := self.timing(w, **values)).virtual]
        return Speedup(ratio, virtual[0] if virtual else "")

    @property
    def best(self) -> str:
        """The fastest device; of a sweep the one that is fastest at the most points.

        One that gave other numbers than the first is not it, nor is several at the same time, which
        do more work.

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
        """The one with the least median at a point, among those that count for `best`."""
        timed = [self.at(where, values) for where in self.alone if not self.disagreement(where)]
        known = [t for t in timed if t is not None and t.median is not None]
        return min(known, key=lambda t: t.median or 0.0, default=None)

    def crossover(self, a: object, b: object, **values: Any) -> float | None:
        """The value from which on the order of two devices stays as it is at the end.

        Parameters
        ----------
        a, b : object
            Two devices, in either order.
        **values
            The other variable of a sweep over two.

        Returns
        -------
        float or None
            Between two measured values, by a line in log-log; None where no order flips beyond the
            spreads.

        Raises
        ------
        GpuError
            One of them is not in this comparison.
        """
        pair = {self.among(a), self.among(b)}
        at = sweeping.key(values)
        found = [
            c.at
            for c in self.crossovers
            if {c.faster, c.slower} == pair and (not values or sweeping.key(c.values) == at)
        ]
        return max(found, default=None)

    def against(self, earlier: Comparison, *, alike: bool = False) -> Comparison:
        """This comparison with its `change` and `differences` against an earlier one.

        With `alike` one of other code or devices is not compared, and `differences` say why.
        """
        if alike and (why := changing.unlike(self, earlier)):
            return replace(self, change=(), differences=why)
        return replace(
            self,
            change=changing.changes(self, earlier),
            differences=changing.differences(self, earlier),
        )

    def to_json(self) -> str:
        """Everything, as JSON of one line; a sweep's value that is no number or word, as words."""
        return stored.dumps(self)

    def save(self, path: str | Path) -> None:
        """Write `to_json` into a file."""
        Path(path).expanduser().write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, source: str | Path) -> Comparison:
        """Read what `to_json` or `save` gave.

        Parameters
        ----------
        source : str or Path
            The JSON, or the file that it is in.

        Raises
        ------
        GpuError
            There is no such file, or it is no comparison of a version that is known here.
        """
        made: Comparison = stored.load(source, cls)
        return made

    def to_pandas(self) -> DataFrame:
        """A row for each timing: its variables, seconds, bytes and joules.

        Raises
        ------
        GpuError
            pandas is not installed.
        """
        return stored.to_pandas(self.timings, self.items)
