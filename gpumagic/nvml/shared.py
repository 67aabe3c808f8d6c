"""Share one door to NVML in this process; a child of a fork makes its own."""

from __future__ import annotations

import os
import threading

from gpumagic.nvml.door import Nvml

_door: Nvml | None = None
_door_lock = threading.Lock()


def door() -> Nvml:
    """This process's door to NVML."""
    global _door
    with _door_lock:
        if _door is None:
            _door = Nvml()
        return _door


def _after_fork() -> None:
    # NVML's handles and this lock belong to the parent.
    global _door, _door_lock
    _door, _door_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
