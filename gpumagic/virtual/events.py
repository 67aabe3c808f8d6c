"""Report copies and waits between devices to whoever listens; internal to gpumagic."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
