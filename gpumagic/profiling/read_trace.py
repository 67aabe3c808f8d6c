"""Compute times by line, and causes of idle time, from kineto's trace (in microseconds).

A `CELL` event is the whole cell. A `LINE` event is a period in which one line ran. Host events are
operators and CUDA calls, and device events are kernels and copies. A host event, on any thread,
belongs to the line that the cell's thread ran when the event began.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from math import inf
from operator import sub
from typing import Any, Literal

from gpumagic.ledger.entry import OFTEN, Ledger
from gpumagic.profiling.cell_profile import Cause, CellProfile, Kind, Operator, ProfiledLine
from gpumagic.usercode.files import UserLine

CELL, LINE = "user_cell", "user_line"
_HOST, _DEVICE = ("cpu_op", "user_annotation"), ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("_runtime", "_driver")  # suffixes of categories: "cuda_runtime", "xpu_driver"
_MOMENTS, _GOLDEN = 3000, 0.618
_FIRST: tuple[Kind, ...] = ("loader", "copy", "wait")  # if several overlap, the first counts
_COMPUTES = 0.1  # a line whose operators take a smaller share of its host time is plain Python
_EVENT = 2e-6  # seconds that torch's profiler takes for an event; from benchmarks/profile_cost.py
Event = dict[str, Any]  # an event of the trace; `_Trace` adds a key `line`, the user's line
Label = UserLine | None


def read_trace(trace: Mapping[str, Any], ledger: Ledger, saved: str = "") -> CellProfile:
    """Return the profile of a cell from its trace and ledger; `saved` is the trace's file."""
    found = _Trace(trace["traceEvents"])
    lanes, lines = found.lanes(), _lines(found, ledger)
    moments = tuple(_moments(found, lanes))
    sampled = found.duration / 1e6 * len(moments) / _MOMENTS
    seconds = max(sampled, sum(found.host_seconds.values()))  # samples may miss short lines
    return CellProfile(
        device=found.cell["args"]["device"],
        virtual=found.cell["args"]["virtual"],
        seconds=seconds,
        busy=lanes["kernel"].seconds if found.seen else None,
        lines=lines,
        causes=_causes(moments, seconds, lanes["wait"], () if found.seen else lines),
        added=found.added,
        saved=saved,
    )


class _Lane:
    """Periods of time, each with a line. Where periods overlap, the one that began last counts."""

    def __init__(self, found: Iterable[Event]) -> None:
        self.events = sorted(found, key=lambda e: e["ts"])
        self._starts = [e["ts"] for e in self.events]
        self._ends = [*accumulate(map(_end, self.events), max)]
        begins = map(max, self._starts, [-inf, *self._ends])
        self.seconds = sum(map(sub, self._ends, begins)) / 1e6  # total, with overlaps counted once

    def last(self, time: float) -> tuple[float, Label]:
        """Return the latest end of the periods that began by `time`, and the last period's line."""
        n = bisect_right(self._starts, time) - 1
        return (self._ends[n], self.events[n]["line"]) if n >= 0 else (-inf, None)

    def at(self, time: float) -> tuple[float, Label] | None:
        """Return `last(time)` if a period is in progress at `time`, else None."""
        found = self.last(time)
        return found if found[0] >= time > -inf else None


