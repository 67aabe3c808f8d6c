"""Find who a process is: its user, and of this user's own its program, kernel and notebook.

Of another user's process nothing is told but the user's name. A process belongs to the kernel that
it is or descends from. It is an orphan only where that can be shown: it was started from a kernel,
its session's leader is gone, no living kernel is old enough to have started it, and nothing says
that it was made to outlive its kernel, as a daemon and what was started under ``nohup`` are.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpumagic.device import Device, amd_gpus, physical_gpus, visible
from gpumagic.telemetry.processes import (
    Process,
    Processes,
    ignores_hangup,
    is_alive,
    is_kernel,
    resident,
    started,
)

# Start times are sums of floats; the system counts them in hundredths.
_SAME_S = 0.005
_LONGEST_INFO = 65536


@dataclass(frozen=True)
class Kernel:
    """A Jupyter kernel on this machine."""

    pid: int
    id: str
    notebook: str | None = None
    idle_since: float | None = None  # Unix time; None while it is busy or where it is not known
    server: str | None = None  # the address of its Jupyter server, where that is another one


@dataclass(frozen=True)
class Owner:
    """What a ``ProcessSample`` tells of a process; None: not known, or not ours to tell."""

    user: str | None = None
    name: str | None = None
    notebook: str | None = None
    started: float | None = None
    kernel: str | None = None
    child: bool = False
    server: str | None = None
    idle_since: float | None = None
    orphan: bool = False
    host_memory: int | None = field(default=None, compare=False)  # it changes all the time
    ordinals: Mapping[str, int] = field(default_factory=dict)  # CUDA's in that process, by UUID


class Owners:
    """Looks processes up. ``kernels`` are known for certain, as a Jupyter server's own are, others
    are found by their command lines; notebooks are named from ``root``."""

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
        # Those that had left their kernel's session while it still lived.
        self._detached: set[tuple[int, float]] = set()
        self._living: list[Process] | None = None

    def look_up(self, pids: set[int]) -> dict[int, Owner]:
        """By pid; a process that is gone, or that cannot be seen from here, has an empty Owner."""
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
        # Who leads a session of its own was made to outlive its kernel: a daemon, a tmux.
        if process.session is None or process.leads or facts.pid == os.getpid():
            return False
        if is_alive(process.session):
            return False
        if any(_may_have_started(kernel, process) for kernel in self._living_kernels(kernels)):
            self._detached.add((facts.pid, facts.started))
        # Where this process ignores it too, as a server under nohup does, that shows nothing.
        told = ignores_hangup(facts.pid) and not ignores_hangup(os.getpid())
        return not told and (facts.pid, facts.started) not in self._detached

    def _from_root(self, notebook: str | None) -> str | None:
        """The name that the server has for a notebook which its environment named in full."""
        if notebook is None or self._root is None:
            return notebook
        path = Path(notebook)
        return path.relative_to(self._root).as_posix() if self._root in path.parents else notebook

    def _living_kernels(self, kernels: Mapping[int, Kernel]) -> list[Process]:
        """Looks at every process, so at most once for each look-up."""
        if self._living is None:
            certain = (self._processes.look(pid) for pid in kernels if is_alive(pid))
            self._living = [*filter(None, certain), *self._processes.kernels()]
        return self._living

    def _ordinals(self, cuda: Mapping[str, str]) -> dict[str, int]:
        # A notebook may set a variable later, which nobody sees from outside; that is rare only
        # where somebody has set one before.
        if not any(name.endswith("_VISIBLE_DEVICES") for name in cuda):
            return {}
        return {
            device.uuid: device.ordinal
            for device in [*visible(self._gpus(), cuda), *self._amd_gpus(cuda)]
            if device.uuid and device.ordinal is not None and device.ordinal_certain
        }


def _kernel_of(line: Sequence[Process], kernels: Mapping[int, Kernel]) -> Kernel | None:
    """The kernel that the first of this line is or descends from."""
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
    """The address of a kernel's server, where it is not this process's own."""
    facts = kernel.facts
    pid = facts.server_pid or kernel.parent
    if facts.connection is None or pid in (os.getpid(), os.getppid()):
        return None
    return _address(facts.connection.with_name(f"jpserver-{pid}.json"), pid)


def _address(info: Path, pid: int) -> str | None:
    """What a running server wrote about itself, which has the token apart from the address."""
    try:
        with info.open("rb") as file:
            told = json.loads(file.read(_LONGEST_INFO))
        known = told["pid"] == pid and isinstance(told["url"], str)
        return str(told["url"]).partition("?")[0] if known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
