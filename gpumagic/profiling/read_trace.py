"""Read a trace of torch's profiler, with the user's lines: sums by line, and causes of idle time.

The input is Chrome's trace format as kineto writes it, and two categories of ours: `CELL` is the
whole cell, `LINE` a stretch in which one line ran. An event belongs to the line that the cell's
thread was at when it began, also an event of autograd's threads. Times of events are microseconds.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Any, Literal

from gpumagic.ledger.entry import OFTEN, Ledger
from gpumagic.profiling.cell_profile import Cause, CellProfile, Kind, Moment, Operator, ProfiledLine
from gpumagic.usercode.files import UserLine

CELL, LINE = "user_cell", "user_line"
_HOST, _DEVICE = ("cpu_op", "user_annotation"), ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("_runtime", "_driver")  # ends of categories: "cuda_runtime", "xpu_driver"
_MOMENTS, _GOLDEN = 3000, 0.618
_FIRST: tuple[Kind, ...] = ("loader", "copy", "wait")  # the first that goes on is the cause
_COMPUTES = 0.1
"""A line whose operators take less than this share of its host time is plain Python."""
_EVENT = 2e-6
"""Seconds that torch's profiler takes for an event: benchmarks/profile_cost.py."""
Event = dict[str, Any]
"""An event of the trace; those of the host and the device get the `line` that they belong to."""
Label = UserLine | None


def read_trace(
    trace: Mapping[str, Any], ledger: Ledger | None = None, saved: str = ""
) -> CellProfile:
    """Return the profile of a cell from its trace; `saved` is the file that has it.

    A ledger has the exact counts of copies and waits; without one they are the runtime's.
    """
    found = _Trace(trace["traceEvents"])
    lanes, lines = found.lanes(), _lines(found, ledger)
    moments = tuple(_moments(found, lanes))
    seconds = found.duration / 1e6 * len(moments) / _MOMENTS
    return CellProfile(
        device=found.cell["args"]["device"],
        virtual=found.cell["args"]["virtual"],
        seconds=seconds,
        busy=lanes["kernel"].seconds if found.seen else None,
        lines=lines,
        causes=_causes(moments, seconds, lanes["wait"], () if found.seen else lines),
        moments=moments,
        added=found.added,
        saved=saved,
    )


# -- the events
class _Lane:
    """Stretches of time with a line each; where several overlap, the last one counts."""

    def __init__(self, found: Iterable[Event]) -> None:
        self.events = sorted(found, key=lambda e: e["ts"])
        self._starts = [e["ts"] for e in self.events]
        self._ends: list[float] = []
        self.seconds = 0.0  # in which there is at least one
        for e in self.events:
            last, end = max([*self._ends[-1:], e["ts"]]), _end(e)
            self.seconds += max(end - last, 0.0) / 1e6
            self._ends.append(max(end, last))

    def last(self, time: float) -> tuple[float, Label]:
        """Return when all stretches that began before a time end, and the line of the last."""
        n = bisect_right(self._starts, time) - 1
        return (self._ends[n], self.events[n]["line"]) if n >= 0 else (-inf, None)

    def at(self, time: float) -> tuple[float, Label] | None:
        """Return the same, if that is after the time."""
        found = self.last(time)
        return found if found[0] >= time > -inf else None


