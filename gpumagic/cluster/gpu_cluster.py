"""Start the notebook's cluster, run cells on its ranks, fetch variables, stop the cluster."""

import ast
import atexit
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from gpumagic.cluster import engine, launching, sending
from gpumagic.cluster.cell_on_ranks import CellOnRanks, RanksError
from gpumagic.cluster.engines import Engines, RankEngine
from gpumagic.cluster.output import RanksReport, RanksTable, sent_in_words
from gpumagic.cluster.scattered import Sharing, put_together, sharing_in_words
from gpumagic.display.progress_line import ProgressLine
from gpumagic.display.units import many, some
from gpumagic.errors import GpuError
from gpumagic.usercode.files import shell

if TYPE_CHECKING:
    from gpumagic.cluster.checkpoints import Checkpoint


class GpuCluster(AbstractContextManager["GpuCluster"]):
    """A cluster of ranks (processes with one GPU each). The end of a `with` block stops it."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.size = len(engines.ranks)  #: the number of ranks
        self.pulled = engines.pulled
        self.last_report: RanksReport | None = None  #: the report of the last cell
        self._broken = False  # whether the process group must be recreated before the next cell
        atexit.register(self.stop)

    @property
    def stopped(self) -> bool:
        return self._engines.stopped

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{many(self.size, 'rank')}: {self._engines.plan.description}"

    def run(
        self,
        code: str | ast.Module,
        where: str = "@all",
        *,
        file: str = "<code>",
        asked: Sharing | None = None,
        quiet: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        """Run code on ranks like a cell of the notebook: send variables, show output.

        Parameters
        ----------
        code : str or ast.Module
            Python code, as text or parsed.
        where : str
            The ranks: ``"@all"``, ``"@1"``, ``"@0,2"``.
        file : str
            The code's file name in tracebacks.
        asked : Sharing, optional
            The variables to split between the ranks, to gather, and to reduce.
        quiet : bool
            Whether to hide the progress line.

        Returns
        -------
        values : list or None
            The last expression's value on each rank, or for each chunk if `asked` has a chunk size.
            None if all values are None. Tensors are on the CPU.
        made : dict
            The gathered and reduced variables, by name.

        Raises
        ------
        GpuError
            If a rank is missing or dead, or a variable cannot be sent.
        RanksError
            If the code fails on a rank.
        """
        self.last_report = None
        ranks = self._ranks(where)
        tree = ast.parse(code) if isinstance(code, str) else code
        if self._broken:
            self._engines.join()
            self._broken = False
        began = time.perf_counter()
        with ProgressLine(shell(), silent=quiet) as line:
            line.update("sending what the cell reads")
            cell = CellOnRanks(self._engines, ranks, tree, file, asked or Sharing(), line)
            cell.deliver()
            sent_s = time.perf_counter() - began
            self._broken = True  # if `cell.run` raises, the group counts as broken
            cell.run()
        self._broken = cell.broke_the_group()
        return self._finish(cell, sent_s, time.perf_counter() - began)

    def _ranks(self, where: str) -> list[RankEngine]:
        """Return the ranks that ``"@all"`` or ``"@0,1"`` names; raise `GpuError` if one is dead."""
        asked = where.removeprefix("@").strip()
        ranks = self._engines.ranks
        if asked != "all":
            ranks = self._numbered([part.strip() for part in asked.split(",")], "@all, @0 or @0,1")
        self._engines.check()
        if lost := [rank for rank in ranks if rank.lost]:
            raise GpuError(lost[0].died)
        return ranks

    def _numbered(self, numbers: Sequence[str], typed: str) -> list[RankEngine]:
        known = {str(rank.number): rank for rank in self._engines.ranks}
        wrong = [number for number in numbers if number not in known]
        if wrong or not numbers:
            given = f"no rank {' or '.join(wrong)}" if wrong else "no rank was given"
            raise GpuError(f"{given}: the ranks are 0 to {self.size - 1}; type {typed}")
        return [known[number] for number in sorted({*numbers}, key=int)]

    def _finish(
        self, cell: CellOnRanks, sent_s: float, seconds: float
    ) -> tuple[Any, dict[str, Any]]:
        """Set `last_report`; then return what `run` returns, or raise the cell's error."""
        notes = self._notes(cell)
        done = [cell.outcomes[n] for n in sorted(cell.outcomes)]
        made: dict[str, Any] = {}
        wrong: list[str] = []
        if cell.failed is None and not cell.interrupted:
            kept = [{n: sending.unpack(data) for n, data in o.kept.items()} for o in done]
            made, wrong = put_together(cell.asked, kept)
        said = [
            str(cell.split),
            sent_in_words(cell.sent, cell.sent_bytes, sent_s),
            *cell.transfers(),
            *sharing_in_words(cell.asked, made, len(done)),
        ]
        times = tuple(cell.times())
        self.last_report = RanksReport(times, seconds, tuple(said), tuple(notes), tuple(wrong))
        if cell.interrupted:
            ended = f"interrupted on {many(len(cell.ranks), 'rank')}"
            raise KeyboardInterrupt("; ".join([ended, *notes]))
        if cell.failed is not None:
            raise RanksError(*cell.failed, len(cell.ranks), notes)
        values = [sending.unpack(o.value) for o in done]
        return (None if all(value is None for value in values) else values), made

    def _notes(self, cell: CellOnRanks) -> list[str]:
        lost = "did not end and was replaced; its variables are lost"
        notes = [f"rank {rank.number} {lost}" for rank in cell.replaced]
        if self._broken or cell.replaced:
            notes += ["the process group is recreated: wrap modules in DDP or fully_shard again"]
        if kept := cell.kept:
            changed = f"{some(kept)} changed in the notebook and in ranks; the ranks keep theirs"
            notes.append(f"{changed}; del {next(iter(kept))} in the ranks to send the notebook's")
        if cell.interrupted:
            notes += [rank.died for rank in cell.ranks if rank.lost]
        return notes

    def checkpoint(self, *names: str, to: str | None) -> str:
        """Save the ranks' variables `names` in a new directory below `to`; return its path.

        Saves tensors, numbers, lists, dicts, and objects with a `state_dict`. Rank 0 saves the
        values that are not sharded. All hosts must see `to`. Raises `GpuError` if saving fails
        or a name is wrong."""
        if not names or len(set(names)) < len(names) or not to:
            typed = "%gpucluster checkpoint net --to runs/cats"
            raise GpuError(f"give each variable once, and a directory; type {typed}")
        return self._of_checkpoints("save", to, [*names]).path

    def restore(self, directory: str) -> "Checkpoint":
        """Load a checkpoint, saved by any number of ranks, into the variables of all ranks.

        Loads `directory` if it is a complete checkpoint, else the newest complete checkpoint in it.
        Raises `GpuError`, loading nothing, if a module or optimizer is missing or differs in shape.
        """
        loaded = self._of_checkpoints("restore", directory)
        self.keep(*loaded.variables)
        return loaded

    def _of_checkpoints(self, function: str, directory: str, *args: Any) -> "Checkpoint":
        """Run a function of the module `checkpoints` on all ranks; return rank 0's result."""
        given = (os.path.abspath(os.path.expanduser(directory)), *args)
        module = "__import__('gpumagic.cluster.checkpoints', fromlist=['save'])"
        answers, _ = self.run(f"{module}.{function}(*{given!r})")
        made: Checkpoint = answers[0]
        if made.error:
            raise GpuError(made.error)
        return made

    def pull(self, *names: str) -> dict[str, list[Any]]:
        """Return each variable's values in the order of the ranks, with tensors on the CPU.

        Raises
        ------
        GpuError
            If one of the variables exists on no rank.
        """
        found = self._engines.answers(self._ranks("@all"), engine.pull, list(names))
        if missing := [name for name in names if not any(name in each for each in found)]:
            raise GpuError(f"no rank has {some(missing)}; assign it in a cell of %%ongpu @all")
        return {n: [sending.unpack(each[n]) for each in found if n in each] for n in names}

    def keep(self, *names: str) -> None:
        """Let ranks use their own values of these variables until the notebook changes them."""
        fingerprints = sending.fingerprints_here(names)
        self._engines.answers(self._ranks("@all"), sending.receive, b"", fingerprints)

    def status(self) -> RanksTable:
        """Return the table of ranks: host, GPU, memory, process and state."""
        rows = self._engines.rows()
        first = self.size > 1 and all(row.get("device") == "cuda:0" for row in rows)
        return RanksTable(f"{self!r}" + "; in each rank, its GPU is cuda:0" * first, rows)

    def restart(self, *numbers: int) -> None:
        """Replace the engines of these ranks; all other ranks keep their variables. All ranks then
        join a new process group. Raises `GpuError` if a rank cannot be replaced."""
        ranks = self._numbered([*map(str, numbers)], "%gpucluster restart 0")
        with ProgressLine(shell()) as line:
            self._engines.replace(ranks, line.update)
            self._broken = False

    def stop(self) -> None:
        """End all engines and their child processes."""
        atexit.unregister(self.stop)
        self._engines.stop()


