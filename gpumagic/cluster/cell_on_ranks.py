"""Run a cell on ranks: send code and variables, show output, stop failed and hanging cells.

A *rank* is a process with one GPU. A *part* is a share of the variables in ``--split``. Each rank
gets one part, or takes parts of ``--chunk`` items from a queue. The cell runs once for each part.
"""

import ast
import linecache
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any
from uuid import uuid4

import ipyparallel

from gpumagic.cluster import engine, sending
from gpumagic.cluster.engine import CellOrder, ErrorInRank, Outcome
from gpumagic.cluster.engines import Engines, RankEngine
from gpumagic.cluster.output import RankTime, show_new
from gpumagic.cluster.scattered import Sharing, SplitValues, check
from gpumagic.cluster.sending import Wants
from gpumagic.display.progress_line import ProgressLine
from gpumagic.display.units import duration, size
from gpumagic.errors import GpuError, show_as
from gpumagic.isolation.settings import noted
from gpumagic.usercode.files import label, shell, user_namespace
from gpumagic.usercode.variables import names_assigned, names_read, variables_read

# Replace an interrupted rank if the user's code still runs GRACE_S seconds after the rank noticed
# the interrupt. Replace a rank that still runs the cell _LONGEST_S seconds after the interrupt.
GRACE_S, _LONGEST_S = 5.0, 30.0
HANGS_S = 5.0  # ranks that wait at different places for this many seconds are deadlocked
_LOOK_S, _SAY_S = 0.02, 0.25  # seconds to wait for a reply, and between progress lines
_IMPATIENT = 3  # after this many presses of Ctrl-C, the next press raises KeyboardInterrupt at once


class RanksError(Exception):
    """An error in a rank, shown as the rank's traceback without gpumagic's frames."""

    def __init__(self, rank: int, error: ErrorInRank, ranks: int, notes: Sequence[str]) -> None:
        place = f", {error.place}" if error.place else ""
        super().__init__(f"rank {rank}{place}: {error}")
        others = " (the other ranks were stopped)" * (ranks > 1)
        shown = [f"error in rank {rank}{others}:", error.lines, *(f"  → {each}" for each in notes)]
        show_as(self, lambda: ["\n".join(shown)])


