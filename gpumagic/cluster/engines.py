"""Start the engines of a cluster, replace them, and explain how they ended.

ipyparallel starts and connects them. Each engine requests its number, which is that of its rank,
counted on from start to start: an engine of an aborted start is no rank's.
"""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

import ipyparallel

from gpumagic.cluster import engine, parent_watch, this_rank
from gpumagic.cluster.engine import ErrorInRank
from gpumagic.cluster.launching import FIRST, EngineSet, Plan, connections, stop_elsewhere, threads
from gpumagic.cluster.this_rank import ENDING, PULSE
from gpumagic.display.units import some
from gpumagic.errors import GpuError, show_as
from gpumagic.isolation.settings import deferred
from gpumagic.telemetry.host import MemoryGroup, host_name


class ExitCauses:
    """The causes of the ends of processes started after this."""

    def __init__(self) -> None:
        self._group = MemoryGroup()
        self._killed = self._group.kills() or 0

    def in_words(self, code: int) -> str:
        """Return the meaning of a child's exit code."""
        if code >= 0:
            return f"it exited with code {code}"
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL and (killed := self._group.kills() or 0) > self._killed:
            self._killed = killed
            return "the operating system killed it, for the host had no memory left"
        return f"it was ended by {name} (signal {-code})"


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine of ipyparallel, whose own `_sync` methods leave a thread in a kernel."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # also at the interpreter's end, when no thread can start
        return asyncio.run(coroutine)
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(asyncio.run, coroutine).result()
    finally:
        pool.shutdown(wait=False)  # a second Ctrl-C waits for nothing


# The controller registers an engine at its next heartbeat.
_BEAT_MS = 500
_START_S = 120.0
_JOIN_S = 60.0
_LOOK_S = 0.02
# The cause of an end may arrive this many seconds later.
_CAUSE_S = 0.5
_GONE = "an engine is gone; %gpucluster says which"


@dataclass
class RankEngine:
    """One engine, by its rank in the group."""

    number: int
    engine_set: EngineSet
    engine: int = -1  # ipyparallel's number
    mark: str = ""  # of its start and its children
    about: dict[str, Any] = field(default_factory=dict)
    lost: str = ""  # why it has ended