_current: GpuCluster | None = None


def cluster(
    where: str | int | None = None,
    *,
    slurm: str | None = None,
    partition: str | None = None,
    ssh: str | None = None,
    ip: str | None = None,
    python: str | None = None,
) -> GpuCluster:
    """Start an engine (a process) for each GPU, and join all engines in one process group.

    Parameters
    ----------
    where : str or int, optional
        The GPUs of this machine to use: ``"0,1"``, ``"all"``, or a number of GPUs, such as 2. If
        the machine has no GPU, each engine gets a virtual GPU.
    slurm, partition : str, optional
        `slurm` gives the nodes and the GPUs per node, ``"2x8"``. `partition` is Slurm's partition.
    ssh : str, optional
        Hosts, with the number of GPUs (default 1) after a colon: ``"host1,host2:4"``.
    ip : str, optional
        The address at which engines reach this machine; by default, gpumagic finds it.
    python : str, optional
        Python's path on the `ssh` hosts; by default, the path of this process's Python.

    Returns
    -------
    GpuCluster
        The cluster that ``%%ongpu @all`` uses.

    Raises
    ------
    GpuError
        If a cluster is already running, or cannot be started.
    """
    global _current
    if is_running():
        raise GpuError(f"a cluster is already running ({_current!r}); type %gpucluster stop")
    if slurm is not None:
        plan = launching.slurm(slurm, partition, ip)
    elif ssh is not None:
        plan = launching.ssh(ssh, ip, python)
    else:
        plan = launching.local("all" if where is None else str(where))
    engines = Engines(plan)
    try:
        with ProgressLine(shell()) as line:
            engines.start(line.update)
        _current = GpuCluster(engines)
    except BaseException:
        engines.stop()
        raise
    return _current


def current() -> GpuCluster:
    """Return the cluster of this notebook; raise `GpuError` if none runs."""
    if _current is None or _current.stopped:
        raise GpuError("no cluster runs; type %gpucluster start")
    return _current


def is_running() -> bool:
    return _current is not None and not _current.stopped
