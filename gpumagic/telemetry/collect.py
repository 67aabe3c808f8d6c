"""Collect one snapshot from all sources. Whatever is wrong is in the snapshot; nothing raises."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import psutil

from gpumagic import device, faults
from gpumagic.telemetry import dead_cuda, virtual_state
from gpumagic.telemetry.owners import Owner, Owners
from gpumagic.telemetry.preallocation import preallocated
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample, Snapshot
from gpumagic.telemetry.sources import Source, chosen
from gpumagic.telemetry.why_none import explain

T = TypeVar("T")
# How often owners are looked up anew.
_OWNERS_S = 2.9


class Collector:
    """Takes snapshots from its sources, by default those of this machine; ``here`` lists the GPUs
    that torch has in this process, and ``usable`` is False in a server, which uses no GPU itself
    but whose kernels number them as it would. A source that fails costs the others nothing."""

    def __init__(
        self,
        sources: Sequence[Source] | None = None,
        owners: Owners | None = None,
        virtual_states: Callable[[], Sequence[virtual_state.VirtualState]] = virtual_state.read,
        here: Callable[[], Sequence[device.Device]] = lambda: device.here(memory=False),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        host: Callable[[], Host] | None = None,
        usable: bool = True,
    ) -> None:
        self._sources, self._misnamed = (
            chosen(os.environ) if sources is None else (list(sources), [])
        )
        self._host = host or read_host
        self._owners = owners or Owners()
        self._virtual_states = virtual_states
        self._here = here
        self._usable = usable
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._failed: list[Problem] = []
        self._known: dict[int, Owner] = {}
        self._known_at = float("-inf")

    def take(self, *, processes: bool = True, patience: float = 0.0) -> Snapshot:
        """The machine now; ``patience``: how many times its interval a reading may be old."""
        with self._lock:
            host = self._host()
            self._failed = []
            real, told = self._gpus(host, patience)
            real = real or [_of_cuda(d) for d in self._here() if d.index is None and not d.virtual]
            # This process's own first: they are the ones that a WHERE can name.
            states = sorted(self._virtual_states(), key=lambda state: state.pid != os.getpid())
            gpus = self._with_ordinals([*real, *map(_virtual_sample, states)])
            holders: list[ProcessSample] = []
            software: dict[str, str] = {}
            for source in told:
                held = self._ask(source, lambda one: one.processes(patience)) if processes else ()
                holders += held or ()
                software |= self._ask(source, lambda one: one.software()) or {}
            holders += [
                ProcessSample(state.facts.uuid, state.pid, state.reserved, "compute")
                for state in states
            ]
            problems = list(self._misnamed)
            for source in self._sources:
                problems += self._ask(source, lambda one: one.problems()) or ()
            with faults.kept("looking for kernels whose CUDA is dead"):
                problems += dead_cuda.problems()
            owned = self._with_owners(holders, patience) if processes else []
            with faults.kept("looking for GPUs that JAX took for itself"):
                problems += preallocated(gpus, owned)
            names = [source.name for source in told] + ["virtual"] * bool(states)
            return Snapshot(
                time=self._clock(),
                host=host,
                driver=software.pop("driver", None),
                cuda=software.pop("cuda", None),
                software=tuple(f"{name} {text}".strip() for name, text in software.items()),
                source="+".join(names) or "none",
                gpus=tuple(gpus),
                processes=tuple(owned),
                problems=tuple(explain(gpus, [*problems, *self._failed], named=self._usable)),
            )

    def chore(self, *, processes: bool, seconds: float) -> None:
        """After a snapshot, read ahead what is expensive and due, for at most so long."""
        with self._lock:
            end = self._monotonic() + seconds
            for source in self._sources:
                left = max(end - self._monotonic(), 0.0)
                with faults.kept(f"reading ahead by the source {source.name}"):
                    source.chore(processes=processes, seconds=left)
            if processes and self._known and self._monotonic() - self._known_at >= _OWNERS_S:
                self._look_up(set(self._known))

    def _gpus(self, host: Host, patience: float) -> tuple[list[GpuSample], list[Source]]:
        """The GPUs, and which sources told of some."""
        found: dict[str, GpuSample] = {}
        told = []
        for source in self._sources:
            its = self._ask(source, lambda one: one.gpus(host, patience)) or ()
            # Two may tell of one GPU: the first is believed.
            found |= {gpu.uuid: gpu for gpu in its if gpu.uuid not in found}
            told += [source] if its else []
        return list(found.values()), told

    def _ask(self, source: Source, question: Callable[[Source], T]) -> T | None:
        """The answer of one source, or None and a problem."""
        try:
            return question(source)
        except Exception as error:  # noqa: BLE001  a source may be anybody's; kept and told
            faults.keep(f"asking the source {source.name}", error)
            cause = f"the source {source.name} failed ({type(error).__name__}: {error})"
            problem = Problem("source-failed", cause, "run %gpus --doctor; the others are shown")
            self._failed += [] if problem in self._failed else [problem]
            return None

    def _with_ordinals(self, gpus: Iterable[GpuSample]) -> list[GpuSample]:
        known = {found.uuid: found for found in self._here()}
        return [
            replace(gpu, ordinal=found.ordinal, ordinal_certain=found.ordinal_certain)
            if (found := known.get(gpu.uuid))
            else gpu
            for gpu in gpus
        ]

    def _with_owners(
        self, holders: Sequence[ProcessSample], patience: float
    ) -> list[ProcessSample]:
        pids = {holder.pid for holder in holders}
        too_old = self._monotonic() - self._known_at >= patience * _OWNERS_S
        if too_old or not pids <= self._known.keys():
            self._look_up(pids)
        return [_owned(holder, self._known[holder.pid]) for holder in holders]

    def _look_up(self, pids: set[int]) -> None:
        self._known = self._owners.look_up(pids) if pids else {}
        self._known_at = self._monotonic()


_asked = threading.local()
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@cache
def _boot() -> str | None:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return None  # no Linux


def host_name() -> str:
    """What the host is called: by ``GPUMAGIC_HOST``, or its own name."""
    return os.environ.get("GPUMAGIC_HOST") or socket.gethostname()


def read_host() -> Host:
    """The host now; ``cpu_utilization`` is since this thread's previous call, None at first."""
    utilization: float | None = psutil.cpu_percent()
    # psutil has nothing to compare with yet, and says 0.
    if not getattr(_asked, "before", False):
        utilization = None
    _asked.before = True
    memory = psutil.virtual_memory()
    return Host(
        name=host_name(),
        boot=_boot(),
        cpu_count=os.cpu_count(),
        cpu_utilization=utilization,
        memory_total=memory.total,
        memory_used=memory.total - memory.available,
    )


