"""Look up processes and their owners: user, program, kernel and notebook.

Of another user's process only the user's name is read, even as root: a command line or an
environment may hold secrets.

A process belongs to the kernel that it is or descends from. It is an orphan only if that can be
shown: a kernel started it, its session's leader is gone, no living kernel is old enough to have
started it, and nothing says that it was meant to outlive its kernel, as daemons and programs under
``nohup`` are.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import psutil

from gpumagic.device import Device, amd_gpus, physical_gpus, visible

_CONNECTION = re.compile(r"kernel-(?P<id>[^/\\]+)\.json$")
# The variables that number its GPUs.
_CUDA = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)


# A kernel and its child may have started in the same tick of the clock.
_TICK_S = 0.02


@dataclass(frozen=True)
class Facts:
    """The constants of a process; fields after ``ours`` are known only if it is true."""

    pid: int
    started: float
    user: str | None = None
    ours: bool = False
    name: str | None = None
    notebook: str | None = None  # the notebook's name that the Jupyter server gave its kernel
    server_pid: int | None = None  # pid of the process that launched that kernel
    connection: Path | None = None  # from its command line: a kernel, or forked from one
    cuda: Mapping[str, str] = field(default_factory=dict)  # of its environment at its start

    @property
    def kernel(self) -> str | None:
        """The id of its kernel: itself, or the one that it was forked from."""
        match = _CONNECTION.search(self.connection.name) if self.connection else None
        return match["id"] if match else None


@dataclass(frozen=True)
class Process:
    """A process at one moment; ``session`` is the pid of the session's leader."""

    facts: Facts
    parent: int
    session: int | None

    @property
    def leads(self) -> bool:
        """Whether it leads its session, as every kernel of jupyter_client does."""
        return self.session == self.facts.pid


class Processes:
    """Looks up processes; constants of known ones are cached."""

    def __init__(self) -> None:
        self._facts = lru_cache(65536)(_facts)

    def look(self, pid: int) -> Process | None:
        """Return a process; None if the pid does not exist or cannot be seen from here."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                # Also by its start; setting the clock moves all start times.
                facts = self._facts(process, process.create_time())
                return Process(facts, process.ppid(), _session(pid))
        except (psutil.Error, ValueError, OverflowError):
            return None

    def line(self, pid: int) -> list[Process]:
        """Return a process and its ancestors; psutil's `parents` takes twice as long."""
        found: list[Process] = []
        process = self.look(pid)
        while process is not None and process not in found:
            found.append(process)
            parent = self.look(process.parent) if process.parent else None
            # A younger parent is another process with the old pid.
            older = parent and parent.facts.started <= process.facts.started + _TICK_S
            process = parent if older else None
        return found

    def kernels(self) -> Iterator[Process]:
        """Return all living kernels of this user, by their command lines. Walks all processes."""
        for pid in psutil.pids():
            process = self.look(pid)
            if process and process.facts.connection and is_kernel(process) and is_alive(pid):
                yield process


def is_kernel(process: Process) -> bool:
    """Whether a process with a connection file in its command line is the kernel itself."""
    # A forked child has its parent's command line, but does not lead a session.
    return process.leads or process.session is None or process.facts.server_pid is None


def started(pid: int) -> float | None:
    """Return the start of a living process in Unix time; None if it has ended."""
    try:
        process = psutil.Process(pid)
        # A zombie has ended.
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return None if ended else process.create_time()
    except (psutil.Error, ValueError, OverflowError):
        return None


def resident(pid: int) -> int | None:
    """Return a process's resident bytes; None if unknown."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, ValueError, OverflowError):
        return None


def is_alive(pid: int) -> bool:
    """Whether the process exists."""
    return started(pid) is not None


def ignores_hangup(pid: int) -> bool:
    """Whether it ignores the end of its terminal, as under ``nohup``; known on Linux."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    except (OSError, ValueError, IndexError):
        return False
    return bool(ignored >> (signal.SIGHUP - 1) & 1)


def _session(pid: int) -> int | None:
    if not hasattr(os, "getsid"):
        return None
    try:
        return os.getsid(pid)
    except OSError:
        return None


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
        words = process.cmdline()
        env = process.environ()
    except (psutil.Error, OSError):
        words, env = [], {}
    parent = env.get("JPY_PARENT_PID", "")
    return Facts(
        process.pid,
        began,
        user,
        ours=True,
        name=process.name(),
        notebook=env.get("JPY_SESSION_NAME") or None,
        server_pid=int(parent) if parent.isascii() and parent.isdigit() else None,
        connection=_connection(words, launched=bool(parent)),
        cuda={name: env[name] for name in _CUDA if name in env},
    )


def _connection(words: list[str], launched: bool) -> Path | None:
    """Return the connection file in a command line; ``launched``: surely by jupyter_client."""
    for n, word in enumerate(words[1:], 1):
        path = word.partition("=")[2] if word.startswith("-") else word
        if not _CONNECTION.search(path):
            continue
        # An editor may also have opened such a file.
        if launched or word.startswith("-") or words[n - 1] in ("-f", "--f"):
            return Path(path)
    return None


# Start times are sums of floats; the system counts them in hundredths.
_SAME_S = 0.005
_LONGEST_INFO = 65536


@dataclass(frozen=True)
class Kernel:
    """A Jupyter kernel on this machine."""

    pid: int
    id: str
    notebook: str | None = None
    idle_since: float | None = None  # Unix time; None while it is busy or if unknown
    server: str | None = None  # the address of its Jupyter server, if another


