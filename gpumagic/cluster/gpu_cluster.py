"""Start this notebook's cluster, run cells on its ranks, fetch their variables, end it."""

import ast
import atexit
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gpumagic.cluster import engine, launching
from gpumagic.cluster.cell_on_ranks import CellOnRanks, Ended, died
from gpumagic.cluster.checkpoints import Checkpoints
from gpumagic.cluster.engines import Engines, RankEngine, RanksError, interrupt, named, others
from gpumagic.cluster.rank_messages import (
    Orders,
    Whole,
    foretell,
    taken_as_sent,
    to_be_sent,
    values_of,
)
from gpumagic.cluster.rank_states import RankHosts, rows_of
from gpumagic.cluster.ranks_report import RanksReport, RanksTable
from gpumagic.cluster.scattered import Sharing, put_together, said
from gpumagic.display.progress_line import ProgressLine
from gpumagic.display.units import some
from gpumagic.dryrun import DryRun
from gpumagic.errors import GpuError
from gpumagic.usercode.files import shell, user_namespace

_LOOK_S = 0.5
_REWRAP = "the process group was made anew: wrap modules in DDP or fully_shard again"


class GpuCluster:
    """The ranks of a cluster; `gpumagic.cluster` starts one.

    A context manager: at its end everything is stopped.

    Attributes
    ----------
    size : int
        How many ranks there are.
    last_report : RanksReport or None
        Of the cell that ran last.
    hosts : RankHosts
        The other hosts on which there are ranks.
    checkpoint, restore : `Checkpoints.save` and `Checkpoints.restore`
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.last_report: RanksReport | None = None
        self._broken = False
        self._busy = threading.Lock()
        self.hosts = RankHosts(engines)
        self.checkpoints = Checkpoints(self)
        self.checkpoint, self.restore = self.checkpoints.save, self.checkpoints.restore
        threading.Thread(target=self._watch, daemon=True).start()
        atexit.register(self.stop)

    @property
    def stopped(self) -> bool:
        return self._engines.stopped

    @property
    def size(self) -> int:
        return len(self._engines.ranks)

    def __enter__(self) -> "GpuCluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{self.size} ranks: {self._engines.plan.said}"

    # -- cells
    def run(
        self,
        code: str | ast.Module,
        where: str = "@all",
        *,
        file: str = "<code>",
        asked: Sharing | None = None,
        quiet: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        """Run code on ranks, as a cell of the notebook.

        Parameters
        ----------
        code : str or ast.Module
            Python.
        where : str
            ``"@all"``, ``"@1"``, ``"@0,2"``.
        file : str
            What tracebacks call it.
        asked : Sharing, optional
            What is split between the ranks, and put together in the end.
        quiet : bool
            Show no progress.

        Returns
        -------
        values : list or None
            Of the last expression, by rank or part, tensors on the CPU; None if all are None.
        made : dict
            What was gathered and reduced, by name.

        Raises
        ------
        GpuError
            A rank that is not there or has died, a variable that cannot be sent.
        RanksError
            An error of the code in a rank.
        """
        self.last_report = None
        ranks, asked = self._ranks(where), asked or Whole()
        tree = ast.parse(code) if isinstance(code, str) else code
        with self._busy:
            if self._broken:
                self._engines.join()
                self._broken = False
            began = time.perf_counter()
            with ProgressLine(shell(), silent=quiet) as line:
                line.update("sending what the cell reads")
                orders = Orders(tree, file, ranks, asked)
                orders.deliver(self._engines)
                sent_s = time.perf_counter() - began
                self._broken = True  # until it has ended well
                ended = CellOnRanks(self._engines, ranks, orders, line).run()
            self._broken = self._is_broken(ended, len(ranks))
            orders.ended(ended.outcomes.values())
        seconds = time.perf_counter() - began
        told = self._told(ended, ranks, orders, sent_s, seconds)
        if len(ranks) == self.size:
            self.checkpoints.after_cell()
        return told

    def _ranks(self, where: str) -> list[RankEngine]:
        asked = where.removeprefix("@").strip()
        ranks = self._engines.ranks
        if asked != "all":
            numbers = [part.strip() for part in asked.split(",")]
            wrong = [n for n in numbers if not n.isdecimal() or int(n) >= len(ranks)]
            if wrong or len(set(numbers)) < len(numbers):
                there = f"the ranks are 0 to {len(ranks) - 1}"
                raise GpuError(f"@{asked}: {there}; type @all, @0 or @0,1")
            ranks = [ranks[number] for number in sorted(map(int, numbers))]
        if lost := [rank for rank in ranks if rank.lost]:
            raise GpuError(died(lost[0]))
        return ranks

    def _told(
        self,
        ended: Ended,
        ranks: Sequence[RankEngine],
        orders: Orders,
        sent_s: float,
        seconds: float,
    ) -> tuple[Any, dict[str, Any]]:
        """The values that came back; or the error, once the report is written."""
        notes = [
            f"rank {number} did not end: another took its place, and its variables are gone"
            for number in ended.replaced
        ]
        if self._broken or ended.replaced:
            notes.append(_REWRAP)
        if kept := orders.delivery.kept:
            push = f"%gpucluster push {next(iter(kept))} has the notebook's sent"
            notes.append(f"{some(kept)} was changed here and in ranks, which keep theirs; {push}")
        if ended.interrupted:
            notes += [died(rank) for rank in ranks if rank.lost]
        done = [ended.outcomes[n] for n in sorted(ended.outcomes)]
        made: dict[str, Any] = {}
        wrong: list[str] = []
        if ended.failed is None and not ended.interrupted:
            parts = [dict(zip(o.kept, values_of([*o.kept.values()]), strict=True)) for o in done]
            made, wrong = put_together(orders.asked, parts)
        self.last_report = RanksReport(
            tuple(ended.times(ranks)),
            seconds,
            str(orders.shared_out or ""),
            orders.sent,
            orders.sent_bytes,
            sent_s,
            sum(len(o.value) + sum(map(len, o.kept.values())) for o in done),
            sum(o.moved for o in done),
            said(orders.asked, made, len(done)),
            tuple(notes),
            tuple(wrong),
        )
        if ended.interrupted:
            raise interrupt(f"the cell has ended on {named(ranks)}", notes)
        if ended.failed is not None:
            number, error = ended.failed
            raise RanksError(number, error, others(ranks, number), notes)
        values = values_of([o.value for o in done])
        return (None if all(value is None for value in values) else values), made

    def _is_broken(self, ended: Ended, count: int) -> bool:
        """Whether ranks are in different collectives: then the group is of no use any more."""
        if ended.replaced:
            return False  # it was made anew with the replacement
        outcomes = ended.outcomes.values()
        begun = {outcome.rank: outcome.sequence for outcome in outcomes}
        apart = count == self.size and len(set(begun.values())) > 1
        return apart or any(outcome.cut for outcome in outcomes)

    def dry_run(self, tree: ast.Module, file: str, on: str | None = None) -> DryRun:
        """What each rank would need for a cell, and send; on other cards, or where it is."""
        self._ranks("@0")
        with self._busy:
            return foretell(self._engines, tree, file, on)

    # -- values
    def pull(self, *names: str) -> dict[str, list[Any]]:
        """The values of variables by rank, tensors on the CPU.

        Raises
        ------
        GpuError
            A name that no rank has.
        """
        ranks = self._ranks("@all")
        asked = [self._engines.ask(rank, engine.pull, list(names)) for rank in ranks]
        found = [self._engines.answer(each) for each in asked]
        missing = [name for name in names if not any(name in each for each in found)]
        if missing:
            raise GpuError(f"no rank has {some(missing)}; assign it in a cell of %%ongpu @all")
        return {n: values_of([each[n] for each in found if n in each]) for n in names}

    def push(self, *names: str) -> None:
        """Send variables of the notebook with the next cell that reads them, whatever ranks have.

        Raises
        ------
        GpuError
            A name that the notebook does not have.
        """
        missing = [name for name in names if name not in user_namespace()]
        if missing:
            raise GpuError(f"no such variable: {some(missing)}")
        to_be_sent(self._engines.ranks, names)

    def keep(self, *names: str) -> None:
        """Leave variables as they are in the ranks until the notebook's are changed."""
        taken_as_sent(self._engines.ranks, names)

    # -- the ranks
    def status(self) -> RanksTable:
        """Who the ranks are, where, and what they do."""
        return RanksTable(repr(self), rows_of(self._engines))

    def restart(self, *numbers: int) -> None:
        """Start other engines in the place of ranks; the others keep their variables.

        All ranks are in a new process group afterwards. Raises `GpuError`.
        """
        ranks = [self._engines.ranks[n] for n in sorted(set(numbers)) if 0 <= n < self.size]
        if len(ranks) < len(set(numbers)) or not ranks:
            there = f"the ranks are 0 to {self.size - 1}"
            again = "type %gpucluster restart 0"
            raise GpuError(f"restart {', '.join(map(str, numbers))}: {there}; {again}")
        with self._busy, ProgressLine(shell()) as line:
            self._engines.replace(ranks, line.update)
            self._broken = False

    def stop(self) -> None:
        """End all engines, and what they started; what they save is waited for."""
        atexit.unregister(self.stop)
        with suppress(KeyboardInterrupt):
            self.checkpoints.off()
        self._engines.stop()

    def _watch(self) -> None:
        """Hear what hosts do, and say at once when a rank dies while no cell runs to say it."""
        while not self._engines.stopped:
            time.sleep(_LOOK_S)
            self.hosts.listen()
            if not self._busy.acquire(blocking=False):
                continue
            try:
                for rank in self._engines.check():
                    print(died(rank), file=sys.stderr)
            finally:
                self._busy.release()


