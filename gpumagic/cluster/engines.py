"""Start a cluster's engines (ipyparallel's processes), replace them, explain how they ended.

Each start uses new engine ids, so no engine of an aborted start can pass for a new engine.
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
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

import ipyparallel
import torch.distributed

from gpumagic.cluster import engine, launching
from gpumagic.cluster.engine import ENDING, PULSE
from gpumagic.cluster.launching import EngineSet, Plan
from gpumagic.errors import GpuError
from gpumagic.isolation.settings import deferred
from gpumagic.telemetry.host import MemoryGroup, host_name

_dist: Any = torch.distributed  # Any, because torch's annotations lack TCPStore
_START_S = 120.0
_LOOK_S = 0.02
_CAUSE_S = 0.5  # maximum seconds to wait for the cause of an engine's death
_GONE = "an engine has ended; %gpucluster shows which"


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine without the thread that ipyparallel's `_sync` methods leave running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # no event loop runs here, so no thread is needed
        return asyncio.run(coroutine)
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(asyncio.run, coroutine).result()
    finally:
        pool.shutdown(wait=False)  # so that a second Ctrl-C returns at once


@dataclass(eq=False)
class RankEngine:
    number: int
    engine_set: EngineSet
    engine: int = -1  # the engine's id in ipyparallel
    mark: str = ""  # value of `launching.MARK` in the environment of the engine's processes
    about: dict[str, Any] = field(default_factory=dict)
    lost: str = ""  # why the engine has ended; empty while it runs

    @property
    def died(self) -> str:
        """The message that this rank has died, why, and how to replace the rank."""
        again = f"type %gpucluster restart {self.number} to replace it"
        return f"rank {self.number} has died: {self.lost}; {again}"


class Engines:
    """Start, call, replace and stop the engines of one cluster."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.mark = uuid4().hex
        self._starts = count()
        self.ranks = [RankEngine(number, each) for each in plan.sets for number in each.ranks]
        self._generations = count(1)
        self._client: Any = None
        self._cluster: Any = None
        self._store: Any = None
        self._cleanup = contextlib.ExitStack()  # resources to release at the end
        self._memory_group = MemoryGroup()
        self.stopped = False
        self.pulled: dict[str, list[Any]] = {}  # lists of the ranks' values; never sent to ranks

    def start(self, say: Callable[[str], object]) -> None:
        """Start all engines and join them in a process group. After an error, call `stop`."""
        with deferred():
            self._make()
            _run(self._cluster.start_controller(environment={launching.MARK: self.mark}))
        for each in self.plan.sets:
            self._launch(each)
        with deferred():
            self._client = _run(self._cluster.connect_client())
            self._cleanup.callback(self._client.close)
        self._take(self.ranks, say)
        self.join()

    def _make(self) -> None:
        """Start a `TCPStore` and a process that ends orphaned engines; create `self._cluster`."""
        home = self.plan.directory
        prefix = ".gpumagic-cluster-" if home else "gpumagic-cluster-"
        self._directory = tempfile.mkdtemp(prefix=prefix, dir=home)
        self._cleanup.callback(shutil.rmtree, self._directory, ignore_errors=True)
        watch = launching.start_watch(self.mark, self._directory)
        self._cleanup.callback(watch.wait)
        self._cleanup.callback(watch.terminate)
        self._cleanup.callback(launching.end, self.mark)
        self._killed = self._memory_group.kills() or 0  # kills for lack of memory, so far
        # Pass a socket, because the store by itself would listen on all addresses.
        listener = socket.create_server((self.plan.address, 0))
        self._at = self.plan.address, listener.getsockname()[1]
        options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
        self._store = _dist.TCPStore(*self._at, is_master=True, **options)
        self._cluster = ipyparallel.Cluster(
            n=0,
            engines=self.plan.launcher,
            profile_dir=self._directory,
            load_profile=False,
            cluster_file="",
            log_level=50,
            controller_ip=self.plan.address,
            # Local engines start before the controller has an address, and read it from a file.
            send_engines_connection_env=not self.plan.local,
            controller_args=[
                "--IPController.use_threads=True",
                # Milliseconds. Short, because the controller registers engines only at heartbeats.
                "--HeartMonitor.period=500",
                f"--IPController.enable_curve={not self.plan.local}",
            ],
            shutdown_atexit=False,
        )
        if self.plan.launcher != "local":  # `launching.end` ends only this host's processes
            self._cleanup.callback(lambda: _run(launching.stop_elsewhere(self._cluster)))

    def _launch(self, each: EngineSet) -> None:
        start = next(self._starts)
        mark, first = f"{self.mark}/{start}/", start * self.plan.count
        environment = {
            **self.plan.environment,
            **each.environment,
            launching.MARK: mark,
            launching.FIRST: str(first),
            "MASTER_PORT": str(self._at[1]),
        }
        for number in each.ranks:
            self.ranks[number].engine, self.ranks[number].mark = first + number, mark
        options = {"engine_set_id": each.key, "environment": environment, **each.options}
        if self.plan.launcher == "slurm":
            options["batch_file_name"] = f"{self._directory}/job"  # not in the user's directory
        with deferred():  # an interrupt here could leave engines that `stop` cannot end
            _run(self._cluster.start_engines(len(each.ranks), **options))

    def _take(self, awaited: Sequence[RankEngine], say: Callable[[str], object]) -> None:
        """Wait for new engines, and set them up."""
        until = time.monotonic() + (_START_S if self.plan.local else float("inf"))
        while missing := [rank for rank in awaited if rank.engine not in self._client.ids]:
            say(f"{len(awaited) - len(missing)} of {len(awaited)} engines have started")
            self._check_started(awaited, until)
            time.sleep(_LOOK_S)
        path = [each for each in sys.path if each] if self.plan.local else []
        found = self._at_start(awaited, engine.set_up, self._at, path, self.plan.virtual_memory)
        for rank, about in zip(awaited, found, strict=True):
            rank.about, rank.lost = about, ""

    def _at_start(self, ranks: Sequence[RankEngine], function: Any, *args: Any) -> list[Any]:
        """Call a function in starting ranks and return the replies; raise if a rank dies."""
        until = time.monotonic() + _START_S
        asked: dict[RankEngine, Any] = {}
        try:
            for rank in ranks:
                asked[rank] = self.ask(rank, function, *args)
            while not all(each.ready() for each in asked.values()):
                self._check_started(ranks, until)
                time.sleep(_LOOK_S)
        except BaseException:
            for rank, each in asked.items():
                if not each.ready():
                    rank.lost = rank.lost or "it stopped, because another rank did not start"
            raise
        return [each.get(0) for each in asked.values()]

    def _check_started(self, awaited: Sequence[RankEngine], until: float) -> None:
        for rank in awaited:
            if why := self._ended(rank):
                raise GpuError(f"the engine of rank {rank.number} did not start: {why}")
        if time.monotonic() > until:
            raise GpuError(f"not all engines started within {_START_S:.0f} s")

    def join(self) -> None:
        """Join all ranks in a new process group, if all are alive."""
        self.check()
        if not any(rank.lost for rank in self.ranks):
            with deferred():  # each joining rank waits for all ranks, so interrupt none
                self._at_start(self.ranks, engine.join, next(self._generations))

    def ask(self, rank: RankEngine, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a rank; return the pending reply."""
        try:
            return self._client[rank.engine].apply_async(function, *args)
        except (IndexError, ipyparallel.error.NoEnginesRegistered):
            raise GpuError(_GONE) from None

    def answer(self, asked: Any, timeout_s: float | None = None) -> Any:
        """Wait for a rank's reply and return it; raise `GpuError` if the rank has died."""
        try:
            return asked.get(timeout_s)
        except ipyparallel.error.RemoteError as error:
            if error.ename != "EngineError":
                raise
        raise GpuError(_GONE)

    def answers(
        self, ranks: Sequence[RankEngine], function: Callable[..., Any], *args: Any
    ) -> list[Any]:
        """Call a function in ranks and return the replies; raise `GpuError` if a rank has died."""
        try:
            asked = [self.ask(rank, function, *args) for rank in ranks]
            return [self.answer(each) for each in asked]
        except GpuError as error:
            time.sleep(_CAUSE_S)
            self.check()
            raise next((GpuError(rank.died) for rank in ranks if rank.lost), error) from None

    def rows(self) -> tuple[dict[str, Any], ...]:
        """Return a row of the table of ranks for each rank, including dead ranks."""
        rows = []
        for rank in self.ranks:
            about, state = {**rank.about, "used": None}, "idle"
            try:
                about = self.answer(self.ask(rank, engine.about), timeout_s=2.0)
            except (GpuError, TimeoutError):
                self.check()
                state = f"gone: {rank.lost}" if rank.lost else "does not answer"
            rows.append({"rank": rank.number, "state": state, **about})
        return tuple(rows)

    def pulse(self, rank: RankEngine, cell: str) -> dict[str, Any]:
        """Return a rank's last report of the line that a cell runs; empty if there is none."""
        key = PULSE.format(rank.number)
        found = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return found if found.get("cell") == cell else {}

    def interrupt(self, cell: str) -> None:
        self._store.set(ENDING.format(cell), "")

    def check(self) -> None:
        """Record which ranks have died, and why."""
        for rank in self.ranks:
            connected = rank.engine in self._client.ids
            cause = "" if rank.lost else self._ended(rank, 0.0 if connected else _CAUSE_S)
            if not rank.lost and (cause or not connected):
                rank.lost = cause or "its connection was lost"
                launching.end(rank.mark)  # kills the rank's child processes

    def _ended(self, rank: RankEngine, timeout_s: float = 0.0) -> str:
        """Return how a rank's process ended, as text; empty if it runs or the reason is unknown."""
        if self.plan.launcher != "local":
            return ""
        launcher = self._cluster.engines[rank.engine_set.key].launchers["0"]
        # Only ipyparallel's thread, which waits for the process, can get the exit code.
        launcher._wait_thread.join(timeout_s)
        if launcher._wait_thread.is_alive():
            return ""
        code = launcher.process.wait(0)
        if code is None or code >= 0:
            return "" if code is None else f"it exited with code {code}"
        if -code == signal.SIGKILL and (killed := self._memory_group.kills() or 0) > self._killed:
            self._killed = killed
            return "the operating system killed it because the host had no memory left"
        return f"it was ended by {signal.Signals(-code).name} (signal {-code})"

    def replace(self, ranks: Sequence[RankEngine], say: Callable[[str], object]) -> None:
        """Kill ranks, start new engines for them, and join all ranks in a new process group."""
        for rank in ranks:
            if len(rank.engine_set.ranks) > 1:
                why = f"{self.plan.launcher} started it with others"
                cure = "type %gpucluster stop, then start again"
                raise GpuError(f"rank {rank.number} cannot be replaced alone: {why}; {cure}")
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
        with deferred():
            for rank in ranks:
                if rank.about.get("host") != host_name() and rank.engine in self._client.ids:
                    self._client.send_signal(signal.SIGKILL, targets=rank.engine, block=False)
                launching.end(rank.mark)
                with contextlib.suppress(KeyError):
                    _run(self._cluster.stop_engines(rank.engine_set.key))

    def stop(self) -> None:
        self.stopped = True
        with deferred():
            self._cleanup.close()
        # Drop these references, so that open files close now and not at a garbage collection.
        self._store = self._client = self._cluster = None