class CellOnRanks:
    """Run one cell on ranks, once per part of the split variables. Call `deliver`, then `run`."""

    def __init__(
        self,
        engines: Engines,
        ranks: Sequence[RankEngine],
        tree: ast.Module,
        file: str,
        asked: Sharing,
        line: ProgressLine,
    ) -> None:
        space, ipython = user_namespace(), shell()
        check(asked, tree, space)
        self.ranks, self.asked = list(ranks), asked
        self._engines, self._line = engines, line
        self.split = SplitValues(asked, space, len(ranks))
        self._queues = dict(zip(ranks, self.split.queues, strict=True))
        there = sending.file_in_rank(file)
        self._sources = {there: "".join(linecache.getlines(file))}
        read = names_read(tree, ipython.transform_cell if ipython else str)
        whole = {name: value for name, value in space.items() if name not in asked.split}
        for name in [n for n, value in engines.pulled.items() if whole.get(n) is value]:
            del whole[name]
        self._values, self._fingerprints = sending.fingerprints_of(
            variables_read(read, whole), whole, ipython.user_ns_hidden if ipython else {}
        )
        assigned = sending.fingerprints_here(names_assigned(tree))
        self._order = CellOrder(uuid4().hex, tree, there, self._sources, asked.made, assigned)
        self.sent = dict.fromkeys(asked.split)  # names of the sent variables, for the report
        self.sent_bytes = 0
        # variables not sent, because both the notebook and a rank changed them
        self.kept: dict[str, None] = {}
        self._running: dict[RankEngine, tuple[int, Any]] = {}  # number of the part, pending reply
        self.outcomes: dict[int, Outcome] = {}  # by the part's number
        self.failed: tuple[int, ErrorInRank] | None = None  # the rank that failed first, its error
        self.interrupted = False  # by Ctrl-C
        self.replaced: list[RankEngine] = []  # ranks that did not end the cell in time
        self._signaled: float | None = None  # when the ranks were told to end the cell
        self._presses: list[Any] = []  # presses of Ctrl-C
        self._said = 0.0  # when the last progress line was shown, in seconds of the run
        self._shown = defaultdict[tuple[int, int], Counter[str]](Counter)  # output shown so far

    def deliver(self) -> None:
        """Send the variables that the ranks lack. Raise `GpuError` or `RanksError`."""
        busy = [rank for rank in self.ranks if self._queues[rank]]  # ranks that have a part
        groups: dict[str, tuple[Wants, list[RankEngine]]] = {}  # ranks that lack the same variables
        if self._fingerprints:
            found = self._engines.answers(busy, sending.wanted, self._fingerprints)
            for rank, wants in zip(busy, found, strict=True):
                groups.setdefault(repr(wants), (wants, []))[1].append(rank)
        for wants, ranks in groups.values():
            self._send(ranks, wants)

    def _send(self, ranks: Sequence[RankEngine], wants: Wants) -> None:
        values = {n: value for n, value in self._values.items() if n in wants.names}
        fingerprints = {name: self._fingerprints[name] for name in (*values, *wants.kept)}
        if not fingerprints:
            return
        data = sending.pack(values, wants.tensors, self._sources) if values else b""
        self.sent_bytes += len(data) * len(ranks)
        self.kept |= dict.fromkeys(wants.kept)
        for name, value in values.items():
            if not isinstance(value, ModuleType):
                self.sent[f"{name} again" if wants.names[name] else name] = None
        refused = self._engines.answers(ranks, sending.receive, data, fingerprints)
        for rank, why in zip(ranks, refused, strict=True):
            if why:
                raise RanksError(rank.number, ErrorInRank(why, "", "", why), 1, ())

    def run(self) -> None:
        """Run the cell on all ranks; after an interrupt, replace ranks that do not stop."""
        began = time.monotonic()
        with noted(lambda *signaled: self._presses.append(signaled), _IMPATIENT):
            for rank in self.ranks:
                self._next(rank)
            while self._running:
                self._look()
                self._say(time.monotonic() - began)
            try:
                if self.replaced:
                    self._engines.replace(self.replaced, self._line.update)
            except GpuError:
                for rank in self.replaced:
                    rank.lost = rank.lost or "it did not stop, and could not be replaced"
                raise

    def times(self) -> Iterator[RankTime]:
        for rank in self.ranks:
            every = (each for each in self.outcomes.values() if each.rank == rank.number)
            if mine := [each for each in every if each.error is None]:
                peak = max((each.peak for each in mine if each.peak is not None), default=None)
                seconds, virtual = sum(each.seconds for each in mine), rank.about["virtual"]
                yield RankTime(f"rank {rank.number}", seconds, peak, len(mine), virtual)

    def transfers(self) -> Iterator[str]:
        done = self.outcomes.values()
        if moved := sum(each.moved for each in done):
            yield f"{size(moved)} moved to the ranks' GPUs"
        back = sum(len(each.value) + sum(map(len, each.kept.values())) for each in done)
        if back > 2**16:
            yield f"{size(back)} returned"

    def broke_the_group(self) -> bool:
        if self.replaced:
            return False  # the group was recreated with the replacement
        # Unequal numbers of collectives break the group, and so does an interrupted collective.
        outcomes = self.outcomes.values()
        begun = {outcome.rank: outcome.collectives for outcome in outcomes}
        apart = len(self.ranks) == len(self._engines.ranks) and len({*begun.values()}) > 1
        return apart or any(outcome.cut for outcome in outcomes)

    def _next(self, rank: RankEngine) -> None:
        queue = self._queues[rank]
        if queue and self._signaled is None:
            part = queue.popleft()
            self._running[rank] = part, None
            given = sending.pack(self.split.part(part)) if self.asked.split else b""
            self.sent_bytes += len(given)
            order = replace(self._order, label=self._label(rank), given=given)
            with suppress(GpuError):  # the rank has died; `_look` reports why
                self._running[rank] = part, self._engines.ask(rank, engine.run, order)

    def _label(self, rank: RankEngine) -> str:
        return str(rank.number) if len(self.ranks) > 1 else ""

    def _look(self) -> None:
        if pending := [rank for rank, (_, asked) in self._running.items() if asked]:
            self._running[pending[0]][1].wait(_LOOK_S)
        if self._presses:
            self.interrupted = True
            self._signal()
        for rank in pending:
            part, asked = self._running[rank]
            # The reply may arrive before the last output, so wait up to 1 s for the output.
            over = asked.ready() and asked.wait_for_output(1)
            show_new(asked.metadata, self._shown[rank.number, part], self._label(rank))
            if over:
                self._take(rank, part, asked)
        self._engines.check()
        for rank in [*self._running]:
            if rank.lost:  # the death may have caused the error in `failed`, so replace the error
                del self._running[rank]
                self._fail(rank.number, "died", rank.lost, "", rank.died)
        if self._signaled is None:
            self._end_a_deadlock()
        else:
            self._give_up(time.monotonic() - self._signaled)

    def _give_up(self, waited: float) -> None:
        """Give up ranks that have not ended the cell in time. `run` later replaces these ranks."""
        # After a second Ctrl-C, do not wait for the ranks.
        now = len(self._presses) > 1 or waited > _LONGEST_S
        for rank in [*self._running]:
            if now or self._engines.pulse(rank, self._order.cell).get("ending_s", 0.0) > GRACE_S:
                self.replaced.append(rank)
                del self._running[rank]

    def _take(self, rank: RankEngine, part: int, asked: Any) -> None:
        try:
            outcome: Outcome = asked.get(0)
        except ipyparallel.error.RemoteError as error:
            if error.ename == "EngineError":
                return  # the rank has died; `_look` reports why
            lines = "\n".join(error.render_traceback())
            failure = ErrorInRank(str(error.ename), str(error.evalue), "", lines)
            outcome = Outcome(rank.number, error=failure)
        del self._running[rank]
        self.outcomes[part] = outcome
        if outcome.error is not None:
            # Keep only the first error. `_signal` interrupts the other ranks, which then fail too.
            if self._signaled is None:
                self.failed = rank.number, outcome.error
            self._signal()
        self._next(rank)

    def _fail(self, rank: int, kind: str, message: str, place: str, words: str) -> None:
        self.failed = rank, ErrorInRank(kind, message, place, f"RanksError: {words}")
        self._signal()

    def _signal(self) -> None:
        if self._signaled is None:
            self._signaled = time.monotonic()
            self._engines.interrupt(self._order.cell)

    def _end_a_deadlock(self) -> None:
        """Fail the cell if all its running ranks wait, unless all ranks wait at the same place."""
        waits = {rank.number: self._engines.pulse(rank, self._order.cell) for rank in self._running}
        hang = (where and where["call"] and where["idle"] >= HANGS_S for where in waits.values())
        if not waits or not all(hang):
            return
        said = {n: f"waits in {w['call']} ({_place(w)})" for n, w in waits.items()}
        for rank in self._engines.ranks:
            ended = "has ended the cell" if rank in self.ranks else "does not run this cell"
            said.setdefault(rank.number, ended)
        if len({*said.values()}) > 1:
            words = "; ".join(f"rank {number} {does}" for number, does in said.items())
            first = min(waits)
            self._fail(first, "deadlock", words, _place(waits[first]), f"deadlock: {words}")

    def _say(self, seconds: float) -> None:
        if seconds < self._said + _SAY_S:
            return
        self._said = seconds
        parts = [f"{len(self.outcomes)} of {self.split.total} parts"] if self.asked.chunk else []
        for rank in [rank for rank in self.ranks if rank in self._running][:8]:
            where = self._engines.pulse(rank, self._order.cell)
            at = f"line {where['line']} {where['bar']}" if where and where["line"] else "runs"
            parts.append(f"rank {rank.number} {at}".rstrip())
        self._line.update(" · ".join([duration(seconds), *parts]))


def _place(where: dict[str, Any]) -> str:
    return f"{label(where['file'])}, line {where['line']}"