_current: GpuCluster | None = None


def cluster(
    where: str | int | None = None,
    *,
    slurm: str | None = None,
    partition: str | None = None,
    ssh: str | None = None,
    mpi: int | str | None = None,
    ip: str | None = None,
    python: str | None = None,
) -> GpuCluster:
    """Start an engine for each GPU, and have them join one process group.

    Parameters
    ----------
    where : str or int, optional
        Which GPUs of this machine, or how many: ``"0,1"``, ``"all"``, 2. Where there is no GPU each
        engine has a virtual one.
    slurm, partition : str, optional
        Nodes and GPUs on each, ``"2x8"``, from Slurm.
    ssh : str, optional
        Hosts, ``"host1,host2:4"``, with the number of GPUs after a colon.
    mpi : int, optional
        As many engines as `mpiexec` is to start.
    ip : str, optional
        The address of this machine at which the engines reach it; else the one that leads to them.
    python : str, optional
        Python on the hosts of `ssh`; else the path that it has here.

    Returns
    -------
    GpuCluster
        The ranks; it is also the one that ``%%ongpu @all`` runs on.

    Raises
    ------
    GpuError
        One is running already, or it cannot be started.
    """
    global _current
    if is_running():
        raise GpuError(f"a cluster runs already ({_current!r}); type %gpucluster stop")
    if slurm is not None:
        plan = launching.slurm(slurm, partition, ip)
    elif ssh is not None:
        plan = launching.ssh(ssh, ip, python)
    elif mpi is not None:
        plan = launching.mpi(str(mpi), ip)
    else:
        plan = launching.local(None if where is None else str(where))
    engines = Engines(plan, launching.virtual_memory(plan))
    try:
        with ProgressLine(shell()) as line:
            engines.start(line.update)
        _current = GpuCluster(engines)
    except BaseException:
        engines.stop()
        raise
    return _current


def current() -> GpuCluster:
    """The cluster of this notebook; raises `GpuError` where there is none."""
    if _current is None or _current.stopped:
        raise GpuError("no cluster runs; type %gpucluster start")
    return _current


def is_running() -> bool:
    """Whether there is one."""
    return _current is not None and not _current.stopped