def snapshot(*, processes: bool = True) -> Snapshot:
    """Take a snapshot of this machine: its GPUs, who holds them, and what is wrong.

    Parameters
    ----------
    processes : bool
        Ask who holds memory too, the most expensive thing: several milliseconds per GPU.

    Returns
    -------
    Snapshot
        Never raises for a driver's fault: that is one of its ``problems``, with cause and cure.
        A call may take seconds where a driver stalls; do not make it on an event loop.
    """
    return _collector().take(processes=processes)


@cache
def _collector() -> Collector:
    return Collector()


if hasattr(os, "register_at_fork"):
    # Another thread of the parent may have held the lock.
    os.register_at_fork(after_in_child=_collector.cache_clear)


_OWNED = {field.name for field in fields(ProcessSample)} & {field.name for field in fields(Owner)}


def _owned(holder: ProcessSample, owner: Owner) -> ProcessSample:
    known = {name: getattr(owner, name) for name in _OWNED}
    known |= {"ordinal": owner.ordinals.get(holder.uuid), "mine": holder.pid == os.getpid()}
    return ProcessSample(**{**vars(holder), **known})


def _of_cuda(found: device.Device) -> GpuSample:
    """A GPU of which no driver tells, but CUDA has told torch."""
    total, free = found.memory_total, found.memory_free
    used = None if total is None or free is None else total - free
    return GpuSample(
        found.uuid or f"CUDA-{found.ordinal}",
        found.name,
        ordinal=found.ordinal,
        memory_total=total,
        memory_used=used,
    )


def _virtual_sample(state: virtual_state.VirtualState) -> GpuSample:
    return GpuSample(
        uuid=state.facts.uuid,
        name=state.facts.name,
        virtual=True,
        memory_total=state.facts.memory_total,
        memory_used=state.reserved,
        utilization=state.utilization,
        virtual_ordinal=state.ordinal,
    )
