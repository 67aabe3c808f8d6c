"""Look at processes, told apart by pid and by when they began.

Of another user's process only the user's name is read, even where root may read more: a command
line or an environment may hold secrets.
"""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import psutil

_CONNECTION = re.compile(r"kernel-(?P<id>[^/\\]+)\.json$")
# What its GPUs have their numbers from.
_CUDA = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
# The kernel and its child may have begun within one tick of the system's clock.
_TICK_S = 0.02


@dataclass(frozen=True)
class Facts:
    """What does not change while a process lives; nothing after ``ours`` is known unless it is."""

    pid: int
    started: float
    user: str | None = None
    ours: bool = False
    name: str | None = None
    notebook: str | None = None  # what the Jupyter server told its kernel that it runs
    server_pid: int | None = None  # of the process that launched that kernel
    connection: Path | None = None  # in its command line: a kernel, or forked from one
    cuda: Mapping[str, str] = field(default_factory=dict)  # of its environment, when it began

    @property
    def kernel(self) -> str | None:
        """The id of the kernel that it is, or was forked from."""
        match = _CONNECTION.search(self.connection.name) if self.connection else None
        return match["id"] if match else None


@dataclass(frozen=True)
class Process:
    """A process at one moment; ``session`` is the pid of its session's leader."""

    facts: Facts
    parent: int
    session: int | None

    @property
    def leads(self) -> bool:
        """It leads its session, as every kernel does that jupyter_client launched."""
        return self.session == self.facts.pid


class Processes:
    """Looks at processes; the facts of those that are looked at again are kept."""

    def __init__(self) -> None:
        self._facts = lru_cache(65536)(_facts)

    def look(self, pid: int) -> Process | None:
        """A process; None where there is none of that pid, or it cannot be seen from here."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                # By its start too: a clock that is set moves the starts of all.
                facts = self._facts(process, process.create_time())
                return Process(facts, process.ppid(), _session(pid))
        except (psutil.Error, ValueError, OverflowError):
            return None

    def line(self, pid: int) -> list[Process]:
        """A process, its parent, its parent's parent and so on."""
        found: list[Process] = []
        process = self.look(pid)
        while process is not None and process not in found:
            found.append(process)
            parent = self.look(process.parent) if process.parent else None
            # A parent that is younger has only the pid of the one that is gone.
            older = parent and parent.facts.started <= process.facts.started + _TICK_S
            process = parent if older else None
        return found

    def kernels(self) -> Iterator[Process]:
        """All living kernels of this user, by their command lines. Looks at every process."""
        for pid in psutil.pids():
            process = self.look(pid)
            if process and process.facts.connection and is_kernel(process) and is_alive(pid):
                yield process


def is_kernel(process: Process) -> bool:
    """Whether a process with a connection file in its command line is the kernel itself."""
    # A child that was forked has its parent's command line, but does not lead a session.
    return process.leads or process.session is None or process.facts.server_pid is None


def started(pid: int) -> float | None:
    """When a living process began, in seconds of Unix time; None where it has ended."""
    try:
        process = psutil.Process(pid)
        # One that only waits to be reaped is no more than an entry in a table.
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return None if ended else process.create_time()
    except (psutil.Error, ValueError, OverflowError):
        return None


def resident(pid: int) -> int | None:
    """Bytes of the host's memory that a process has; None where that is not to be known."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, ValueError, OverflowError):
        return None


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    return started(pid) is not None


def ignores_hangup(pid: int) -> bool:
    """Whether it was told to stay when its terminal goes, as ``nohup`` does; Linux says so."""
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
    """The connection file in a command line; ``launched``: by jupyter_client, for certain."""
    for n, word in enumerate(words[1:], 1):
        path = word.partition("=")[2] if word.startswith("-") else word
        if not _CONNECTION.search(path):
            continue
        # An editor may have such a file open too.
        if launched or word.startswith("-") or words[n - 1] in ("-f", "--f"):
            return Path(path)
    return None
