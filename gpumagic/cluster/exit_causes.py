"""Say how a process ended, and whether the operating system killed it for want of memory."""

import contextlib
import signal
from itertools import pairwise
from pathlib import Path


class ExitCauses:
    """How processes end that were started after this."""

    def __init__(self) -> None:
        self._killed = _killed_for_memory()

    def in_words(self, code: int) -> str:
        """What an exit code means that Python has of a child."""
        if code >= 0:
            return f"it exited with code {code}"
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL and _killed_for_memory() > self._killed:
            self._killed = _killed_for_memory()
            return "the operating system killed it, for the host had no memory left"
        return f"it was ended by {name} (signal {-code})"


def _killed_for_memory() -> int:
    """How many processes the operating system has killed for want of memory, here or at all."""
    killed = 0
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            words = Path(path).read_text().split()
            killed += sum(int(n) for name, n in pairwise(words) if name == "oom_kill")
    return killed
