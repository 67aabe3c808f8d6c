"""Report copies and waits between devices to whoever listens.

One listener is torch's own debug mode, which warns, or raises, where the host waits for a GPU. To
it, copies to a GPU are asynchronous: whether they block is not reported.
"""

import sys
import warnings
from collections.abc import Callable

import torch

from gpumagic.usercode.files import stands_in

Listener = Callable[[str, str, torch.device, torch.device, int], None]

listeners: list[Listener] = []
"""Called as ``f(kind, operator, source, destination, nbytes)`` on the thread that ran the operator.

kind is ``"copy"`` (bytes go from one device to another), ``"sync"`` (the host waits for a result
that decides a value or a shape) or ``"index"`` (a CPU index is copied to the indexed tensor's GPU).
"""


def emit(
    kind: str, operator: str, source: torch.device, destination: torch.device, nbytes: int
) -> None:
    """Call every listener."""
    for listener in listeners:
        listener(kind, operator, source, destination, nbytes)


sync_debug_mode = 0
"""0: none, 1: warn, 2: raise."""


def set_sync_debug_mode(mode: int) -> None:
    """What ``torch.cuda.set_sync_debug_mode`` calls."""
    global sync_debug_mode
    sync_debug_mode = int(mode)
    if _debug in listeners:
        listeners.remove(_debug)
    if mode:
        listeners.append(_debug)


def _debug(kind: str, operator: str, source: object, to: torch.device, nbytes: int) -> None:
    __tracebackhide__ = True
    if kind == "sync" or (kind == "copy" and to.type == "cpu"):
        if sync_debug_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        depth, frame = 2, sys._getframe(1)
        while frame.f_back and stands_in(frame.f_code.co_filename):
            depth, frame = depth + 1, frame.f_back
        warnings.warn("called a synchronizing CUDA operation", stacklevel=depth)