class _Trace:
    """The events of a trace, each with its line; those of the host also with their own time."""

    def __init__(self, events: Iterable[Event]) -> None:
        cats: dict[str, list[Event]] = defaultdict(list)
        for e in events:
            if e.get("ph") == "X" and {"dur", "cat", "args"} <= e.keys():
                cat = "host" if e["cat"] in _HOST or e["cat"].endswith(_RUNTIME) else e["cat"]
                cats["device" if cat in _DEVICE else cat].append({**e})
        (self.cell,), self.device = cats[CELL], cats["device"]
        # Without CUPTI, and on virtual GPUs, there are no calls of the runtime either.
        self.seen = any(e["cat"] not in _HOST for e in cats["host"])
        # The profiler waits later, and an error may be shown.
        self.host = [e for e in cats["host"] if e["ts"] <= _end(self.cell)]
        self.host_seconds: dict[Label, float] = defaultdict(float)
        for e in cats[LINE]:
            e["line"] = UserLine(**e["args"])
            self.host_seconds[e["line"]] += e["dur"] / 1e6
        self.lines = _Lane(cats[LINE])
        # Between two lines only the tracing runs.
        self.added = max(self.cell["dur"] / 1e6 - sum(self.host_seconds.values()), 0.0)
        self.added += _EVENT * (len(self.host) + len(self.device))
        self._attribute()
        # The device may work on after the last line.
        end = max(_end(e) for e in (self.cell, *self.device))
        self.start, self.duration = self.cell["ts"], end - self.cell["ts"]

    def _attribute(self) -> None:
        """Give each event its line, and an event of the device the line of what started it."""
        _subtract_inner(self.host)
        started: dict[tuple[str, Any], Event] = {}
        for e in self.host:
            e["line"], e["behind"] = self.lines.last(e["ts"])[1], 0.0
            for key in ("External id", "correlation"):
                started[key, e["args"].get(key)] = e
        for e in self.device:
            ids = [(key, e["args"].get(key, -1)) for key in ("External id", "correlation")]
            starter = next((started[each] for each in ids if each in started), None)
            e["line"] = starter["line"] if starter else self.lines.last(e["ts"])[1]
            if starter:
                starter["behind"] += e["dur"] / 1e6

    def lanes(self) -> dict[str, _Lane]:
        """Return what the cell's thread did, by cause, and the lanes of its device."""
        found: dict[str, list[Event]] = defaultdict(list)
        for e in self.host:
            if e["tid"] == self.cell["args"]["thread"]:
                found[_kind(e)].append(e)
        number = self.cell["args"]["device"].rpartition(":")[2]
        for e in self.device:
            if str(e["args"].get("device", 0)) == number:
                found[e["cat"]].append(e)
        found["copy"] += found["gpu_memcpy"]
        kinds = ("loader", "copy", "wait", "launch", "kernel", "gpu_memcpy")
        return {kind: _Lane(found[kind]) for kind in kinds}


def _end(e: Event) -> float:
    return float(e["ts"] + e["dur"])


def _subtract_inner(events: list[Event]) -> None:
    """Give events of the host their `own` time, without the events inside them, and `calls`.

    As in torch's table, the only event inside one of its name is no call.
    """
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
        if len(only := inner[id(e)]) == 1:
            only[0]["calls"] = int(only[0]["name"] != e["name"])


def _kind(e: Event) -> Kind | Literal[""]:
    """Return which cause an event of the host is; a range of the user's is none."""
    name = e["name"]
    if e["cat"] not in _HOST:
        return "wait" if "Synchronize" in name else "copy" if "Memcpy" in name else "launch"
    if name.startswith("enumerate(DataLoader)"):
        return "loader"
    return "launch" if e["cat"] == "cpu_op" else ""


# -- the lines
def _counts(found: _Trace, ledger: Ledger | None) -> tuple[Counter[Label], Counter[Label]]:
    """Return the copies and the waits of each line."""
    if ledger is None:
        moves = (e for e in found.device if e["cat"] == "gpu_memcpy" and "DtoD" not in e["name"])
        waits = (e for e in found.host if _kind(e) == "wait")
        return Counter(e["line"] for e in moves), Counter(e["line"] for e in waits)
    counts: dict[str, Counter[Label]] = defaultdict(Counter)
    for entry in ledger.entries:
        counts[entry.kind][entry.where] += entry.count
    return counts["copy"], counts["wait"]


