"""Follow this server's kernels: whose notebook each runs, and when its cells ran.

Cells are recorded from sockets of our own to the kernels' iopub channels, which receive only what
begins and ends a cell: a kernel's many lines of output are not sent here. Times are the kernels'.
"""

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import zmq
from jupyter_client.session import Session
from jupyter_core.utils import ensure_async
from tornado.web import HTTPError

from gpumagic.telemetry.history import CellRun, CellRuns
from gpumagic.telemetry.processes import Kernel, started
from gpumagic.telemetry.snapshot import Snapshot

KEPT_S = 600.0
"""For how long a run is kept, in seconds after its end."""

MOST_RUNS = 2000
# For so long after a run a list of processes may be the first one since its end.
_SETTLED_S = 4.0
# By beginning only can ZeroMQ choose, and ipykernel calls them "kernel.<some id>.status". What
# makes many messages, output and widgets, begins otherwise.
_TOPICS = (b"kernel", b"status", b"execute_input")


class KernelTable:
    """Whose notebook each kernel runs: the event loop refreshes it, and any thread may read."""

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


class KernelCells(CellRuns):
    """The runs of the last minutes in this server's kernels. All on the event loop."""

    def __init__(
        self, notebook: Callable[[str], str | None], clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(MOST_RUNS)
        # The last news, which many clients get: between which revisions, and the message.
        self._news = (-1, -1, b"")
        self._notebook = notebook
        self._clock = clock
        self._open: dict[tuple[str, str], str] = {}
        # The kernels whose cells are recorded, and how.
        self.followed: dict[str, Iopub] = {}
        self._pids: dict[str, int] = {}

    def follow(self, managers: Mapping[str, Any]) -> None:
        """Record the cells of these kernels, and of no others any more."""
        for kernel, channel in list(self.followed.items()):
            manager = managers.get(kernel)
            if manager is None or not channel.is_of(manager):
                self.followed.pop(kernel).close()
            if manager is None:
                self._abandon(kernel, self._clock())
        for kernel, manager in managers.items():
            if kernel not in self.followed:
                self.followed[kernel] = Iopub(manager, partial(self.receive, kernel))
            pid = manager.provisioner.pid
            if self._pids.get(kernel, pid) != pid:
                # It was started anew: nobody will report as ended what ran before.
                self._abandon(kernel, started(pid) or self._clock())
        self._pids = {kernel: manager.provisioner.pid for kernel, manager in managers.items()}

    def stop(self) -> None:
        """Record no kernel any more."""
        self.follow({})

    def receive(self, kernel: str, message: Mapping[str, Any]) -> None:
        """A message of a kernel."""
        try:
            parent = message["parent_header"]
            kind = message["header"]["msg_type"]
            content = message["content"]
            date = message["header"]["date"]
            when = date.timestamp() if isinstance(date, datetime) else self._clock()
            if not parent or parent["msg_type"] != "execute_request":
                return
            asked = str(parent["msg_id"])
            if kind == "execute_input":
                # The kernel's own id of this message: those of a client may come twice.
                run = str(message["header"]["msg_id"])
                self._open[kernel, asked] = run
                self._begin(run, kernel, content.get("execution_count"), when)
            elif kind == "status" and content["execution_state"] == "idle":
                self.end(self._open.pop((kernel, asked), ""), when)
        except (KeyError, TypeError, AttributeError):
            return

    def see(self, snapshot: Snapshot) -> None:
        """Who holds memory on which GPU, for the runs of now and of just before."""
        held: dict[str | None, set[str]] = defaultdict(set)
        for process in snapshot.processes:
            held[process.kernel].add(process.uuid)
        for run in self.since():
            if run.end is None or run.end >= snapshot.time - _SETTLED_S:
                self.hold(run.id, held[run.kernel])

    def runs(self, since: float | None = None) -> list[CellRun]:
        """The runs that had not ended at a moment; all that are kept if None."""
        self._forget()
        return [run for run in self.since() if since is None or run.end is None or run.end > since]

    def news(self, revision: int) -> bytes:
        """The message with the runs that began, ended or changed after a revision."""
        if self._news[:2] != (revision, self.revision):
            runs = [run.to_dict() for run in self.since(revision)]
            message = json.dumps({"type": "cells", "cells": runs}, ensure_ascii=False)
            self._news = (revision, self.revision, message.encode())
        return self._news[2]

    def _begin(self, run: str, kernel: str, count: Any, when: float) -> None:
        number = count if isinstance(count, int) else None
        self.keep(CellRun(run, kernel, self._notebook(kernel), number, when))
        self._forget()

    def _abandon(self, kernel: str, when: float) -> None:
        """The kernel is gone, or another one since this moment."""
        for asked, run in list(self._open.items()):
            known = self.get(run)
            if asked[0] == kernel and (known is None or known.start <= when):
                del self._open[asked]
                self.end(run, when)

    def _forget(self) -> None:
        oldest = self._clock() - KEPT_S
        self.forget(lambda run: run.end is not None and run.end < oldest)


class Iopub:
    """Hands each message that is signed rightly to a listener, until closed. On the event loop."""

    def __init__(self, manager: Any, listener: Callable[[Mapping[str, Any]], None]) -> None:
        self._listener = listener
        self._address = _address(manager)
        # Its own: a session refuses a message that it has seen before.
        self._session = Session(config=manager.session.config, key=manager.session.key)
        self._stream = manager.connect_iopub()
        self._stream.setsockopt(zmq.LINGER, 0)
        for topic in _TOPICS:
            self._stream.setsockopt(zmq.SUBSCRIBE, topic)
        self._stream.setsockopt(zmq.UNSUBSCRIBE, b"")
        self._stream.on_recv(self._receive)

    def is_of(self, manager: Any) -> bool:
        """Whether this is the channel of that manager's kernel, be it one that started anew."""
        return self._address == _address(manager)

    def close(self) -> None:
        """Listen no more."""
        if not self._stream.closed():
            self._stream.on_recv(None)
            self._stream.close(linger=0)

    def _receive(self, frames: list[Any]) -> None:
        try:
            _, parts = self._session.feed_identities(frames)
            message = self._session.deserialize(parts)
        except (ValueError, TypeError, KeyError, IndexError):
            # Unsigned, or no message at all, such as the channel's own welcome.
            return
        self._listener(message)


def _address(manager: Any) -> tuple[Any, ...]:
    return (id(manager), manager.iopub_port, manager.session.key)
