"""Map this server's kernels to their notebooks, for threads that must not ask the event loop."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from jupyter_core.utils import ensure_async
from tornado.web import HTTPError

from gpumagic.telemetry.owners import Kernel


class KernelTable:
    """A table that the event loop brings up to date and any thread may read."""

    def __init__(self, kernel_manager: Any, session_manager: Any) -> None:
        self._kernel_manager = kernel_manager
        self._session_manager = session_manager
        self._kernels: tuple[Kernel, ...] = ()
        self._notebooks: dict[str, str] = {}

    def kernels(self) -> Sequence[Kernel]:
        """The kernels as of the last refresh, from any thread."""
        return self._kernels

    def notebook(self, kernel: str) -> str | None:
        """The path of a kernel's notebook, from any thread."""
        return self._notebooks.get(kernel)

    def managers(self) -> dict[str, Any]:
        """The manager of each kernel on this machine, by the kernel's id. On the event loop."""
        found = {}
        for kernel in self._kernel_manager.list_kernel_ids():
            try:
                manager = self._kernel_manager.get_kernel(kernel)
            except (KeyError, HTTPError):
                continue
            if _pid(manager) is not None:
                found[kernel] = manager
        return found

    async def refresh(self) -> None:
        """Look at the managers again: cheap, and nothing that waits for a kernel."""
        self._notebooks = await self._sessions()
        self._kernels = tuple(
            Kernel(pid, kernel, self._notebooks.get(kernel), _idle_since(manager))
            for kernel, manager in self.managers().items()
            if (pid := _pid(manager)) is not None
        )

    async def _sessions(self) -> dict[str, str]:
        try:
            sessions = await ensure_async(self._session_manager.list_sessions())
        except (HTTPError, sqlite3.Error, OSError):
            # A gateway that cannot be reached, or a server that stops: who was there, still is.
            return self._notebooks
        found: dict[str, str] = {}
        # A console may share a notebook's kernel; it is the notebook that people look for.
        for session in sorted(sessions, key=lambda session: session.get("type") == "notebook"):
            kernel = (session.get("kernel") or {}).get("id")
            name = session.get("path") or session.get("name")
            if session.get("type") == "console":
                name = session.get("name") or name
            if kernel and name:
                found[kernel] = name
        return found


def _pid(manager: Any) -> int | None:
    """None for a kernel that is elsewhere, or whose provisioner does not say."""
    pid = getattr(getattr(manager, "provisioner", None), "pid", None)
    return pid if isinstance(pid, int) else None


def _idle_since(manager: Any) -> float | None:
    last = getattr(manager, "last_activity", None)
    if getattr(manager, "execution_state", None) != "idle" or last is None:
        return None
    return float(last.timestamp())
