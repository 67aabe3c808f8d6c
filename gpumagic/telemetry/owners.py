"""Who a process is: its user, and of this user's own also its program and notebook.

Of another user's process nothing is told but the user's name: a command line may hold secrets.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


@dataclass(frozen=True)
class Owner:
    """``started`` in seconds of Unix time; None for whatever is not known or not ours to tell."""

    user: str | None = None
    name: str | None = None
    notebook: str | None = None
    started: float | None = None


class Owners:
    """Looks processes up, and remembers those that are still the same process."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], Owner] = {}

    def look_up(self, pids: set[int]) -> dict[int, Owner]:
        """By pid; a process that is gone, or that cannot be seen from here, has an empty Owner."""
        import psutil

        found: dict[int, Owner] = {}
        kept: dict[tuple[int, float], Owner] = {}
        for pid in pids:
            try:
                process = psutil.Process(pid)
                key = (pid, process.create_time())
                owner = self._known.get(key) or _ask(process, key[1])
            except (psutil.Error, ValueError, OverflowError):
                found[pid] = Owner()
                continue
            found[pid] = kept[key] = owner
        self._known = kept
        return found


def _ask(process: psutil.Process, started: float) -> Owner:
    import psutil

    user = _user(process)
    if not _same_user(process):
        return Owner(user=user)
    try:
        notebook = process.environ().get("JPY_SESSION_NAME")
    except (psutil.Error, OSError):
        notebook = None
    return Owner(user, process.name(), notebook or None, started)


def _user(process: psutil.Process) -> str | None:
    import psutil

    try:
        return process.username()
    except (psutil.Error, KeyError):
        return None


def _same_user(process: psutil.Process) -> bool:
    """Root may read everybody's environment, and shall not show it."""
    import psutil

    if hasattr(os, "getuid"):
        return process.uids().real == os.getuid()
    return process.username() == psutil.Process().username()