class _Trace:
    """The events of a trace, with the user's line of each event added."""

    def __init__(self, events: Iterable[Event]) -> None:
        cats: dict[str, list[Event]] = defaultdict(list)
        for e in events:
            if e.get("ph") == "X" and {"dur", "cat", "args"} <= e.keys():
                cat = "host" if e["cat"] in _HOST or e["cat"].endswith(_RUNTIME) else e["cat"]
                cats["device" if cat in _DEVICE else cat].append({**e})
        (self.cell,), self.device = cats[CELL], cats["device"]
        # Without CUPTI, or on virtual GPUs, the trace has no CUDA calls and no device times.
        self.seen = any(e["cat"] not in _HOST for e in cats["host"])
        # Drop host events after the cell, such as the profiler's wait and the display of an error.
        self.host = [e for e in cats["host"] if e["ts"] <= _end(self.cell)]
        self.host_seconds: dict[Label, float] = defaultdict(float)
        for e in cats[LINE]:
            e["line"] = UserLine(**e["args"])
            self.host_seconds[e["line"]] += e["dur"] / 1e6
        self.lines = _Lane(cats[LINE])
        # Between two lines, only gpumagic's tracing runs.
        self.added = max(self.cell["dur"] / 1e6 - sum(self.host_seconds.values()), 0.0)
        self.added += _EVENT * (len(self.host) + len(self.device))
        self._attribute()
        # The device may still work after the last line.
        end = max(_end(e) for e in (self.cell, *self.device))
        self.start, self.duration = self.cell["ts"], end - self.cell["ts"]

    def _attribute(self) -> None:
        """Set each event's `line`, and each host event's `behind`: the device seconds it caused."""
        _subtract_inner(self.host)
        started: dict[tuple[str, Any], Event] = {}
        for e in self.host:
            e["line"], e["behind"] = self.lines.last(e["ts"])[1], 0.0
            for key in ("External id", "correlation"):
                started[key, e["args"].get(key)] = e
        for e in self.device:
            ids = [(key, e["args"].get(key, -1)) for key in ("External id", "correlation")]
            unknown = {"line": self.lines.last(e["ts"])[1], "behind": 0.0}
            starter = next((started[each] for each in ids if each in started), unknown)
            e["line"] = starter["line"]
            starter["behind"] += e["dur"] / 1e6

    def lanes(self) -> dict[str, _Lane]:
        """Return lanes by name: the kinds in `_FIRST`, and the kernels and copies of the device."""
        found: dict[str, list[Event]] = defaultdict(list)
        for e in self.host:
            if e["tid"] == self.cell["args"]["thread"]:
                found[_kind(e)].append(e)
        number = self.cell["args"]["device"].rpartition(":")[2]
        for e in self.device:
            if str(e["args"].get("device", 0)) == number:
                found[e["cat"]].append(e)
        found["copy"] += found["gpu_memcpy"]
        return {kind: _Lane(found[kind]) for kind in (*_FIRST, "kernel", "gpu_memcpy")}


def _end(e: Event) -> float:
    return float(e["ts"] + e["dur"])


def _subtract_inner(events: list[Event]) -> None:
    """Set each event's `own` (seconds without the events inside it) and `calls` (1 or 0)."""
    stack: list[Event] = []
    inner: dict[int, list[Event]] = defaultdict(list)
    for e in sorted(events, key=lambda e: (str(e["tid"]), e["ts"], -e["dur"])):
        e["own"], e["calls"] = e["dur"] / 1e6, 1
        while stack and (stack[-1]["tid"] != e["tid"] or _end(stack[-1]) <= e["ts"]):
            stack.pop()
        if stack:
            stack[-1]["own"] -= e["dur"] / 1e6
            inner[id(stack[-1])].append(e)
        stack.append(e)
    for e in events:
        # As in torch's table, a single inner event of the same name is no separate call.
        if len(only := inner[id(e)]) == 1:
            only[0]["calls"] = int(only[0]["name"] != e["name"])


def _kind(e: Event) -> Kind | Literal[""]:
    """Return the kind of a host event; empty for a profiler range that the user named."""
    name = e["name"]
    if e["cat"] not in _HOST:
        return "wait" if "Synchronize" in name else "copy" if "Memcpy" in name else "launch"
    if name.startswith("enumerate(DataLoader)"):
        return "loader"
    return "launch" if e["cat"] == "cpu_op" else ""


