"""Read a trace of torch's profiler, with the user's lines: sums by line, and causes of idle time.

The input is Chrome's trace format as kineto writes it, and two categories of ours: `CELL` is the
whole cell, `LINE` a stretch in which one line ran. An event belongs to the line that the cell's
thread was at when it began, also an event of autograd's threads. Times of events are microseconds.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from gpumagic.ledger.advice import OFTEN
from gpumagic.ledger.entry import Ledger
from gpumagic.profiling.cell_profile import (
    Cause,
    CellProfile,
    Kind,
    Moment,
    Operator,
    ProfiledLine,
)
from gpumagic.usercode.files import UserLine

CELL, LINE = "user_cell", "user_line"
_HOST, _DEVICE = ("cpu_op", "user_annotation"), ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("_runtime", "_driver")  # ends of categories: "cuda_runtime", "xpu_driver"
_MOMENTS, _GOLDEN = 3000, 0.618
# Causes by their lane; the first that goes on counts.
_FIRST: tuple[tuple[Kind, str], ...] = (
    ("loader", "loader"),
    ("copy", "gpu_memcpy"),
    ("wait", "wait"),
    ("copy", "copy"),
)
_COMPUTES = 0.1
"""A line whose operators take less than this share of its host time is plain Python."""
_MAIN = 0.3
"""A share of the time that matters more than any number of copies and waits."""
_EVENT = 2e-6
"""Seconds that torch's profiler takes for an event: benchmarks/profile_cost.py."""
Event = Mapping[str, Any]
Label = UserLine | None


class _Lane:
    """Stretches of time with a line each; where several overlap, the last one counts."""

    def __init__(self, found: Iterable[tuple[Event, Label]]) -> None:
        self._found = sorted(found, key=lambda stretch: stretch[0]["ts"])
        self._starts = [event["ts"] for event, _ in self._found]
        self.lines = Counter(line for _, line in self._found)
        self._ends: list[float] = []
        self.seconds = 0.0  # in which there is at least one
        for event, _ in self._found:
            last, end = max([*self._ends[-1:], event["ts"]]), _end(event)
            self.seconds += max(end - last, 0.0) / 1e6
            self._ends.append(max(end, last))

    def last(self, time: float) -> tuple[float, Label] | None:
        """Return when all stretches that began before a time end, and the line of the last."""
        n = bisect_right(self._starts, time) - 1
        return (self._ends[n], self._found[n][1]) if n >= 0 else None

    def at(self, time: float) -> tuple[float, Label] | None:
        """Return the same, if that is after the time."""
        found = self.last(time)
        return found if found and found[0] >= time else None


class _Trace:
    """The events of a trace, each with its line."""

    def __init__(self, events: Iterable[Event]) -> None:
        cats: dict[str, list[Event]] = defaultdict(list)
        for e in events:
            if e.get("ph") == "X" and {"dur", "cat", "args"} <= e.keys():
                cat = "host" if e["cat"] in _HOST or e["cat"].endswith(_RUNTIME) else e["cat"]
                cats["device" if cat in _DEVICE else cat].append(e)
        (self.cell,) = cats[CELL]
        # Without CUPTI, and on virtual GPUs, there are no calls of the runtime either.
        self.seen = any(e["cat"] not in _HOST for e in cats["host"])
        ended = _end(self.cell)
        # The profiler waits later, and an error may be shown.
        cats["host"] = [e for e in cats["host"] if e["ts"] <= ended]
        self.lines = _Lane((e, _line(e["args"])) for e in cats[LINE])
        self.host_seconds: dict[Label, float] = defaultdict(float)
        for e in cats[LINE]:
            self.host_seconds[_line(e["args"])] += e["dur"] / 1e6
        # Between two lines only the tracing runs.
        self.added = max(self.cell["dur"] / 1e6 - sum(self.host_seconds.values()), 0.0)
        self.added += _EVENT * (len(cats["host"]) + len(cats["device"]))
        self.own: list[tuple[Event, Label, float, int]] = [
            (e, self._at(e), own, call) for e, own, call in _without_inner(cats["host"])
        ]
        by_id = {e["args"].get("External id"): n for n, (e, *_) in enumerate(self.own)}
        by_call = {e["args"].get("correlation"): n for n, (e, *_) in enumerate(self.own)}
        self.device: list[tuple[Event, Label, int | None]] = []  # and the event that started it
        for e in cats["device"]:
            n = by_id.get(e["args"].get("External id", -1))
            n = by_call.get(e["args"].get("correlation", -1)) if n is None else n
            self.device.append((e, self._at(e) if n is None else self.own[n][1], n))
        # The device may work on after the last line.
        end = max(_end(e) for e in (self.cell, *cats["device"]))
        self.start, self.duration = self.cell["ts"], end - self.cell["ts"]

    def _at(self, e: Event) -> Label:
        found = self.lines.last(e["ts"])
        return found[1] if found else None

    def lanes(self) -> dict[str, _Lane]:
        """Return what the cell's thread did, by cause, and the lanes of its device."""
        found: dict[str, list[tuple[Event, Label]]] = defaultdict(list)
        for e, line, *_ in self.own:
            if e["tid"] == self.cell["args"]["thread"]:
                found[_kind(e)].append((e, line))
        number = self.cell["args"]["device"].rpartition(":")[2]
        for e, line, _ in self.device:
            if str(e["args"].get("device", 0)) == number and e["cat"] != "gpu_memset":
                found[e["cat"]].append((e, line))
        kinds = ("loader", "copy", "wait", "launch", "kernel", "gpu_memcpy")
        return {kind: _Lane(found[kind]) for kind in kinds}


def _end(e: Event) -> float:
    return float(e["ts"] + e["dur"])


