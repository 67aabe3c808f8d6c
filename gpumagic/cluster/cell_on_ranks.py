"""Run a cell on ranks: send it, show its output, and end it on an error, a hang or Ctrl-C."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import ipyparallel

from gpumagic.cluster import engine
from gpumagic.cluster.engine import ErrorInRank, Outcome
from gpumagic.cluster.engines import Engines, RankEngine, died
from gpumagic.cluster.output import Streamed
from gpumagic.cluster.rank_messages import Orders
from gpumagic.cluster.ranks_report import RankTime
from gpumagic.cluster.this_rank import PULSE
from gpumagic.display.progress_line import ProgressLine
from gpumagic.display.units import duration
from gpumagic.errors import GpuError
from gpumagic.isolation.settings import noted
from gpumagic.usercode.files import label

# A rank that has not ended this long after its interrupt is replaced.
GRACE_S = 5.0
# Ranks that wait for one another, idle, for this long are deadlocked.
HANGS_S = 5.0
# An interrupt may come before the code that it must end, so it is sent again.
_AGAIN_S = 0.5
_LOOK_S, _SAY_S = 0.02, 0.25
_SHOWN = 8
_IMPATIENT = 3


class CellOnRanks:
    """One cell that runs on ranks.

    Attributes
    ----------
    outcomes : dict
        The outcome of each part.
    failed : tuple of int and ErrorInRank, or None
        The rank that failed first, and its error.
    interrupted : bool
        Whether Ctrl-C ended it.
    replaced : list of int
        Ranks that did not end.
    """

    def __init__(
        self, engines: Engines, ranks: Sequence[RankEngine], orders: Orders, line: ProgressLine
    ) -> None:
        self.ranks, self.orders = list(ranks), orders
        self._engines, self._line = engines, line
        self._running: dict[int, tuple[int, Any]] = {}  # by rank: its part, and the answer
        self.outcomes: dict[int, Outcome] = {}
        self.failed: tuple[int, ErrorInRank] | None = None
        self.interrupted = False
        self.replaced: list[int] = []
        self._signaled: float | None = None
        self._signaled_last = 0.0
        self._pressed = 0  # Ctrl-C
        self._said = 0.0
        self._streamed = Streamed([rank.number for rank in ranks])

    def run(self) -> None:
        """Run the orders on the ranks; always ends, since a rank that does not end is replaced."""
        began = time.monotonic()
        with noted(self._press, _IMPATIENT):
            for rank in self.ranks:
                self._next(rank)
            while self._running:
                self._look()
                self._say(time.monotonic() - began)
            self._streamed.end()
            self._replace_stuck()

    def times(self) -> Iterator[RankTime]:
        """Return the time of each rank that ran something."""
        for rank in self.ranks:
            every = (each for each in self.outcomes.values() if each.rank == rank.number)
            if mine := [each for each in every if each.error is None]:
                peak = max((each.peak for each in mine if each.peak is not None), default=None)
                seconds = sum(each.seconds for each in mine)
                virtual = bool(rank.about.get("virtual"))
                yield RankTime(rank.number, seconds, peak, len(mine), virtual)

    def _next(self, rank: RankEngine) -> None:
        """Give a rank its next part, if there is one."""
        queue = self.orders.queues[rank.number]
        if queue and self._signaled is None:
            part = queue.popleft()
            self._running[rank.number] = part, None
            with suppress(GpuError):  # it has died; reported with its cause in a moment
                asked = self._engines.ask(rank, engine.run, self.orders.order(part))
                self._running[rank.number] = part, asked

    def _pending(self) -> list[RankEngine]:
        return [rank for rank in self.ranks if rank.number in self._running]

    def _look(self) -> None:
        pending = [rank for rank in self._pending() if self._running[rank.number][1]]
        if pending:
            self._running[pending[0].number][1].wait(_LOOK_S)
        if self._pressed:
            self._interrupted()
        for rank in pending:
            part, asked = self._running[rank.number]
            # The answer may come before the last output.
            over = asked.ready() and asked.wait_for_output(1)
            self._streamed.take(rank.number, part, asked.metadata)
            if over:
                self._take(rank, part, asked)
        self._engines.check()
        for rank in self._pending():
            if rank.lost:
                self._lost(rank)
        self._end_the_stuck()

    def _take(self, rank: RankEngine, part: int, asked: Any) -> None:
        try:
            outcome: Outcome = asked.get(0)
        except ipyparallel.error.RemoteError as error:
            if error.ename == "EngineError":
                return  # it has died; reported with its cause in a moment
            lines = "\n".join(error.render_traceback())
            failure = ErrorInRank(str(error.ename), str(error.evalue), "", lines)
            outcome = Outcome(rank.number, error=failure)
        del self._running[rank.number]
        self.outcomes[part] = outcome
        if outcome.error is not None:
            # A rank that was interrupted because another failed has not failed itself. A closed
            # connection may follow from another rank's failure and is not the cause.
            failed = self.failed
            victim = failed is not None and failed[1].is_of_the_group
            own = outcome.error.kind != "KeyboardInterrupt" and not outcome.error.is_of_the_group
            if self._signaled is None or (victim and own):
                self.failed = rank.number, outcome.error
            self._signal()
        self._next(rank)

    def _lost(self, rank: RankEngine) -> None:
        """Record that a rank has died; errors that follow in other ranks are not the cause."""
        error = ErrorInRank("it has died", rank.lost, "", f"RanksError: {died(rank)}")
        del self._running[rank.number]
        self.failed = rank.number, error
        self._signal()

    # -- ending
    def _press(self, *_: object) -> None:
        self._pressed += 1

    def _interrupted(self) -> None:
        """Handle Ctrl-C; the second one does not wait for the ranks."""
        self.interrupted = True
        self._signal()
        if self._pressed > 1:
            self._signaled = float("-inf")

    def _signal(self) -> None:
        """Interrupt all ranks that still run."""
        now = time.monotonic()
        if self._signaled is None:
            self._signaled = now
        if now > self._signaled_last + _AGAIN_S:
            self._signaled_last = now
            self._engines.interrupt(self._pending(), self.orders.cell)

    def _end_the_stuck(self) -> None:
        if self._signaled is None:
            self._signal_the_waiting()
        elif time.monotonic() - self._signaled > GRACE_S:
            self.replaced += self._running
            self._running.clear()
        else:
            self._signal()

    # -- waiting for one another
    def _signal_the_waiting(self) -> None:
        """End a deadlocked cell, and report where each rank waits."""
        waits = {rank.number: self._where(rank) for rank in self._pending()}
        stuck = [w for w in waits.values() if w and w["call"] and w["idle"] >= HANGS_S]
        if not stuck or len(stuck) < len(waits):
            return
        every, mine = self._engines.ranks, [rank.number for rank in self.ranks]
        over = [n for n in mine if n not in self._running]
        absent = [rank.number for rank in every if rank.number not in mine]
        if not over and not absent and len({(w["file"], w["line"], w["call"]) for w in stuck}) == 1:
            return
        waiting = [
            f"rank {number} waits in {w['call']} ({_place(w)})" for number, w in waits.items() if w
        ]
        waiting += [f"rank {number} has ended the cell" for number in over]
        waiting += [f"rank {number} does not run this cell" for number in absent]
        number, first = next((n, w) for n, w in waits.items() if w)
        words = "; ".join(waiting)
        lines = f"RanksError: deadlock: {words}"
        self.failed = (number, ErrorInRank("ranks wait", words, _place(first), lines))
        self._signal()

    def _where(self, rank: RankEngine) -> dict[str, Any] | None:
        place = self._engines.read(PULSE.format(rank.number))
        # A report on an earlier cell does not count.
        return place if place and place["cell"] == self.orders.cell else None

    def _say(self, seconds: float) -> None:
        if seconds < self._said + _SAY_S:
            return
        self._said = seconds
        parts = [duration(seconds)]
        if self.orders.asked.chunk:
            parts.append(f"{len(self.outcomes)} of {self.orders.split.total} parts")
        for rank in self.ranks[:_SHOWN]:
            running = rank.number in self._running
            where = self._where(rank) if running else None
            state = "runs" if running else "has ended"
            if where and where["line"]:
                state = f"line {where['line']} {self._streamed.unfinished(rank.number)}".rstrip()
            parts.append(f"rank {rank.number} {state}")
        left = len(self.ranks) - _SHOWN
        self._line.update(" · ".join([*parts, *([f"{left} more"] if left > 0 else [])]))

    def _replace_stuck(self) -> None:
        """Replace ranks that do not end; the user decides about dead ones."""
        stuck = [rank for rank in self.ranks if rank.number in self.replaced]
        try:
            if stuck:
                self._engines.replace(stuck, self._line.update)
        except GpuError:
            for rank in stuck:
                rank.lost = rank.lost or "it did not end its cell"
            raise


def _place(where: dict[str, Any]) -> str:
    return f"{label(where['file'])}, line {where['line']}"
