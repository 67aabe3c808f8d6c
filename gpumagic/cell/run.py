"""Run one cell on a device: move its variables there, create new arrays there, and report."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, cast

from gpumagic import faults
from gpumagic.cell.report import FOR_GOOD, Batches, Report, keep_last
from gpumagic.device import Device, cuda_state, has_virtual
from gpumagic.display.table import Shown
from gpumagic.display.units import size
from gpumagic.errors import GpuError
from gpumagic.faults import first_line
from gpumagic.frameworks.framework import Framework, device_of, library_of, nbytes_of
from gpumagic.frameworks.known import in_use, torch_itself
from gpumagic.ledger.entry import Entry, Ledger, Memory, Tally
from gpumagic.moving.moved import DATASET_STAYS, Left, Moves, Origins, all_of
from gpumagic.usercode.files import innermost
from gpumagic.usercode.values import defined_in, is_tensor
from gpumagic.usercode.variables import own_variables, variables_read

_NO_LIBRARIES = ("torch", "builtins", "__main__")  # `left_alone` skips classes of these modules
_NOTHING = "the cell allocated nothing there"
LEAST_S = 1.0  # a report says `_NOTHING` only of cells that took at least this many seconds


class _Share:
    """Record one framework's moves, new arrays and memory during a cell."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.moves = Moves()
        self.origins: Origins = []  # moved objects and their former devices
        self.placed: Any = None  # the value that `framework.place` yielded
        self.taken: list[str] = []  # replaced GPU names in moved objects: "trainer's cuda:0"
        self.memory: list[Memory] = []
        self.made: dict[str, Any] = {}  # new arrays, by the variable's name

    def move(
        self, read: Sequence[tuple[str, Any]], device: Device, namespace: dict[str, Any], line: Any
    ) -> None:
        self.moves = self.framework.move(read, device, namespace, self.origins, line)
        named = {origin.name: str(origin.device) for _, origin in self.origins if origin.named}
        self.taken += [f"{_whose(name)} {gpu}" for name, gpu in named.items() if gpu != "cpu"]

    @property
    def batches(self) -> list[list[int]]:
        """The bytes of each tensor, for each batch that a loader copied."""
        return getattr(self.placed, "delivered", [])

    @property
    def uncounted(self) -> bool:
        """Whether the cell made arrays whose allocations the framework does not count."""
        return bool(self.made) and not self.framework.counts_allocations

    def remember(self) -> None:
        """Store the former devices of the moved objects, for `%ongpu home`."""
        if self.origins:
            where = innermost()
            self.framework.remember(self.origins, where.label if where else "")
            self.origins.clear()

    def bring_back(self, namespace: dict[str, Any]) -> Moves:
        """Move variables back for `--back`. If the move fails, store the former devices."""
        try:
            moves = self.framework.home(namespace, self.origins)
        except (GpuError, RuntimeError) as error:  # out of memory, or the device failed
            names = ", ".join(dict.fromkeys(origin.name for _, origin in self.origins))
            self.remember()
            return Moves(left=(Left(names, first_line(error)),))
        self.origins.clear()
        return moves

    def elsewhere(self, device: Device, every: Sequence[Entry]) -> str | None:
        """Return where most work ran: "" if on `device`, `_NOTHING` if nowhere, None if unknown."""
        name = "" if self.framework.name == "torch" else self.framework.name
        entries = [entry for entry in every if entry.framework == name]
        counted = self.framework.counts_allocations and device.kind == "cuda"
        said = self._by_allocations(device, entries) if counted else ""
        if not self.framework.counts_allocations or device.kind == "cpu":
            said = self._by_arrays(str(device))
        used = (self.moves.moved, self.moves.left, entries, self.memory, self.uncounted)
        return said if said or any(used) else _NOTHING if counted else None

    def _by_arrays(self, device: str) -> str:
        places = dict.fromkeys(map(self.framework.where, self.made.values()))
        if not places or any(device in place.split(" + ") for place in places):
            return ""
        return f"all arrays that the cell created are on {', '.join(places)}"

    def _by_allocations(self, device: Device, entries: Sequence[Entry]) -> str:
        made = {memory.device: memory.allocations for memory in self.memory}
        here = made.pop(str(device), 0) - sum(map(len, self.batches))
        others = sum(made.values())
        if here > 0:
            part = f"{round(100 * others / (here + others))} % of the cell's allocations"
            return f"{part} were on {', '.join(made)}" if others > here else ""
        if others:
            return f"all work was on {', '.join(made)}"
        of = self.framework
        on_cpu = sum(of.nbytes(array) for array in self.made.values() if of.where(array) == "cpu")
        read = sum(entry.nbytes for entry in entries if entry.kind == "copy")
        # The CPU did the work if variables stayed and none moved, or if new arrays are on the CPU.
        # New CPU arrays with exactly the bytes that the cell copied count as copies of GPU results.
        # A cell without new arrays may have worked in place on the GPU.
        stayed = self.moves.left and not self.moves.moved
        return "all work was on cpu" if stayed or on_cpu not in (0, read) else ""


