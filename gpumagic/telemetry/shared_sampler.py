"""Share one sampler among all parts of this process; the child of a fork makes its own."""

from __future__ import annotations

import os
import threading

from gpumagic.telemetry.sampler import Sampler

_sampler: Sampler | None = None
_lock = threading.Lock()


def sampler() -> Sampler:
    """This process's sampler."""
    global _sampler
    with _lock:
        if _sampler is None or _sampler.closed:
            _sampler = Sampler()
        return _sampler


def _after_fork() -> None:
    global _sampler, _lock
    _sampler, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