def _line(args: Event) -> UserLine:
    return UserLine(args["line"], args["source"], args["function"], args["file"])


def _without_inner(events: list[Event]) -> Iterator[tuple[Event, float, int]]:
    """Yield events of the host, each with its time without the events inside it, and 1.

    It is 0, not a call, for the only event inside one of its name, as in torch's table.
    """
    order = sorted(events, key=lambda e: (str(e["tid"]), e["ts"], -e["dur"]))
    own, outer, inner = [e["dur"] for e in order], [-1] * len(order), Counter[int]()
    stack: list[int] = []
    for n, e in enumerate(order):
        while stack and (order[stack[-1]]["tid"] != e["tid"] or _end(order[stack[-1]]) <= e["ts"]):
            stack.pop()
        if stack:
            outer[n] = stack[-1]
            own[outer[n]] -= e["dur"]
            inner[outer[n]] += 1
        stack.append(n)
    for n, e in enumerate(order):
        same = outer[n] >= 0 and inner[outer[n]] == 1 and order[outer[n]]["name"] == e["name"]
        yield e, own[n], int(not same)


def _kind(e: Event) -> Kind | Literal[""]:
    """Return which cause an event of the host is; a range of the user's is none."""
    name = e["name"]
    if e["cat"] not in _HOST:
        return "wait" if "Synchronize" in name else "copy" if "Memcpy" in name else "launch"
    if name.startswith("enumerate(DataLoader)"):
        return "loader"
    return "launch" if e["cat"] == "cpu_op" else ""


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


def _counts(found: _Trace, ledger: Ledger | None) -> tuple[Counter[Label], Counter[Label]]:
    """Return the copies and the waits of each line."""
    copies, waits = Counter[Label](), Counter[Label]()
    if ledger is None:
        waits.update(line for e, line, *_ in found.own if _kind(e) == "wait")
        moves = (e for e in found.device if e[0]["cat"] == "gpu_memcpy")
        copies.update(line for e, line, _ in moves if "DtoD" not in e["name"])
    for entry in ledger.entries if ledger is not None else ():
        if entry.kind in ("copy", "wait"):
            (copies if entry.kind == "copy" else waits)[entry.where] += entry.count
    return copies, waits


def _lines(found: _Trace, ledger: Ledger | None) -> tuple[ProfiledLine, ...]:
    """Return the lines with their operators, the dearest first."""
    copies, waits = _counts(found, ledger)
    behind: dict[int | None, float] = defaultdict(float)
    device: dict[Label, float] = defaultdict(float)
    launches = Counter[Label]()
    for e, line, started in found.device:
        behind[started] += e["dur"] / 1e6
        device[line] += e["dur"] / 1e6
        launches[line] += e["cat"] == "kernel"
    sums: dict[Label, dict[str, Operator]] = defaultdict(dict)
    for n, (e, line, own, call) in enumerate(found.own):
        name = e["name"]
        _, calls, host, there = sums[line].get(name, Operator(name, 0, 0.0, 0.0))
        there = (there or 0.0) + behind[n] if found.seen else None
        sums[line][name] = Operator(name, calls + call, host + own / 1e6, there)
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


def _moments(found: _Trace, lanes: dict[str, _Lane]) -> Iterator[Moment]:
    """Yield what happened at evenly distributed times, never in step with a loop.

    Without the moments in which nothing but the tracing of lines runs.
    """
    inside: dict[Label, float] = defaultdict(float)
    for e, line, own, _ in found.own:
        inside[line] += own / 1e6 * (_kind(e) == "launch")
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
    for kind, lane in _FIRST:
        if stretch := lanes[lane].at(time):
            return Cause(kind, stretch[1], None)
    # Between two operators of a line, Python prepares the next one.
    if line not in computing and not lanes["launch"].at(time):
        return Cause("python", line, None)
    ended = lanes["kernel"].last(time)
    waited = lanes["wait"].at(ended[0]) if ended else None
    return Cause("wait", waited[1], None) if waited else Cause("launch", line, None)


def _causes(
    moments: tuple[Moment, ...], whole: float, waits: _Lane, unseen: tuple[ProfiledLine, ...]
) -> tuple[Cause, ...]:
    """Return each kind of cause with its seconds and its most frequent line, the longest first.

    Copies and waits of `unseen` lines are counted: on a virtual GPU they take no time.
    """
    counts: dict[Kind, Counter[Label]] = defaultdict(Counter)
    for moment in moments:
        if moment.cause:
            counts[moment.cause.kind][moment.cause.where] += 1
    each = whole / max(len(moments), 1)
    seconds = {kind: each * by_line.total() for kind, by_line in counts.items()}
    # In the time of its waits, the host could have launched what came next.
    late = min(seconds.get("launch", 0.0), max(waits.seconds - seconds.get("wait", 0.0), 0.0))
    if late:
        seconds["launch"] -= late
        seconds["wait"] = seconds.get("wait", 0.0) + late
        counts["wait"] = waits.lines
    causes = [
        Cause(kind, counts[kind].most_common(1)[0][0], time) for kind, time in seconds.items()
    ]
    causes.sort(key=lambda cause: -(cause.seconds or 0.0))
    often: list[tuple[int, Kind, Label]] = []
    for line in unseen:
        often += [(line.waits, "wait", line.where), (line.copies, "copy", line.where)]
    often = sorted((c for c in often if c[0] >= OFTEN), key=lambda c: -c[0])
    main = [c for c in causes if c.kind in ("loader", "python")]
    main = [c for c in main if seconds[c.kind] > _MAIN * whole]
    if not often:
        return tuple(causes)
    rest = [cause for cause in causes if cause not in main]
    return (*main, *(Cause(kind, where, None) for _, kind, where in often), *rest)
