"""Keep what `%%gputime` and `compare` measured; write it as JSON and read it back.

JSON is checked against the types of the records' fields; anything else is refused.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from gpumagic.display import table
from gpumagic.errors import GpuError, library_needed
from gpumagic.timing import lookup as changing
from gpumagic.timing.lookup import Lookup
from gpumagic.timing.timing import Agreement, Machine, Timing
from gpumagic.usercode import sweep as sweeping

if TYPE_CHECKING:
    from pandas import DataFrame


FORMAT = "gpumagic-comparison"
VERSION = 1
# In Unix time; beyond it the C library cannot write a date.
_YEAR_10_000 = 253_402_300_800
_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_LISTS = {tuple: (list, "list"), Mapping: (dict, "object")}
_hints = lru_cache(get_type_hints)


class _WrongError(Exception):
    """An error in the JSON, with its place."""


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if not isinstance(value, Real):
        return sweeping.label(value)
    # JSON has no NaN and no infinity.
    return float(value) if math.isfinite(value) else {"float": str(float(value))}


def _document(source: str | Path) -> tuple[str, Any]:
    """Return the name of a source, and what its JSON has."""
    # JSON of an object begins with a brace, and a path may.
    if isinstance(source, str) and source.lstrip().startswith("{"):
        text, name = source, "the JSON"
    else:
        name = sweeping.label(str(source), 200)
        try:
            text = Path(source).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise GpuError(f"{name}: {reason}; give the file that save() wrote") from None
    try:
        return name, json.loads(text, object_hook=_number)
    except (ValueError, RecursionError):
        return name, None


def _number(given: dict[str, Any]) -> Any:
    """Read infinity and NaN, which JSON lacks, as `_plain` writes them."""
    odd = len(given) == 1 and given.get("float") in ("nan", "inf", "-inf")
    return float(given["float"]) if odd else given


def _read(kind: Any, given: Any, where: str) -> Any:
    """Convert a value of JSON to a type; `where` it is, for the message."""
    record: bool = is_dataclass(kind)
    if record:
        _require(isinstance(given, dict), f"{where or 'it'} is no object")
        hints = _hints(kind)
        there = {name: f"{where}.{name}".lstrip(".") for name in given}
        for name in given:
            _require(name in hints, f"{where or 'it'} has an unknown {name[:40]!r}")
        for one in fields(kind):
            known = one.name in given or (one.default, one.default_factory) != (MISSING, MISSING)
            _require(known, f"{where or 'it'} has no {one.name!r}")
        return kind(**{name: _read(hints[name], given[name], at) for name, at in there.items()})
    arguments = get_args(kind)
    if NoneType in arguments:
        return None if given is None else _read(arguments[0], given, where)
    if (origin := get_origin(kind)) in _LISTS:
        wanted, name = _LISTS[origin]
        _require(isinstance(given, wanted), f"{where} is no {name}")
        if wanted is dict:
            return {k: _read(arguments[1], each, f"{where}.{k}") for k, each in given.items()}
        return tuple(_read(arguments[0], each, f"{where}[{n}]") for n, each in enumerate(given))
    if origin is Literal:
        _require(given in arguments, f"{where} is not one of {', '.join(arguments)}")
        return given
    if kind is Any:
        return tuple(_read(Any, each, where) for each in given) if type(given) is list else given
    # JSON may write 1 for 1.0.
    given = float(given) if kind is float and type(given) is int else given
    _require(type(given) is kind, f"{where} is no {_NAMES[kind]}")
    return given


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _WrongError(otherwise)


def _check(made: Any) -> None:
    """Check what types cannot express."""
    _require(0 <= made.time < _YEAR_10_000, "time is no time that a clock has shown")
    swept = len(made.sweep) <= 1 and all(made.sweep.values())
    _require(swept, "sweep has more than one variable, or no values")
    for n, timing in enumerate(made.timings):
        where = f"timings[{n}]"
        for name in ("seconds", "host", "device", "alone"):
            possible = all(math.isfinite(s) and s >= 0 for s in getattr(timing, name) or ())
            _require(possible, f"{where}.{name} has a time that cannot be")
        _require(timing.number > 0 and timing.where != "", f"{where} has no runs, or no device")
        swept = set(timing.values) == set(made.sweep)
        _require(swept, f"{where}.values are not the sweep's variables")


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
    machine : Machine
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
        Other differences from the earlier one: machine, version, device; a line each.
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
            differences=changing.differences(self, earlier),
        )

    def to_json(self) -> str:
        """Return everything as JSON of one line; objects among the sweep's values become text."""
        document = {"format": FORMAT, "version": VERSION, **_plain(self)}
        return json.dumps(document, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write `to_json` into a file."""
        Path(path).expanduser().write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, source: str | Path) -> Comparison:
        """Read a comparison that `to_json` or `save` wrote.

        Parameters
        ----------
        source : str or Path
            The JSON, or the path of its file.

        Raises
        ------
        GpuError
            There is no such file, or it is no comparison, or of another version.
        """
        name, found = _document(source)
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise GpuError(f"{name} is no comparison; give what save() or to_json() wrote")
        if (version := found.pop("version", None)) != VERSION:
            raise GpuError(
                f"{name} has version {str(version)[:20]!r}, and this gpumagic knows {VERSION}; "
                "update gpumagic, or measure again"
            )
        try:
            made: Comparison = _read(cls, found, "")
            _check(made)
        except _WrongError as wrong:
            raise GpuError(f"{name} is not as save() wrote it: {wrong}; measure again") from None
        return made

    def to_pandas(self) -> DataFrame:
        """Return a row for each timing: its value, seconds, bytes and joules.

        Raises
        ------
        GpuError
            pandas is not installed.
        """
        with library_needed("pandas", "to_pandas()", "pandas"):
            import pandas
        return pandas.DataFrame([_row(timing, self.items) for timing in self.timings])
