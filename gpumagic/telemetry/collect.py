"""Take a snapshot of this machine. Each *source*, such as NVML, reads one kind of GPU.

The variable ``GPUMAGIC_SOURCES`` selects the sources. A failing source does not affect the others.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from gpumagic import device, faults
from gpumagic.errors import Problem, as_typed
from gpumagic.telemetry.drm_source import AmdSource, IntelSource
from gpumagic.telemetry.host import read_host
from gpumagic.telemetry.nvml_source import NvmlSource
from gpumagic.telemetry.processes import Owners
from gpumagic.telemetry.snapshot import GpuSample, Host, ProcessSample, Snapshot
from gpumagic.telemetry.source import AppleSource, CachedReadings, Source, T
from gpumagic.telemetry.state_files import VirtualSource

_KNOWN: dict[str, Callable[[Path], Any]] = {
    "nvml": lambda root: NvmlSource(),
    "amd": AmdSource,
    "intel": IntelSource,
    "apple": lambda root: AppleSource(),
}
_THERE_ARE = f"use {', '.join(_KNOWN)} or package.module:callable, then restart"


def chosen(
    env: Mapping[str, str], platform: str = sys.platform
) -> tuple[list[Source], list[Problem]]:
    """Return the sources in `env` (or the default ones), and a problem for each wrong name."""
    default = "nvml,apple" if platform == "darwin" else "nvml,amd,intel"
    asked = env.get("GPUMAGIC_SOURCES", "").strip(", ") or default
    sources: list[Source] = []
    problems = []
    for name in map(str.strip, asked.split(",")):
        first, colon, rest = name.partition(":")
        try:
            if first in _KNOWN and (not colon or rest.startswith("/")):
                sources.append(_KNOWN[first](Path(rest or "/")))
            else:
                sources.append(getattr(import_module(first), rest)())
        except Exception as error:  # noqa: BLE001  third-party code may raise anything
            why = faults.in_words(error)
            cause = f"GPUMAGIC_SOURCES names {name!r}, which is not a source ({why})"
            problems.append(Problem("source-unknown", cause, _THERE_ARE))
    return sources, problems


# Problems that only mean that no NVIDIA GPU exists. `explain` hides them if there is any GPU.
_JUST_NO_GPU = ("library-missing", "driver-not-loaded")
_NO_NVML = Problem(
    "nvml-missing",
    "NVML is missing: only the names and memory of these GPUs are known",
    "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; %gpus --doctor says more",
)
_NONE_VISIBLE = Problem(
    "none-visible", "this process can use none of these GPUs", "run %gpus --doctor"
)


def explain(gpus: Sequence[GpuSample], problems: Sequence[Problem], needed: bool) -> list[Problem]:
    """Return the problems to show; add one if GPUs are `needed`, but this process can use none."""
    if there := [gpu for gpu in gpus if not gpu.lost]:
        found = [problem for problem in problems if problem.code not in _JUST_NO_GPU]
        unnamed = needed and all(gpu.ordinal is None for gpu in there)
        hidden = unnamed and not all(gpu.virtual for gpu in there)
        return [*found, _NONE_VISIBLE] if hidden else found
    offer = f"{as_typed('%gpus --virtual 2')} makes virtual ones"
    why = f"{offer} (why: %gpus --doctor)"
    if not problems:
        return [Problem("no-gpu", "no driver finds a GPU on this machine", why)]
    # A problem of _JUST_NO_GPU usually means that there is no GPU, so the cure is virtual GPUs.
    cures = dict.fromkeys(_JUST_NO_GPU, why)
    return [replace(one, cure=cures.get(one.code, f"{one.cure}; or {offer}")) for one in problems]


class Collector:
    """Takes snapshots from `sources`. The default is `chosen(os.environ)` and the virtual GPUs."""

    def __init__(
        self,
        sources: Sequence[Source] | None = None,
        owners: Owners | None = None,
        here: Callable[[], Sequence[device.Device]] = lambda: device.here(memory=False),
        host: Callable[[], Host] | None = None,
        usable: bool = True,  # False if this process needs no GPU, such as the Jupyter server
    ) -> None:
        found, self._misnamed = chosen(os.environ) if sources is None else (sources, [])
        self._sources = [*found, VirtualSource()] if sources is None else list(sources)
        self._host = host or read_host
        self._owners = owners or Owners()
        self._here = here
        self._usable = usable
        self._lock = threading.Lock()
        self._failed: list[Problem] = []
        self._named: dict[str | None, device.Device] = {}  # by UUID, of the last snapshot
        self._kept = CachedReadings()  # caches the processes' owners
        self._pids: set[int] = set()

    def take(self, *, processes: bool = True, max_age: float = 0.0) -> Snapshot:
        """Return a snapshot. Cached readings may be as old as `max_age` refresh intervals."""
        with self._lock:
            self._failed = []
            now, host, problems = time.time(), self._host(), list(self._misnamed)
            gpus, sources = self._gpus(host, max_age)
            for source in self._sources:
                problems += self._ask(source, lambda one: one.problems()) or ()
            software: dict[str, str] = {}
            for source in sources:
                software |= self._ask(source, lambda one: one.software()) or {}
            return Snapshot(
                time=now,
                host=host,
                driver=software.pop("driver", None),
                cuda=software.pop("cuda", None),
                software=tuple(f"{name} {text}".strip() for name, text in software.items()),
                source="+".join(source.name for source in sources) or "none",
                gpus=tuple(gpus),
                processes=tuple(self._holders(sources, max_age) if processes else ()),
                problems=tuple(explain(gpus, [*problems, *self._failed], needed=self._usable)),
            )

    def _gpus(self, host: Host, max_age: float) -> tuple[list[GpuSample], list[Source]]:
        found: dict[str, GpuSample] = {}
        listing = []
        for source in self._sources:
            its = self._ask(source, lambda one: one.gpus(host, max_age)) or ()
            found |= {gpu.uuid: gpu for gpu in its if gpu.uuid not in found}
            listing += [source] if its else []
        gpus = list(found.values())
        if all(gpu.virtual for gpu in gpus):
            of_cuda = [d for d in self._here() if d.index is None and not d.virtual]
            gpus = [*map(_of_cuda, of_cuda), *gpus]
            self._failed += [_NO_NVML] if of_cuda else []
        return self._with_ordinals(gpus), listing

    def _ask(self, source: Source, question: Callable[[Source], T]) -> T | None:
        """Return `question(source)`. If the call fails, record a problem and return None."""
        try:
            return question(source)
        except Exception as error:  # noqa: BLE001  third-party code may raise anything
            faults.keep(f"asking the source {source.name}", error)
            cause = f"the source {source.name} failed ({faults.in_words(error)})"
            problem = Problem("source-failed", cause, "run %gpus --doctor; other GPUs are shown")
            self._failed += [] if problem in self._failed else [problem]
            return None

    def _with_ordinals(self, gpus: list[GpuSample]) -> list[GpuSample]:
        known: dict[str | None, device.Device] = {one.uuid: one for one in self._here()}
        # If a GPU is lost, keep the old ordinals, because running programs still use them.
        if any(gpu.lost for gpu in gpus):
            known |= self._named
        self._named = known
        named = ((gpu, known.get(gpu.uuid, gpu)) for gpu in gpus)
        return [replace(g, ordinal=n.ordinal, ordinal_certain=n.ordinal_certain) for g, n in named]

    def _holders(self, sources: Sequence[Source], max_age: float) -> list[ProcessSample]:
        found: list[ProcessSample] = []
        for source in sources:
            found += self._ask(source, lambda one: one.processes(max_age)) or ()
        pids = {holder.pid for holder in found}
        max_age, self._pids = max_age if pids == self._pids else 0.0, pids
        owners = self._kept.get("owners", 2.9, max_age, lambda: self._owners.look_up(pids))
        return [
            replace(
                owners[holder.pid],
                uuid=holder.uuid,
                memory=holder.memory,
                utilization=holder.utilization,
                mine=holder.pid == os.getpid(),
                ordinal=self._owners.ordinals.get(holder.pid, {}).get(holder.uuid),
            )
            for holder in found
        ]


def snapshot(*, processes: bool = True) -> Snapshot:
    """Take a snapshot of this machine: its GPUs, the processes on them, and the problems.

    Parameters
    ----------
    processes : bool
        Whether to list the processes. This takes several milliseconds per GPU.

    Returns
    -------
    Snapshot
        If a driver fails, no error is raised. ``problems`` then has the cause and the cure.
        The call may take seconds if a driver stalls, so do not call it on an event loop.
    """
    return _collector().take(processes=processes)


_collector = cache(Collector)

if hasattr(os, "register_at_fork"):
    # A thread of the parent may hold the collector's lock, so the child makes a new collector.
    os.register_at_fork(after_in_child=_collector.cache_clear)


def _of_cuda(found: device.Device) -> GpuSample:
    """Return the sample of a CUDA GPU that torch has found, but that no source lists."""
    total, free = found.memory_total, found.memory_free
    used = None if total is None or free is None else total - free
    uuid, ordinal = found.uuid or f"CUDA-{found.ordinal}", found.ordinal
    return GpuSample(uuid, found.name, ordinal=ordinal, memory_total=total, memory_used=used)
