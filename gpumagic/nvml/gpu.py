"""Identify a GPU as it is asked: its handle, and what does not change while that lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Call = tuple[Any, ...]
"""A function's name and its arguments after the handle."""


@dataclass(frozen=True)
class Gpu:
    """What does not change about a GPU or a MIG device while its handle lives.

    ``index`` is NVML's (a MIG device has its parent's), ``parent`` the parent's UUID or None,
    ``memory_total`` bytes or None where it shares the host's memory.
    """

    index: int
    uuid: str
    name: str | None
    memory_total: int | None
    parent: str | None
    handle: Any