@dataclass(frozen=True)
class Owner:
    """The owner's fields of a ``ProcessSample``; None if unknown or another user's."""

    user: str | None = None
    name: str | None = None
    notebook: str | None = None
    started: float | None = None
    kernel: str | None = None
    child: bool = False
    server: str | None = None
    idle_since: float | None = None
    orphan: bool = False
    host_memory: int | None = field(default=None, compare=False)  # it changes constantly
    ordinals: Mapping[str, int] = field(default_factory=dict)  # in that process, by UUID


class Owners:
    """Looks up the owners of processes. ``kernels`` are known for sure, as a Jupyter server's own;
    others are found by their command lines. Notebooks are named relative to ``root``."""

    def __init__(
        self,
        kernels: Callable[[], Sequence[Kernel]] = tuple,
        gpus: Callable[[], Sequence[Device]] = physical_gpus,
        root: Path | None = None,
        amd_gpus: Callable[[Mapping[str, str]], Sequence[Device]] = amd_gpus,
    ) -> None:
        self._kernels = kernels
        self._gpus = gpus
        self._amd_gpus = amd_gpus
        self._root = root
        self._processes = Processes()
        # Processes that left their kernel's session while it lived.
        self._detached: set[tuple[int, float]] = set()
        self._living: list[Process] | None = None

    def look_up(self, pids: set[int]) -> dict[int, Owner]:
        """Return owners by pid; empty for a process that has ended or cannot be seen."""
        self._living = None
        kernels = {kernel.pid: kernel for kernel in self._kernels()}
        self._detached = {(pid, began) for pid, began in self._detached if started(pid) == began}
        return {pid: self._owner(pid, kernels) for pid in pids}

    def _owner(self, pid: int, kernels: Mapping[int, Kernel]) -> Owner:
        line = self._processes.line(pid)
        if not line:
            return Owner()
        facts = line[0].facts
        if not facts.ours:
            return Owner(user=facts.user)
        kernel = _kernel_of(line, kernels)
        return Owner(
            user=facts.user,
            name=facts.name,
            notebook=self._from_root((kernel and kernel.notebook) or facts.notebook),
            started=facts.started,
            kernel=kernel.id if kernel else None,
            child=bool(kernel and kernel.pid != pid),
            server=kernel.server if kernel else None,
            idle_since=kernel.idle_since if kernel else None,
            orphan=kernel is None and self._is_orphan(line[0], kernels),
            host_memory=resident(pid),
            ordinals=self._ordinals(facts.cuda),
        )

    def _is_orphan(self, process: Process, kernels: Mapping[int, Kernel]) -> bool:
        facts = process.facts
        if facts.server_pid is None and facts.notebook is None:
            return False
        # A session's leader is meant to outlive its kernel: a daemon, a tmux.
        if process.session is None or process.leads or facts.pid == os.getpid():
            return False
        if is_alive(process.session):
            return False
        if any(_may_have_started(kernel, process) for kernel in self._living_kernels(kernels)):
            self._detached.add((facts.pid, facts.started))
        # Not if this process ignores it too, as a server under nohup.
        told = ignores_hangup(facts.pid) and not ignores_hangup(os.getpid())
        return not told and (facts.pid, facts.started) not in self._detached

    def _from_root(self, notebook: str | None) -> str | None:
        """Return a notebook's name relative to the server's root."""
        if notebook is None or self._root is None:
            return notebook
        path = Path(notebook)
        return path.relative_to(self._root).as_posix() if self._root in path.parents else notebook

    def _living_kernels(self, kernels: Mapping[int, Kernel]) -> list[Process]:
        """Return the living kernels. Walks all processes, so at most once per look-up."""
        if self._living is None:
            certain = (self._processes.look(pid) for pid in kernels if is_alive(pid))
            self._living = [*filter(None, certain), *self._processes.kernels()]
        return self._living

    def _ordinals(self, cuda: Mapping[str, str]) -> dict[str, int]:
        # A notebook may set a variable later, which cannot be seen from outside. That is rare only
        # if one was set before.
        if not any(name.endswith("_VISIBLE_DEVICES") for name in cuda):
            return {}
        return {
            device.uuid: device.ordinal
            for device in [*visible(self._gpus(), cuda), *self._amd_gpus(cuda)]
            if device.uuid and device.ordinal is not None and device.ordinal_certain
        }


def _kernel_of(line: Sequence[Process], kernels: Mapping[int, Kernel]) -> Kernel | None:
    """Return the kernel that the first process is or descends from."""
    for process in line:
        if process.facts.pid in kernels:
            kernel = kernels[process.facts.pid]
            return replace(kernel, notebook=kernel.notebook or process.facts.notebook)
    for n, process in enumerate(line):
        facts = process.facts
        forked = n + 1 < len(line) and line[n + 1].facts.kernel == facts.kernel
        if facts.kernel is not None and not forked and is_kernel(process):
            return Kernel(facts.pid, facts.kernel, facts.notebook, None, _server_of(process))
    return None


def _may_have_started(kernel: Process, process: Process) -> bool:
    return (
        kernel.facts.server_pid == process.facts.server_pid
        and kernel.facts.notebook == process.facts.notebook
        and kernel.facts.started <= process.facts.started + _SAME_S
    )


def _server_of(kernel: Process) -> str | None:
    """Return the address of a kernel's server, if it is not this process's own."""
    facts = kernel.facts
    pid = facts.server_pid or kernel.parent
    if facts.connection is None or pid in (os.getpid(), os.getppid()):
        return None
    return _address(facts.connection.with_name(f"jpserver-{pid}.json"), pid)


def _address(info: Path, pid: int) -> str | None:
    """Return a running server's address from its own file, without the token."""
    try:
        with info.open("rb") as file:
            told = json.loads(file.read(_LONGEST_INFO))
        known = told["pid"] == pid and isinstance(told["url"], str)
        return str(told["url"]).partition("?")[0] if known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
