"""Look up processes and their owners: user, program, kernel and notebook.

For another user's process, only the user's name is read, even by root. A process is an *orphan* if
its kernel and its session's leader have ended, unless the process runs under ``nohup``.
"""

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import psutil

from gpumagic import drm
from gpumagic.device import amd_gpus, physical_gpus, visible
from gpumagic.telemetry.snapshot import ProcessSample

_CONNECTION = re.compile(r"kernel-(?P<id>[^/\\]+)\.json$")
_SELECT = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_CUDA = (*_SELECT, "CUDA_DEVICE_ORDER")  # the environment variables that select or order GPUs
_GONE = (psutil.Error, ValueError, OverflowError)  # errors if no readable process has the pid


@dataclass(frozen=True)
class Facts:
    """Constants of a process. Fields after ``ours`` are set only if this user owns the process."""

    pid: int
    started: float
    user: str | None = None
    ours: bool = False
    name: str | None = None
    notebook: str | None = None  # from JPY_SESSION_NAME, which the Jupyter server sets for a kernel
    server_pid: int | None = None  # from JPY_PARENT_PID: the process that launched the kernel
    kernel: str | None = None  # the kernel's id in the command line, which forks inherit
    cuda: Mapping[str, str] = field(default_factory=dict)  # the variables _CUDA at process start

    @property
    def session(self) -> int | None:
        """The pid of the process's session leader; None if unknown."""
        with suppress(OSError, AttributeError):  # the process has ended, or Windows has no sessions
            return os.getsid(self.pid)
        return None

    @property
    def is_kernel(self) -> bool:
        """Whether this is a kernel. A fork has a kernel's command line, but leads no session."""
        if self.kernel is None:
            return False
        return self.session in (self.pid, None) or self.server_pid is None


def started(pid: int) -> float | None:
    """Return the Unix time at which a living process started; None for a dead one."""
    try:
        process = psutil.Process(pid)
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return None if ended else process.create_time()
    except _GONE:
        return None


def is_alive(pid: int) -> bool:
    """Whether the process is alive; a zombie is not."""
    return started(pid) is not None


def ignores_hangup(pid: int) -> bool:
    """Whether the process ignores SIGHUP, as under ``nohup``; False if not on Linux."""
    ignored = re.search(r"^SigIgn:\s*([0-9a-f]+)$", drm.Folder(f"/proc/{pid}").text("status"), re.M)
    return bool(ignored and int(ignored[1], 16) >> (signal.SIGHUP - 1) & 1)


def _facts(process: psutil.Process, began: float) -> Facts:
    try:
        user = process.username()
    except (psutil.Error, KeyError):
        user = None
    if hasattr(os, "getuid"):
        ours = process.uids().real == os.getuid()
    else:
        ours = user == psutil.Process().username()
    if not ours:
        return Facts(process.pid, began, user)
    try:
        words, env = process.cmdline(), process.environ()
    except (psutil.Error, OSError):
        words, env = [], {}
    return Facts(
        process.pid,
        began,
        user,
        ours=True,
        name=process.name(),
        notebook=env.get("JPY_SESSION_NAME") or None,
        server_pid=drm.whole(env.get("JPY_PARENT_PID")),
        kernel=next((found["id"] for found in map(_CONNECTION.search, words) if found), None),
        cuda={name: env[name] for name in _CUDA if name in env},
    )


@dataclass(frozen=True)
class Kernel:
    """A Jupyter kernel on this machine."""

    pid: int
    id: str
    notebook: str | None = None
    idle_since: float | None = None  # Unix time; None if the kernel is busy or this is unknown
    server: str | None = None  # "process 42" if another Jupyter server runs the kernel


