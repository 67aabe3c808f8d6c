"""Start the engines of a cluster, number them by rank, replace one, and end all.

ipyparallel starts and connects them. Its numbers are in order of registration, and a replacement
has a new one: ranks are ours.
"""

import contextlib
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import ipyparallel
import psutil

from gpumagic.cluster import engine, group, leash
from gpumagic.cluster.launching import EngineSet, Plan, connections, threads
from gpumagic.cluster.sending import Has
from gpumagic.errors import GpuError

# The controller counts an engine as there at its next heartbeat.
_BEAT_MS = 500
_START_S = 120.0
_JOIN_S = 60.0


@dataclass
class RankEngine:
    """One engine, by the number that it has in the group."""

    number: int
    engine_set: EngineSet
    engine: int = -1  # ipyparallel's number
    about: dict[str, Any] = field(default_factory=dict)
    has: Has = field(default_factory=Has)
    lost: str = ""  # why it is gone

    @property
    def key(self) -> str:
        """The name of its engine set."""
        return f"ranks-{self.engine_set.ranks[0]}"


class Engines:
    """The engines of one cluster, from their start to their end."""

    def __init__(self, plan: Plan, memory: int) -> None:
        self.plan, self.memory = plan, memory
        self.mark = uuid4().hex
        self.ranks = [RankEngine(number, each) for each in plan.sets for number in each.ranks]
        self.generation = 0
        self._directory = Path(tempfile.mkdtemp(prefix="gpumagic-cluster-"))
        self._leash = leash.start(self.mark, self._directory)
        self._killed_before = _killed_for_memory()
        listener = socket.create_server((plan.address, 0))
        self._store = group.new_store(listener)
        self._cluster = ipyparallel.Cluster(
            n=0,
            engines=plan.launcher,
            profile_dir=str(self._directory),
            load_profile=False,
            cluster_file="",
            log_level=50,
            controller_ip=plan.address,
            send_engines_connection_env=True,
            controller_args=[
                "--IPController.use_threads=True",
                f"--HeartMonitor.period={_BEAT_MS}",
                f"--IPController.enable_curve={not plan.local}",
            ],
        )
        self._client: Any = None
        self._launchers: dict[str, Any] = {}
        self.stopped = False

    # -- starting
    def start(self, say: Callable[[str], object]) -> None:
        """Start them all, and have them join the group. Raises `GpuError`; then nothing is left."""
        try:
            self._cluster.start_controller_sync(environment={leash.MARK: self.mark})
            for each in self.plan.sets:
                self._launch(each)
            self._client = self._cluster.connect_client_sync()
            self._take(self.ranks, say)
            self.join()
        except BaseException:
            self.stop()
            raise

    def _launch(self, each: EngineSet) -> None:
        environment = {
            **connections(self.plan.address),
            **threads(self.plan.count),
            **each.environment,
            leash.MARK: self.mark,
            "WORLD_SIZE": str(self.plan.count),
            "MASTER_ADDR": self.plan.address,
            "MASTER_PORT": str(self._store.port),
        }
        key = f"ranks-{each.ranks[0]}"
        self._cluster.start_engines_sync(
            len(each.ranks), engine_set_id=key, environment=environment, **each.options
        )
        if self.plan.launcher == "local":
            self._launchers[key] = self._cluster.engines[key].launchers["0"]

    def _take(self, awaited: Sequence[RankEngine], say: Callable[[str], object]) -> None:
        """Wait for engines that were just started, find the rank of each, and set it up."""
        known = {rank.engine for rank in self.ranks if rank not in awaited}
        until = time.monotonic() + (_START_S if self.plan.local else float("inf"))
        while len(new := set(self._client.ids) - known) < len(awaited):
            say(f"{len(new)} of {len(awaited)} engines have started")
            self._check_started(awaited, until)
            time.sleep(0.05)
        numbers = self._client[sorted(new)].apply_async(engine.number).get()
        by_number = dict(zip(numbers, sorted(new), strict=True))
        for rank in awaited:
            rank.engine, rank.lost, rank.has = by_number[rank.number], "", Has()
        store = (self.plan.address, self._store.port)
        path = [each for each in sys.path if each] if self.plan.local else []
        found = [
            self.ask(rank, engine.set_up, rank.number, store, path, self.memory) for rank in awaited
        ]
        shared = Has()
        for rank, asked in zip(awaited, found, strict=True):
            rank.about, rank.has = asked.get(_JOIN_S), shared

    def _check_started(self, awaited: Sequence[RankEngine], until: float) -> None:
        for rank in awaited:
            if why := self._ended(rank):
                raise GpuError(f"the engine of rank {rank.number} did not start: {why}")
        if time.monotonic() > until:
            raise GpuError(f"after {_START_S:.0f} s not all engines have started")

    def join(self) -> None:
        """Have all ranks join a group that is new."""
        self.generation += 1
        asked = [self.ask(rank, engine.join, self.generation) for rank in self.ranks]
        for each in asked:
            each.get(_JOIN_S)

    # -- talking
    def ask(self, rank: RankEngine, function: Callable[..., Any], *args: Any) -> Any:
        """Have a rank call one of `engine`'s functions; the answer comes later."""
        return self._client[rank.engine].apply_async(function, *args)

    def signal(self, ranks: Iterable[RankEngine], number: int) -> None:
        """Send a signal to the processes of ranks, wherever they are."""
        there = set(self._client.ids)
        for rank in ranks:
            if rank.engine in there:
                self._client.send_signal(number, targets=rank.engine, block=False)

    def pulse(self, rank: RankEngine) -> bytes:
        """What a rank said last of where it is; nothing before it did."""
        key = f"pulse/{rank.number}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    # -- dying
    def check(self) -> list[RankEngine]:
        """The ranks that are gone and were not before; each then has its cause."""
        there, found = set(self._client.ids), []
        for rank in self.ranks:
            if not rank.lost and rank.engine not in there:
                rank.lost = self._ended(rank) or "its connection is gone"
                found.append(rank)
        return found

    def _ended(self, rank: RankEngine) -> str:
        """How the process of a rank ended; nothing while it runs, or where that is not known."""
        launcher = self._launchers.get(rank.key)
        # Only the thread that waits for the process has its exit code.
        if launcher is None or launcher._wait_thread.is_alive():
            return ""
        code = launcher.process.wait(0)
        return "" if code is None else self._in_words(int(code))

    def _in_words(self, code: int) -> str:
        if code >= 0:
            return f"it exited with code {code}"
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL and _killed_for_memory() > self._killed_before:
            self._killed_before = _killed_for_memory()
            return "the operating system killed it, for the host had no memory left"
        return f"it was ended by {name} (signal {-code})"

    def replace(self, ranks: Sequence[RankEngine], say: Callable[[str], object]) -> None:
        """End ranks, whatever they do, start others in their place, and join again."""
        for rank in ranks:
            if len(rank.engine_set.ranks) > 1:
                raise GpuError(
                    f"rank {rank.number} was started together with others by {self.plan.launcher}; "
                    "type %gpucluster stop, then start again"
                )
        for rank in ranks:
            self._kill(rank)
            with contextlib.suppress(KeyError):
                self._cluster.stop_engines_sync(rank.key)
        while gone := {rank.engine for rank in ranks} & set(self._client.ids):
            say(f"{len(gone)} engines are ending")
            time.sleep(0.02)
        for rank in ranks:
            self._launch(rank.engine_set)
        self._take(ranks, say)
        self.join()

    def _kill(self, rank: RankEngine) -> None:
        if rank.lost or rank.engine not in self._client.ids:
            return
        if rank.about.get("host") == socket.gethostname():
            with contextlib.suppress(psutil.Error):
                psutil.Process(rank.about["pid"]).kill()
        else:
            self.signal([rank], signal.SIGKILL)

    def stop(self) -> None:
        """End everything, and leave nothing behind."""
        self.stopped = True
        if self._client is not None:
            self._client.close()
        if self.plan.launcher in ("slurm", "ssh"):  # what is elsewhere is ended by its launcher
            self._cluster.stop_cluster_sync()
        leash.end(self.mark)
        self._cluster.shutdown_atexit = False
        self._leash.terminate()
        self._leash.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _killed_for_memory() -> int:
    """How many processes the operating system has killed for want of memory, here or at all."""
    killed = 0
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            words = Path(path).read_text().split()
            killed += sum(int(n) for name, n in pairwise(words) if name == "oom_kill")
    return killed