class Run:
    """Prepare and report one cell: call `start`, run the cell, then always call `finish`."""

    def __init__(
        self,
        device: Device,
        namespace: dict[str, Any],
        names: Iterable[str],  # the variables that the cell reads
        *,
        frameworks: Sequence[Framework] | None = None,  # None means torch only
        unusable: str = "",  # why torch's tensors cannot move; empty if they can
        move: bool = True,
        strict: bool = False,
        table: bool = False,
        back: bool = False,
        said: frozenset[str] = frozenset((FOR_GOOD,)),  # parts of earlier reports, not shown again
        helpers: Sequence[Any] = (),  # each has `start` and `stop`
        recorder: Any = None,  # has `start()`, and `stop(seconds)`, which returns `Report.peak`
        profiler: Any = None,  # has `start`, `stop`, `result` and `stopping` (seconds of `stop`)
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self._where = device, str(device)
        frameworks = [torch_itself()] if frameworks is None else frameworks
        self._shares = [_Share(framework) for framework in frameworks]
        self._namespace = namespace
        self._names = list(names)
        self._left = tuple(left_alone(self._names, namespace, device, unusable))
        self._move, self._back, self._said, self._table = move, back, said, table
        self._strict, self._clock = strict, clock
        self._helpers, self._recorder, self._profiler = helpers, recorder, profiler
        self._tally = Tally()
        self._counting, self._placed = ExitStack(), ExitStack()
        self._undo: ExitStack | None = None  # undoes everything that `start` began
        self._stops: list[Callable[[], Iterable[Memory]] | None] = []
        self._started = self._seconds = 0.0
        self._peak: Shown | None = None
        self._error: str | None = None  # the name of the exception that ended the cell
        self._interrupted = False
        self._fault: str | None = None
        self.left_out = 0.0  # seconds to subtract from the cell's time
        self._complete = True  # False after an error that `_guarded` caught
        self._before: dict[int, Any] = {}  # weak references to the arrays before the cell, by id
        self._stays: dict[str, int] = {}  # ids of the values that were not moved, by name
        self._bound: dict[str, int] = {}  # ids of the variables' values before the cell

    def start(self, line: Callable[[], Any] | None = None) -> None:  # `line` makes a ProgressLine
        """Move variables to the device, and make the device the default for new arrays."""
        for share in self._shares:
            share.framework.own(self.device)  # raises if the device is unusable, before any move
        read = [*self._read()] if self._move else []
        try:
            for share in self._shares if read else ():
                share.move(read, self.device, self._namespace, line)
            left = chain.from_iterable(share.moves.left for share in self._shares)
            self._stays = {x.name: id(self._namespace.get(x.name)) for x in left}
            self._begin()
        except BaseException:
            self._remember()  # so that `%ongpu home` can undo the moves
            raise
        if not self._back:
            self._remember()

    def _read(self) -> Iterator[tuple[str, Any]]:
        return variables_read(self._names, self._namespace, on_host=False)

    def _begin(self) -> None:
        arrays = (array for s in self._shares for _, array in s.framework.arrays(self._namespace))
        self._before = {id(array): weakref.ref(array) for array in arrays}
        if self._back:
            self._bound = {name: id(value) for name, value in self._namespace.items()}
        self._tally.virtual = has_virtual()
        with ExitStack() as undo:
            undo.callback(self._wait)
            # A failure to measure memory or count copies must not stop the cell.
            for share in self._shares:
                begin = partial(share.framework.peak, self.device)
                self._stops.append(self._guarded("measuring a cell's memory", begin))
            for helper in self._helpers:
                self._during(undo, f"running {type(helper).__name__}", helper.start, helper.stop)
            for framework in (share.framework for share in self._shares):
                doing = f"keeping the ledger of {framework.name}"
                self._during(undo, doing, partial(self._count, framework), self._counting.close)
            if self._recorder is not None:
                self._during(undo, "recording memory", self._recorder.start, self._read_peak)
            undo.callback(self._leave)
            for share in self._shares:
                place, space = share.framework.place, self._namespace
                placed = place(self.device, batches=self._move, namespace=space)
                share.placed = self._placed.enter_context(placed)
            if self._profiler is not None:
                self._during(undo, "profiling", self._profiler.start, self._stop_profiler)
            self._undo = undo.pop_all()
        self._started = self._clock()

    def _during(
        self, undo: ExitStack, doing: str, start: Callable[[], Any], stop: Callable[[], Any]
    ) -> None:
        undo.callback(self._guarded, doing, stop)
        self._guarded(doing, start)

    def _count(self, framework: Framework) -> None:
        self._counting.enter_context(framework.count(self._tally, self._strict))

    def _guarded(self, doing: str, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:  # noqa: BLE001  recorded, and reported below the cell
            faults.keep(doing, error)
            self._complete = False

    def _remember(self) -> None:
        for share in self._shares:
            share.remember()

    def finish(self, error: BaseException | None = None) -> Report | None:
        """Stop everything that `start` began, and return the report; None if `start` failed."""
        if self._undo is None:
            return None
        undo, self._undo = self._undo, None
        self._error = None if error is None else type(error).__name__
        self._interrupted = isinstance(error, KeyboardInterrupt)
        try:
            undo.close()  # runs all callbacks, even if Ctrl-C interrupts one of them
            self._find_made()  # must precede the moves back, which change variables
            new = self._new_variables() if self._back else ()
            backs = [s.bring_back(self._namespace) for s in self._shares if s.origins]
            there = [*self._made_there(new)]
        except BaseException:
            self._remember()
            raise
        report = self._report(all_of(backs) if backs else None, there)
        keep_last(report)
        return report

    def _report(self, returned: Moves | None, there: list[str]) -> Report:
        moves = [share.moves for share in self._shares]
        batches = [*chain.from_iterable(share.batches for share in self._shares)]
        ledger = self._ledger()
        return Report(
            device=self.device,
            seconds=self._seconds,
            waited=not self._interrupted and self._fault is None,
            moved=tuple(chain.from_iterable(each.moved for each in moves)),
            left=tuple(self._stayed(returned, bool(batches))),
            move_seconds=sum(each.seconds for each in moves),
            returned=returned,
            results=tuple(there),
            said=self._said,
            batches=Batches(len(batches), sum(map(sum, batches))),
            memory=tuple(chain.from_iterable(share.memory for share in self._shares)),
            peak=self._peak,
            profile=self._profile(ledger),
            ledger=ledger,
            ledger_complete=self._complete,
            table=self._table,
            made=not self._error and any(share.uncounted for share in self._shares),
            taken=tuple(self._taken()),
            elsewhere=self._elsewhere(ledger),
            error=self._error,
            # If CUDA failed permanently, a message below the traceback says so; do not repeat it.
            fault=None if self._error and cuda_state.death() else self._fault,
        )

    def _ledger(self) -> Ledger:
        """Return the ledger of the cell's copies and waits; empty if torch's device has failed."""
        failed = self._fault is not None and any(s.framework.name == "torch" for s in self._shares)
        if failed or not self._tally.counts:
            return Ledger(virtual=self._tally.virtual)
        ledger = self._guarded("reading the ledger of a cell", self._tally.ledger)
        return Ledger() if ledger is None else ledger

    def _stayed(self, returned: Moves | None, batches: bool) -> Iterator[Left]:
        """Yield variables that were not moved, or not moved back."""
        yield from self._left
        # Omit variables that a successful cell assigned, and datasets whose batches were copied.
        for left in chain.from_iterable(share.moves.left for share in self._shares):
            stayed = self._stays[left.name] == id(self._namespace.get(left.name))
            if (stayed or self._error) and not (batches and left.reason == DATASET_STAYS):
                yield left
        yield from returned.left if returned else ()

    def _read_peak(self) -> None:
        self._peak = self._recorder.stop(self._clock() - self._started)

    def _stop_profiler(self) -> None:
        self._profiler.stop()
        self.left_out += self._profiler.stopping

    def _profile(self, ledger: Ledger) -> Shown | None:
        if self._profiler is not None:
            with faults.kept("reading the profile of a cell"):
                return cast(Shown, self._profiler.result(ledger))
        return None

    def _leave(self) -> None:
        began = self._clock()
        self._placed.close()
        self.left_out += self._clock() - began

    def _wait(self) -> None:
        try:
            for share, stop in zip(self._shares, self._stops, strict=True):
                share.memory = [*stop()] if stop else []
                if not self._interrupted:
                    touched = (memory.device for memory in share.memory)
                    share.framework.wait(*dict.fromkeys((self._where, *touched)))
        except Exception as failed:  # noqa: BLE001
            # The wait raises if earlier work on the device failed, or if the device is lost.
            self._fault = first_line(failed)
        finally:
            self._seconds = self._clock() - self._started - self.left_out

    def _find_made(self) -> None:
        for share in self._shares:
            for name, array in share.framework.arrays(self._namespace):
                if self._before.get(id(array), lambda: None)() is not array:
                    share.made[name] = array

    def _new_variables(self) -> Iterable[str]:
        now, bound = own_variables(self._namespace), self._bound
        arrays = {name for share in self._shares for name in share.made}
        return [name for name in now if bound.get(name) != id(now[name]) or name in arrays]

    def _made_there(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the names whose values have arrays on the device; none if the device is the CPU."""
        new = {name: self._namespace[name] for name in names if name in self._namespace}
        for share in self._shares if new and self.device.kind != "cpu" else ():
            there = {self._where, str(share.framework.own(self.device))}  # both "mps" and "mps:0"
            for name, devices in share.framework.away(new).items():
                if not there.isdisjoint(devices):
                    yield name

    def _taken(self) -> Iterator[str]:
        for share in self._shares:
            yield from share.taken
            for library in getattr(share.placed, "taken", ()):
                yield f"{_whose(library)} cuda:0"

    def _elsewhere(self, ledger: Ledger) -> str:
        """Return where most work ran, or `_NOTHING`; empty if on the cell's device, or unknown."""
        if self._error or self._fault or not self._complete:
            return ""
        said = [share.elsewhere(self.device, ledger.entries) for share in self._shares]
        if {*said} == {_NOTHING}:
            return self._nothing()
        found = [sentence for sentence in said if sentence not in (None, _NOTHING)]
        left = "" if self._move else ", where --no-move left the cell's data"
        return found[0] + left if found and all(found) else ""

    def _nothing(self) -> str:
        """Return `_NOTHING` and perhaps why; empty if the cell may have worked in place."""
        of, read = [share.framework for share in self._shares], dict(self._read())
        if any(self._where in places for each in of for places in each.away(read).values()):
            return ""  # the cell may change the data in place
        if not self._move and any([*each.arrays(read)] for each in of):
            return f"{_NOTHING}; --no-move left its data where they were"
        return _NOTHING if self._seconds >= LEAST_S else ""


def _whose(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def left_alone(
    names: Iterable[str], namespace: Mapping[str, Any], device: Device, unusable: str = ""
) -> Iterator[Left]:
    """Yield a `Left` for unsupported arrays on other GPUs and, if `unusable`, for torch tensors."""
    for name in names:
        value = namespace.get(name)
        library = str(defined_in(type(value))).partition(".")[0]
        if unusable and is_tensor(value):
            yield Left(name, unusable)
        elif library not in _NO_LIBRARIES and not any(each.is_array(value) for each in in_use()):
            with faults.kept("asking another library's array where it is"):
                where = device_of(value)
                # Omit arrays on the CPU, such as NumPy's, which belong there.
                if where not in (None, "cpu", str(device)):
                    nbytes = nbytes_of(value) or None
                    yield Left(name, f"{library_of(value)}, on {where}, {size(nbytes)}")