class Owners:
    """Looks up processes' owners. Kernels that `kernels` omits are found by their command lines."""

    def __init__(
        self, kernels: Callable[[], Sequence[Kernel]] = tuple, root: Path | None = None
    ) -> None:
        self._kernels = kernels
        self._root = root  # notebooks' names are relative to this folder
        # The start time is part of the cache's key, because setting the clock changes start times.
        self._facts = lru_cache(65536)(_facts)
        self._living: list[Facts] | None = None  # the cache of `_living_kernels`
        # CUDA's ordinal of each GPU in each process: by pid, then by UUID. `look_up` sets this.
        self.ordinals: dict[int, Mapping[str, int]] = {}

    def look_up(self, pids: set[int]) -> dict[int, ProcessSample]:
        """Return the processes' samples, without GPU data. A hidden process has only a pid."""
        self._living, self.ordinals = None, {}
        kernels = {kernel.pid: kernel for kernel in self._kernels()}
        return {pid: self._owner(pid, kernels) for pid in pids}

    def _owner(self, pid: int, kernels: Mapping[int, Kernel]) -> ProcessSample:
        lineage = self._lineage(pid)
        if not lineage or lineage[0].pid != pid:  # the process has ended or is hidden
            return ProcessSample("", pid)
        facts = lineage[0]
        if not facts.ours:
            return ProcessSample("", pid, user=facts.user)
        self.ordinals[pid] = self._ordinals(facts.cuda)
        sample = ProcessSample("", pid, user=facts.user, name=facts.name, started=facts.started)
        kernel = _kernel_of(lineage, kernels)
        if kernel is None:
            is_child = os.getpid() in (each.pid for each in lineage[1:])
            return replace(
                sample,
                name=f"{facts.name} started here" if is_child else facts.name,
                notebook=self._from_root(facts.notebook),
                orphan=self._is_orphan(facts, kernels),
            )
        return replace(
            sample,
            notebook=self._from_root(kernel.notebook or facts.notebook),
            kernel=kernel.id,
            child=kernel.pid != pid,
            server=kernel.server,
            idle_since=kernel.idle_since,
        )

    def _lineage(self, pid: int) -> list[Facts]:
        """Return facts about a process, then about its ancestors; [] if the process has ended."""
        with suppress(*_GONE):
            process = psutil.Process(pid)
            return [facts for one in (process, *process.parents()) if (facts := self._look(one))]
        return []

    def _look(self, process: psutil.Process) -> Facts | None:
        with suppress(*_GONE), process.oneshot():
            return self._facts(process, process.create_time())
        return None

    def _is_orphan(self, facts: Facts, kernels: Mapping[int, Kernel]) -> bool:
        if facts.server_pid is None and facts.notebook is None:
            return False
        # The leader of a session, such as a daemon or tmux, is meant to outlive its kernel.
        session = facts.session
        if session in (None, facts.pid) or facts.pid == os.getpid() or is_alive(session or 0):
            return False
        for kernel in self._living_kernels(kernels):
            same = (kernel.server_pid, kernel.notebook) == (facts.server_pid, facts.notebook)
            # This kernel may have started the process. The system rounds start times to 0.01 s.
            if same and kernel.started <= facts.started + 0.005:
                return False
        # Ignoring SIGHUP is a sign of nohup, but not if our own process ignores SIGHUP too.
        return not ignores_hangup(facts.pid) or ignores_hangup(os.getpid())

    def _from_root(self, notebook: str | None) -> str | None:
        if notebook is None or self._root is None:
            return notebook
        path = Path(notebook)
        return path.relative_to(self._root).as_posix() if self._root in path.parents else notebook

    def _living_kernels(self, kernels: Mapping[int, Kernel]) -> list[Facts]:
        """Return the living kernels. Cache the result, because the search walks all processes."""
        if self._living is None:
            every = filter(None, map(self._look, psutil.process_iter()))
            found = (one for one in every if one.is_kernel or one.pid in kernels)
            self._living = [one for one in found if is_alive(one.pid)]
        return self._living

    def _ordinals(self, cuda: Mapping[str, str]) -> dict[str, int]:
        # If no variable was set at the start, ordinals are unknown: the process may set one later.
        if not any(name in cuda for name in _SELECT):
            return {}
        return {
            device.uuid: device.ordinal
            for device in [*visible(physical_gpus(), cuda), *amd_gpus(cuda)]
            if device.uuid and device.ordinal is not None and device.ordinal_certain
        }


def _kernel_of(lineage: Sequence[Facts], kernels: Mapping[int, Kernel]) -> Kernel | None:
    """Return the kernel that owns a process; `lineage` is this process, then its ancestors."""
    for facts in lineage:
        if facts.pid in kernels:
            kernel = kernels[facts.pid]
            return replace(kernel, notebook=kernel.notebook or facts.notebook)
    for facts, parent in zip(lineage, [*lineage[1:], None], strict=True):
        forked = parent is not None and parent.kernel == facts.kernel
        if facts.kernel is not None and facts.is_kernel and not forked:
            server = facts.server_pid or (parent and parent.pid)
            name = f"process {server}" if server not in (None, os.getpid(), os.getppid()) else None
            return Kernel(facts.pid, facts.kernel, facts.notebook, server=name)
    return None