def _lines(found: _Trace, ledger: Ledger) -> tuple[ProfiledLine, ...]:
    counts: dict[str, Counter[Label]] = defaultdict(Counter)
    for entry in ledger.entries:
        counts[entry.kind][entry.where] += entry.count
    copies, waits = counts["copy"], counts["wait"]
    device: dict[Label, float] = defaultdict(float)
    for e in found.device:
        device[e["line"]] += e["dur"] / 1e6
    launches = Counter[Label](e["line"] for e in found.device if e["cat"] == "kernel")
    sums: dict[Label, dict[str, Operator]] = defaultdict(dict)
    for e in found.host:
        name = e["name"]
        _, calls, host, there = sums[e["line"]].get(name, Operator(name, 0, 0.0, 0.0))
        there = (there or 0.0) + e["behind"] if found.seen else None
        sums[e["line"]][name] = Operator(name, calls + e["calls"], host + e["own"], there)
    made = (
        ProfiledLine(
            where=line,
            host=found.host_seconds.get(line, 0.0),
            device=device[line] if found.seen else None,
            launches=launches[line] if found.seen else None,
            copies=copies[line],
            waits=waits[line],
            operators=tuple(sorted(sums[line].values(), key=lambda o: -o.cost)),
        )
        for line in dict.fromkeys((*found.host_seconds, *sums, *device, *copies, *waits))
    )
    return tuple(sorted(made, key=lambda each: -max(each.host, each.device or 0.0)))


def _moments(found: _Trace, lanes: dict[str, _Lane]) -> Iterator[Cause | None]:
    """Sample why the GPU is idle; None if a kernel runs. Jitter avoids aliasing with loops."""
    inside: dict[Label, float] = defaultdict(float)
    for e in found.host:
        inside[e["line"]] += e["own"] * (_kind(e) == "launch")
    for n in range(_MOMENTS):
        time = found.start + found.duration * (n + n * _GOLDEN % 1) / _MOMENTS
        here, busy = found.lines.at(time), lanes["kernel"].at(time) is not None
        copying = lanes["gpu_memcpy"].at(time) is not None
        if not (here or busy or copying):
            continue  # only gpumagic's tracing runs, so there is no sample
        line = here[1] if here else None
        causes = (Cause(kind, at[1]) for kind in _FIRST if (at := lanes[kind].at(time)))
        # In a line with many operators, the time between operators counts as launching.
        computes = inside[line] > _COMPUTES * found.host_seconds[line]
        cause = next(causes, Cause("launch" if computes else "python", line))
        yield None if busy else cause


def _causes(
    moments: tuple[Cause | None, ...], whole: float, waits: _Lane, unseen: tuple[ProfiledLine, ...]
) -> tuple[Cause, ...]:
    # Lines in `unseen` have no device times. Their causes are counts of frequent copies and waits.
    counts: dict[Kind, Counter[Label]] = defaultdict(Counter)
    for cause in filter(None, moments):
        counts[cause.kind][cause.where] += 1
    seconds: dict[Kind, float] = defaultdict(float)
    seconds |= {kind: whole * lines.total() / len(moments) for kind, lines in counts.items()}
    # While the host waits for the GPU, it cannot launch the next operators. So idle time for
    # launches counts as waiting, up to the time that the host waited while the GPU was busy.
    if late := min(seconds["launch"], max(waits.seconds - seconds["wait"], 0.0)):
        seconds["launch"] -= late
        seconds["wait"] += late
        counts["wait"] = Counter(e["line"] for e in waits.events)
    order = sorted(counts, key=lambda kind: -seconds[kind])
    timed = (Cause(kind, counts[kind].most_common(1)[0][0], seconds[kind]) for kind in order)
    often = [Cause("wait", line.where, times=line.waits) for line in unseen]
    often += [Cause("copy", line.where, times=line.copies) for line in unseen]
    often = sorted((c for c in often if c.times >= OFTEN), key=lambda c: -c.times)
    return (*often[:1], *timed, *often[1:])