def _lines(found: _Trace, ledger: Ledger | None) -> tuple[ProfiledLine, ...]:
    """Return the lines with their operators, the dearest first."""
    copies, waits = _counts(found, ledger)
    device: dict[Label, float] = defaultdict(float)
    launches = Counter[Label]()
    for e in found.device:
        device[e["line"]] += e["dur"] / 1e6
        launches[e["line"]] += e["cat"] == "kernel"
    sums: dict[Label, dict[str, Operator]] = defaultdict(dict)
    for e in found.host:
        name = e["name"]
        _, calls, host, there = sums[e["line"]].get(name, Operator(name, 0, 0.0, 0.0))
        there = (there or 0.0) + e["behind"] if found.seen else None
        sums[e["line"]][name] = Operator(name, calls + e["calls"], host + e["own"], there)
    made = [
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
    ]
    return tuple(sorted(made, key=lambda each: -max(each.host, each.device or 0.0)))


# -- the causes
def _moments(found: _Trace, lanes: dict[str, _Lane]) -> Iterator[Moment]:
    """Yield what happened at evenly distributed times, never in step with a loop.

    Without the moments in which nothing but the tracing of lines runs.
    """
    inside: dict[Label, float] = defaultdict(float)
    for e in found.host:
        inside[e["line"]] += e["own"] * (_kind(e) == "launch")
    seconds = found.host_seconds
    computing = {line for line in seconds if inside[line] > _COMPUTES * seconds[line]}
    for n in range(_MOMENTS):
        time = found.start + found.duration * (n + n * _GOLDEN % 1) / _MOMENTS
        here, busy = found.lines.at(time), lanes["kernel"].at(time) is not None
        copying = lanes["gpu_memcpy"].at(time) is not None
        if here or busy or copying:
            line = here[1] if here else None
            cause = None if busy else _cause(time, line, lanes, computing)
            yield Moment(line, busy, copying, cause)


def _cause(time: float, line: Label, lanes: dict[str, _Lane], computing: set[Label]) -> Cause:
    """Return why no kernel ran at a time: what the host did, or the wait that emptied the queue."""
    for kind in _FIRST:
        if stretch := lanes[kind].at(time):
            return Cause(kind, stretch[1])
    # Between two operators of a line, Python prepares the next one.
    if line not in computing and not lanes["launch"].at(time):
        return Cause("python", line)
    waited = lanes["wait"].at(lanes["kernel"].last(time)[0])
    return Cause("wait", waited[1]) if waited else Cause("launch", line)


def _causes(
    moments: tuple[Moment, ...], whole: float, waits: _Lane, unseen: tuple[ProfiledLine, ...]
) -> tuple[Cause, ...]:
    """Return each kind of cause with its seconds and its most frequent line, the longest first.

    Copies and waits of `unseen` lines are counted: on a virtual GPU they take no time.
    """
    counts: dict[Kind, Counter[Label]] = defaultdict(Counter)
    for cause in filter(None, (moment.cause for moment in moments)):
        counts[cause.kind][cause.where] += 1
    each = whole / max(len(moments), 1)
    seconds = {kind: each * by_line.total() for kind, by_line in counts.items()}
    # In the time of its waits, the host could have launched what came next.
    late = max(waits.seconds - seconds.get("wait", 0.0), 0.0)
    if late := min(seconds.get("launch", 0.0), late):
        seconds["launch"] -= late
        seconds["wait"] = seconds.get("wait", 0.0) + late
        counts["wait"] = Counter(e["line"] for e in waits.events)
    order = sorted(seconds, key=lambda kind: -seconds[kind])
    timed = (Cause(kind, counts[kind].most_common(1)[0][0], seconds[kind]) for kind in order)
    often = [Cause("wait", line.where, times=line.waits) for line in unseen]
    often += [Cause("copy", line.where, times=line.copies) for line in unseen]
    often = sorted((c for c in often if c.times >= OFTEN), key=lambda c: -c.times)
    return (*often[:1], *timed, *often[1:])
