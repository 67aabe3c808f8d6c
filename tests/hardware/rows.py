"""Judge what was measured by what is true: one row each of the table that `make hardware` prints.

Pure functions: what measures is elsewhere, so that a planted error can be put to them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

WAYS = ("host_to_device", "device_to_host", "device_to_device")
# torch reads several values within them, one after the other; the ledger has one wait for each.
SEVERAL_READS = {"bincount", "equal", "unique", "_unique2", "unique_dim", "repeat_interleave"}
LARGEST_SIZE = 8  # bytes that the host reads where a result's size depends on data: 4 or 8
_TIMES = re.compile(
    r"\d[\d.,]*\s?(?:ns|µs|ms|s|min|%)(?!\w)"  # a time, or a part of one
    r"| \(virtual[^)]*\)|; saves [^\n]*|^(?:Times on virtual GPUs|Savings are estimated)[^.]*\."
    r"| Savings are in calls\."
    r"| of [\d.]+ [KMG]iB free",
    re.MULTILINE,
)
_GOES_ON = re.compile(r"\n {8,}(?=\S)")  # the indent of an advice's second line
_PEAK = re.compile(r"\bpeak ([\d.]+) (B|KiB|MiB|GiB)")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Row:
    """One measurement; `ok` is None where it was skipped, and `note` says why."""

    what: str
    measured: Any = None
    true: Any = None
    limit: str = ""
    ok: bool | None = None
    note: str = ""


def same(what: str, measured: Any, true: Any) -> Row:
    return Row(what, measured, true, "equal", bool(measured == true))


def near(what: str, measured: float, true: float, *, rel: float = 0.0, plus: float = 0.0) -> Row:
    """Within `rel` of the truth, or within `plus`, whichever is wider."""
    allowed = max(rel * abs(true), plus)
    limit = f"± {rel:.0%}" if allowed > plus else f"± {plus:g}"
    return Row(what, measured, true, limit, abs(measured - true) <= allowed)


def at_most(what: str, measured: float, limit: float, true: Any = None) -> Row:
    return Row(what, measured, true, f"at most {limit:g}", measured <= limit)


def at_least(what: str, measured: float, limit: float, true: Any = None) -> Row:
    return Row(what, measured, true, f"at least {limit:g}", measured >= limit)


def skipped(what: str, why: str) -> Row:
    return Row(what, note=why)


@dataclass(frozen=True)
class Traffic:
    """Bytes by direction, and how often the host waited, copies that it waits for included."""

    nbytes: Mapping[str, int]
    waits: int


def direction(entry: Any) -> str:
    """From where to where the entry's bytes went, as one of `WAYS`."""
    if entry.source == "cpu":
        return "host_to_device"
    return "device_to_host" if entry.destination == "cpu" else "device_to_device"


def ledger_traffic(ledger: Iterable[Any], *, blocking: bool) -> Traffic:
    """What the ledger says; `blocking`: whether the truth counts copies as waits too."""
    nbytes: Counter[str] = Counter()
    waits = 0
    for entry in ledger:
        nbytes[direction(entry)] += entry.nbytes
        waits += entry.count if entry.kind == "wait" else entry.blocking * blocking
    return Traffic({way: nbytes[way] for way in WAYS}, waits)


def ledger_rows(name: str, ledger: Iterable[Any], true: Traffic, *, blocking: bool) -> list[Row]:
    """To the byte, and to the wait, but for what a wait for a size itself reads."""
    entries = list(ledger)
    ours = ledger_traffic(entries, blocking=blocking)
    several = any(entry.operator in SEVERAL_READS for entry in entries)
    # `.item()` reads an element, whose bytes are known.
    sizes = sum(e.count for e in entries if e.kind == "wait" and e.operator != "item")
    read = LARGEST_SIZE * (true.waits if several else sizes)
    rows = [
        near(
            f"{name}: {way}, bytes",
            ours.nbytes[way],
            true.nbytes[way],
            plus=read if way == "device_to_host" else 0,
        )
        for way in WAYS
    ]
    if several:
        rows.append(at_most(f"{name}: waits", ours.waits, true.waits, true.waits))
    else:
        rows.append(same(f"{name}: waits", ours.waits, true.waits))
    return rows


def timing_rows(found: Mapping[str, Any], limit: float) -> list[Row]:
    """Our time of one product against each other tool's, as their ratio."""
    name = f"{found['dtype']} {found['n']}"
    ratios = [tool for tool in ("vs Timer", "vs CuPy") if tool in found]
    return [near(f"{name} {tool}", found[tool], 1.0, rel=limit) for tool in ratios]


def crossover_row(
    what: str, told: float | None, cpu: Mapping[int, float], gpu: Mapping[int, float]
) -> Row:
    """The size from which the GPU wins lies where another tool's times cross."""
    sizes = sorted({*cpu} & {*gpu})
    wins = [n for n in sizes if gpu[n] < cpu[n]]
    loses = [n for n in sizes if n not in wins]
    if not wins or not loses or max(loses) > min(wins):
        return skipped(
            what, f"by Timer the GPU wins at {wins or 'none'} of {sizes}: no one crossing"
        )
    least, most = max(loses), min(wins)
    return Row(what, told, most, f"{least} … {most}", told is not None and least <= told <= most)


def report_rows(real: Mapping[str, str], virtual: Mapping[str, str]) -> Iterator[Row]:
    """What each cell of a notebook showed on the GPU and on virtual ones, but for times."""
    for cell, shown in real.items():
        ours, theirs = without_times(shown), without_times(virtual.get(cell, ""))
        differ = next(
            ((a, b) for a, b in zip([*ours, ""], [*theirs, ""], strict=False) if a != b), None
        )
        a, b = differ or (f"{len(ours)} lines", f"{len(theirs)} lines")
        yield Row(f"notebook: {cell}", a, b, "equal but for times", ours == theirs)
        for here, there in zip(_peaks(shown), _peaks(virtual.get(cell, "")), strict=False):
            # A real kernel may have a workspace.
            yield near(f"notebook: {cell}: peak, bytes", here, there, rel=0.05, plus=2**14)


def _peaks(text: str) -> list[float]:
    return [float(number) * _UNITS[unit] for number, unit in _PEAK.findall(text)]


def without_times(text: str) -> list[str]:
    """Its lines without times, peaks, and what else tells a virtual GPU; spaces count once."""
    text = _TIMES.sub("", _PEAK.sub("peak", _GOES_ON.sub(" ", text)))
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line]


def table_of(rows: Iterable[tuple[str, Row]]) -> str:
    """The table, a line for each row; `rows` have the names of their checks."""
    lines = [("check", "what", "measured", "true", "limit", "")]
    for check, row in rows:
        word = {True: "ok", False: "WRONG", None: "skipped"}[row.ok]
        verdict = f"{word}: {row.note}" if row.note else word
        lines.append((check, row.what, _short(row.measured), _short(row.true), row.limit, verdict))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _short(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:,.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
