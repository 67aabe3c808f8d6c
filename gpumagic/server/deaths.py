"""Find out why a kernel died, from its exit code, kill counters, and readings of RAM and GPUs."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gpumagic import faults
from gpumagic.display.units import size
from gpumagic.server.kernels import KernelCells
from gpumagic.telemetry.crash_file import frames_of_crash
from gpumagic.telemetry.host import KernelLoads, MemoryGroup, Trail
from gpumagic.telemetry.snapshot import KernelDeath, Snapshot

_MOST = 20
# Maximum age in seconds of a reading that explains a death. Deaths are noticed up to 3 s late.
_RECENT_S = 10.0
_CRASHES = {
    getattr(signal, name, None) for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
}
_LESS = "Load less at a time (chunks, a smaller dtype), del large variables, or ask for more RAM."
_ADVICE = {
    "out-of-memory": _LESS,
    "perhaps-out-of-memory": f"{_LESS} dmesg says whether it was the out-of-memory killer.",
    "killed": "A person, a scheduler or the out-of-memory killer ended the kernel: see dmesg.",
    "crashed": "A compiled library crashed: run line by line to find the call; update the library.",
    "exited": "Something ended the process: look for os._exit in the code; see the server's log.",
}


class Deaths:
    """Records kernels' deaths. Call methods on the event loop, unless documented "Any thread"."""

    def __init__(
        self, cells: KernelCells, loads: KernelLoads, latest: Callable[[], Snapshot | None]
    ) -> None:
        self._cells = cells
        self._loads = loads
        self._latest = latest
        self._group = MemoryGroup()
        self._lock = threading.Lock()
        self._kills: int | None = None  # the kill counter at the last reading
        # When out-of-memory kills were noticed. A kill that explains a kernel's death is removed.
        self._killed: list[float] = []
        self._filled: deque[tuple[float, float]] = deque(maxlen=30)  # time, used share of RAM
        self._followed: dict[str, Any] = {}
        self.events: tuple[KernelDeath, ...] = ()  # the oldest first

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """Return `snapshot` with this server's kernels and deaths. Any thread; may take 0.1 s."""
        return replace(snapshot, kernels=self._loads.samples(), events=self.events)

    def follow(self, managers: Mapping[str, Any]) -> None:
        """Watch for the deaths of the kernels in `managers`, and of no other kernels."""
        for kernel, manager in managers.items():
            if self._followed.get(kernel) is not manager:
                manager.add_restart_callback(partial(self._died, kernel, manager), "restart")
        self._followed = dict(managers)

    def look(self, measure: bool = False) -> None:
        """Read used RAM and out-of-memory kills; if `measure`, also kernels' RAM. Any thread."""
        if measure:
            self._loads.samples()
        now, kills, (used, total) = time.time(), self._group.kills(), self._group.ram()
        with self._lock:
            self._killed = [at for at in self._killed if now - at <= _RECENT_S]
            if kills is not None:
                new = 0 if self._kills is None else kills - self._kills
                self._killed += [now] * min(new, _MOST)
                self._kills = kills
            if used is not None and total:
                self._filled.append((now, used / total))

    def _died(self, kernel: str, manager: Any) -> None:
        """Record a death. jupyter_client calls this before a restart of the dead kernel."""
        with faults.kept("finding out why a kernel died"):
            code = getattr(getattr(manager.provisioner, "process", None), "returncode", None)
            now, (run, _) = time.time(), self._cells.running(kernel)
            before = max((e.time for e in self.events if e.kernel == kernel), default=0.0)
            # Ignore a second death within 15 s, unless a new cell was running.
            again = now - before < 15.0 and (run is None or run.start < before)
            if code and not again and self._followed.get(kernel) is manager:
                self.look()
                self.events = (*self.events, self._explain(kernel, manager, code, now))[-_MOST:]

    def _explain(self, kernel: str, manager: Any, code: int, now: float) -> KernelDeath:
        pid, notebook = manager.provisioner.pid, self._cells.notebook_of(kernel)
        run, source = self._cells.running(kernel)
        cause, what = self._cause(code, now)
        name = (notebook or "a notebook").rpartition("/")[2]
        during = f" while In [{run.count or ' '}] ran" if run else ""
        frames = frames_of_crash(manager.connection_file) if cause == "crashed" else ()
        trail = [one for one in self._loads.trail(kernel, pid) if now - one[0] < 30.0]
        known = (*self._ram(trail, now), *frames, *self._xids(kernel, now))
        return KernelDeath(
            id=f"{kernel} {pid}",
            time=now,
            kernel=kernel,
            notebook=notebook,
            count=run.count if run else None,
            code=source,
            cause=cause,
            exit_code=code,
            title=f"{name}'s kernel {what}{during}",
            details=(*known, "variables are lost"),
            advice=_ADVICE[cause],
        )

    def _cause(self, code: int, now: float) -> tuple[str, str]:
        """Return the cause, and the words that follow "train.ipynb's kernel" in the title."""
        if code > 0:
            return "exited", f"ended with exit code {code}"
        if -code in _CRASHES:
            words = (signal.strsignal(-code) or "").lower()
            return "crashed", f"crashed ({words}, signal {-code})"
        if -code == 9:  # SIGKILL, which Windows' `signal` lacks
            with self._lock:
                if self._killed:
                    self._killed.pop()
                    return "out-of-memory", "was killed by the out-of-memory killer"
                full = any(part >= 0.95 for at, part in self._filled if now - at <= _RECENT_S)
            if full:
                return "perhaps-out-of-memory", "was killed (signal 9, probably for lack of RAM)"
        return "killed", f"was killed (signal {-code})"

    def _ram(self, trail: Trail, now: float) -> list[str]:
        if not trail:
            return []
        whose = "this machine's" if self._group.limit() is None else "the container's"
        at, memory = trail[-1]
        before, earlier = next(one for one in trail if at - one[0] <= 8.0)
        grew = memory - earlier
        trend = f", +{size(grew)} in {at - before:.0f} s" if grew > memory / 20 else ""
        part = f"{size(memory)} of {whose} {size(self._group.ram()[1])} of RAM"
        return [f"{now - at:.0f} s before: {part}{trend}"]

    def _xids(self, kernel: str, now: float) -> list[str]:
        snapshot = self._latest() or Snapshot(now)
        used = {process.uuid for process in snapshot.processes if process.kernel == kernel}
        return [
            f"{gpu.name or 'its GPU'} had a critical error, Xid {gpu.xid}: see dmesg"
            for gpu in snapshot.gpus
            if gpu.uuid in used and gpu.xid is not None and now - (gpu.xid_time or 0) < 60.0
        ]