class Engines:
    """The engines of one cluster, from their start to their end."""

    def __init__(self, plan: Plan, memory: int) -> None:
        self.plan, self.memory = plan, memory
        self.mark = uuid4().hex
        self._starts = count()
        self.ranks = [RankEngine(number, each) for each in plan.sets for number in each.ranks]
        self.generation = 0
        self.store: Any = None
        self._client: Any = None
        self._cluster: Any = None
        self._launchers: dict[str, Any] = {}
        self._made = contextlib.ExitStack()  # what must be ended
        self.stopped = False

    # -- starting
    def start(self, say: Callable[[str], object]) -> None:
        """Start all engines and join their group. After a `GpuError` nothing is left."""
        try:
            with deferred():
                self._make()
                run(self._cluster.start_controller(environment={parent_watch.MARK: self.mark}))
            for each in self.plan.sets:
                self._launch(each)
            with deferred():
                self._client = run(self._cluster.connect_client())
                self._made.callback(self._client.close)
            self._take(self.ranks, say)
            self.join()
        except BaseException:
            self.stop()
            raise

    def _make(self) -> None:
        """Start the controller, the store, and the process that ends the engines."""
        home = self.plan.directory
        prefix = ".gpumagic-cluster-" if home else "gpumagic-cluster-"
        self._directory = tempfile.mkdtemp(prefix=prefix, dir=home)
        self._made.callback(shutil.rmtree, self._directory, ignore_errors=True)
        watcher = parent_watch.start(self.mark, self._directory)
        self._made.callback(watcher.wait)
        self._made.callback(watcher.terminate)
        self._made.callback(parent_watch.end, self.mark)
        self._causes = ExitCauses()
        listener = socket.create_server((self.plan.address, 0))
        self.store = this_rank.new_store(listener)
        self._cluster = ipyparallel.Cluster(
            n=0,
            engines=self.plan.launcher,
            profile_dir=self._directory,
            load_profile=False,
            cluster_file="",
            log_level=50,
            controller_ip=self.plan.address,
            # Local engines read it from a file, and import torch while the controller starts.
            send_engines_connection_env=not self.plan.local,
            controller_args=[
                "--IPController.use_threads=True",
                f"--HeartMonitor.period={_BEAT_MS}",
                f"--IPController.enable_curve={not self.plan.local}",
            ],
            shutdown_atexit=False,
        )
        if self.plan.launcher != "local":  # remote engines are ended by their launcher
            self._made.callback(lambda: run(stop_elsewhere(self._cluster)))

    def _launch(self, each: EngineSet) -> None:
        start = next(self._starts)
        mark = f"{self.mark}/{start}/"
        environment = {
            **connections(self.plan.address),
            **threads(self.plan.count),
            **each.environment,
            parent_watch.MARK: mark,
            FIRST: str(start * self.plan.count),
            "WORLD_SIZE": str(self.plan.count),
            "MASTER_ADDR": self.plan.address,
            "MASTER_PORT": str(self.store.port),
        }
        for rank in self.ranks:
            if rank.engine_set is each:
                rank.engine, rank.mark = start * self.plan.count + rank.number, mark
        options = dict(each.options)
        if self.plan.launcher == "slurm":
            options["batch_file_name"] = f"{self._directory}/job"  # not in the user's directory
        with deferred():  # a half-started one could not be ended
            run(
                self._cluster.start_engines(
                    len(each.ranks), engine_set_id=each.key, environment=environment, **options
                )
            )
            if self.plan.launcher == "local":
                self._launchers[each.key] = self._cluster.engines[each.key].launchers["0"]

    def _take(self, awaited: Sequence[RankEngine], say: Callable[[str], object]) -> None:
        """Wait for new engines, and set them up."""
        until = time.monotonic() + (_START_S if self.plan.local else float("inf"))
        while missing := [rank for rank in awaited if rank.engine not in self._client.ids]:
            say(f"{len(awaited) - len(missing)} of {len(awaited)} engines have started")
            self._check_started(awaited, until)
            time.sleep(_LOOK_S)
        store = (self.plan.address, self.store.port)
        path = [each for each in sys.path if each] if self.plan.local else []
        found = self._at_start(awaited, engine.set_up, store, path, self.memory)
        for rank, about in zip(awaited, found, strict=True):
            rank.about, rank.lost = about, ""

    def _at_start(self, ranks: Sequence[RankEngine], function: Any, *args: Any) -> list[Any]:
        """Return the answers of starting ranks; raise if one dies."""
        until = time.monotonic() + _JOIN_S
        asked: dict[int, Any] = {}
        try:
            for rank in ranks:
                asked[rank.number] = self.ask(rank, function, *args)
            for each in asked.values():
                while not each.wait(_LOOK_S):
                    self._check_started(ranks, until)
        except BaseException:
            for rank in ranks:
                if rank.number in asked and not asked[rank.number].ready():
                    rank.lost = rank.lost or "it waits for a rank that did not start"
            raise
        return [each.get(0) for each in asked.values()]

    def _check_started(self, awaited: Sequence[RankEngine], until: float) -> None:
        for rank in awaited:
            if why := self._ended(rank):
                raise GpuError(f"the engine of rank {rank.number} did not start: {why}")
        if time.monotonic() > until:
            raise GpuError(f"after {_START_S:.0f} s not all engines have started")

    def join(self) -> None:
        """Join all ranks in a new process group."""
        if not any(rank.lost for rank in self.ranks):
            self.generation += 1
            with deferred():  # each rank waits for the others
                self._at_start(self.ranks, engine.join, self.generation)

    # -- talking
    def ask(self, rank: RankEngine, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of `engine` on a rank; the answer comes later."""
        try:
            return self._client[rank.engine].apply_async(function, *args)
        except (IndexError, ipyparallel.error.NoEnginesRegistered):
            raise GpuError(_GONE) from None

    def answer(self, asked: Any, timeout_s: float | None = None) -> Any:
        """Return a rank's answer; raise `GpuError` if it has died."""
        try:
            if asked is not None:
                return asked.get(timeout_s)
        except ipyparallel.error.RemoteError as error:
            if error.ename != "EngineError":
                raise
        raise GpuError(_GONE)

    def answers(
        self, ranks: Sequence[RankEngine], function: Callable[..., Any], *args: Any
    ) -> list[Any]:
        """Call a function of `engine` on ranks; raise `GpuError` if one has died."""
        try:
            asked = [self.ask(rank, function, *args) for rank in ranks]
            return [self.answer(each) for each in asked]
        except GpuError as error:
            time.sleep(_CAUSE_S)
            self.check()
            gone = (GpuError(died(rank)) for rank in ranks if rank.lost)
            raise next(gone, error) from None

    def signal(self, ranks: Iterable[RankEngine], number: int) -> None:
        """Send a signal to the processes of ranks, on any host."""
        for rank in ranks:
            if rank.engine in self._client.ids:
                self._client.send_signal(number, targets=rank.engine, block=False)

    def interrupt(self, ranks: Iterable[RankEngine], cell: str) -> None:
        """Interrupt a cell on ranks, and no other cell."""
        self.store.set(ENDING.format(cell), "")
        self.signal(ranks, signal.SIGINT)

    def read(self, key: str) -> dict[str, Any]:
        """Return the JSON at a key of the store; empty if there is none."""
        found = self.store.get(key) if self.store.check([key]) else b""
        return dict(json.loads(found or b"{}"))

    # -- dying
    def check(self) -> list[RankEngine]:
        """Return the ranks that have died since the last call, with their causes."""
        found = []
        for rank in self.ranks:
            connected = rank.engine in self._client.ids
            cause = "" if rank.lost else self._ended(rank, 0.0 if connected else _CAUSE_S)
            if not rank.lost and (cause or not connected):
                rank.lost = cause or "its connection is gone"
                parent_watch.end(rank.mark)  # its child processes
                found.append(rank)
        return [] if self.stopped else found

    def _ended(self, rank: RankEngine, patience_s: float = 0.0) -> str:
        """Return how a rank's process ended; empty while it runs or if unknown."""
        launcher = self._launchers.get(rank.engine_set.key)
        if launcher is None:
            return ""
        # Only the thread that waits for the process knows its exit code.
        launcher._wait_thread.join(patience_s)
        if launcher._wait_thread.is_alive():
            return ""
        code = launcher.process.wait(0)
        return "" if code is None else self._causes.in_words(int(code))

    def replace(self, ranks: Sequence[RankEngine], say: Callable[[str], object]) -> None:
        """Kill ranks, start others in their place, and join a new group."""
        for rank in ranks:
            if len(rank.engine_set.ranks) > 1:
                raise GpuError(
                    f"rank {rank.number} was started together with others by {self.plan.launcher}; "
                    "type %gpucluster stop, then start again"
                )
        try:
            self._end(ranks)
            for rank in ranks:
                self._launch(rank.engine_set)
            self._take(ranks, say)
        except BaseException:
            self._end(ranks)
            for rank in ranks:
                rank.lost = "its start was aborted"
            raise
        self.join()

    def _end(self, ranks: Sequence[RankEngine]) -> None:
        """Kill the engines of ranks and their children."""
        with deferred():
            for rank in ranks:
                if rank.about.get("host") != host_name():
                    self.signal([rank], signal.SIGKILL)
                parent_watch.end(rank.mark)
                with contextlib.suppress(KeyError):
                    run(self._cluster.stop_engines(rank.engine_set.key))

    def stop(self) -> None:
        """End everything; nothing is left."""
        self.stopped = True
        with deferred():
            self._made.close()
        # They hold open files, and reference cycles keep them until a collection.
        self.store = self._client = self._cluster = None
        self._launchers.clear()


_ANSWER_S = 2.0


def rows_of(engines: Engines) -> tuple[dict[str, Any], ...]:
    """Return a row for each rank; also for one that is busy or dead and cannot answer."""
    engines.check()
    asked: dict[int, Any] = {}
    for rank in engines.ranks:
        with contextlib.suppress(GpuError):
            asked[rank.number] = engines.ask(rank, engine.about)
    rows = []
    for rank in engines.ranks:
        about, state = dict(rank.about, used=None), "idle"
        try:
            about = engines.answer(asked.get(rank.number), _ANSWER_S)
        except TimeoutError:
            where = engines.read(PULSE.format(rank.number))
            state = f"busy, line {where['line']}" if where else "busy"
        except GpuError:
            engines.check()
        state = f"gone: {rank.lost}" if rank.lost else state
        rows.append({"rank": rank.number, "state": state, **about})
    return tuple(rows)


def died(rank: RankEngine) -> str:
    """Return the message on a rank that has died."""
    again = f"type %gpucluster restart {rank.number} for another in its place"
    return f"rank {rank.number} has died: {rank.lost}; {again}"


class RanksError(Exception):
    """An error in a rank; shown as that rank's traceback, without frames of ours."""

    def __init__(self, rank: int, error: ErrorInRank, others: str, notes: Sequence[str]) -> None:
        place = f", {error.place}" if error.place else ""
        super().__init__(f"rank {rank}{place}: {error}")
        _show_with(self, f"error in rank {rank}{others}:\n{error.lines}", notes)


def interrupt(words: str, notes: Sequence[str]) -> KeyboardInterrupt:
    """Return a KeyboardInterrupt that is shown as one line, with notes."""
    error = KeyboardInterrupt(words)
    _show_with(error, f"KeyboardInterrupt: {words}", notes)
    return error


def _show_with(error: BaseException, text: str, notes: Sequence[str]) -> None:
    lines = "\n".join([text, *(f"  → {note}" for note in notes)])
    show_as(error, lambda: [lines])


def named(ranks: Sequence[RankEngine]) -> str:
    """Return ranks in words."""
    return f"{len(ranks)} ranks" if len(ranks) > 1 else f"rank {ranks[0].number}"


def others(ranks: Sequence[RankEngine], failed: int) -> str:
    """Return which ranks were stopped because one failed."""
    found = [str(rank.number) for rank in ranks if rank.number != failed]
    if not found:
        return ""
    return (
        f" (ranks {some(found)} were stopped)" if found[1:] else f" (rank {found[0]} was stopped)"
    )
