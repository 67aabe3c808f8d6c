"""Follow the cells of this server's kernels, and end orphans: processes whose kernel has ended.

A request to end a process gives its pid and its start time, because pids are reused.
"""

import asyncio
import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import psutil
import zmq
from jupyter_core.utils import ensure_async
from tornado.web import HTTPError

from gpumagic.telemetry.history import CellRun, CellRuns
from gpumagic.telemetry.processes import Kernel, is_alive, started
from gpumagic.telemetry.snapshot import ProcessSample, Snapshot

WAIT_S = 3.0  # seconds to wait for the end of a process
_PAUSE_S = 0.05
_NO_ORPHAN = "no orphaned process has this PID and start time; nothing was ended; refresh the list"


async def terminate(given: Any, snapshot: Snapshot) -> tuple[bool, str]:
    """Terminate or kill the orphan that the request body `given` names; return (ended, message)."""
    order = given if isinstance(given, dict) else {}
    found = _orphan(order, snapshot)
    name = f"process {found.pid} ({found.name or 'unknown'})"
    try:
        process = psutil.Process(found.pid)
        # The pid may have been reused. Allow 1 s, because setting the clock changes start times.
        if abs(process.create_time() - float(order["started"])) > 1.0:
            raise psutil.NoSuchProcess(found.pid)
        process.kill() if order.get("force") is True else process.terminate()
    except psutil.NoSuchProcess:
        return True, f"{name} has ended by itself"
    for _ in range(round(WAIT_S / _PAUSE_S)):
        # A zombie counts as ended, because a container without an init process keeps zombies.
        if not is_alive(found.pid):
            return True, f"{name} has ended"
        await asyncio.sleep(_PAUSE_S)
    return False, f'{name} still runs after {WAIT_S:.0f} s; ask again with "force": true to kill it'


def _orphan(order: dict[str, Any], snapshot: Snapshot) -> ProcessSample:
    named = (order.get("pid"), order.get("started"))
    for process in snapshot.processes:
        if process.orphan and process.started and (process.pid, process.started) == named:
            return process
    raise HTTPError(409, _NO_ORPHAN)


class KernelTable:
    """The notebook of each kernel; refreshed on the event loop, readable from any thread."""

    def __init__(self, kernel_manager: Any, session_manager: Any) -> None:
        self._kernel_manager = kernel_manager
        self._session_manager = session_manager
        self.kernels: tuple[Kernel, ...] = ()  # at the last refresh
        self._notebooks: dict[str, str] = {}

    def notebook(self, kernel: str) -> str | None:
        """Return the path of a kernel's notebook; callable from any thread."""
        return self._notebooks.get(kernel)

    def managers(self) -> dict[str, Any]:
        """Return the managers of kernels on this machine by id; call this on the event loop."""
        found = {}
        for kernel in self._kernel_manager.list_kernel_ids():
            manager = self._kernel_manager.get_kernel(kernel)
            # A remote kernel has no pid here, and not every provisioner knows the pid.
            if isinstance(getattr(getattr(manager, "provisioner", None), "pid", None), int):
                found[kernel] = manager
        return found

    async def refresh(self) -> None:
        """Read the list of kernels and notebooks again; do not wait for any kernel."""
        # If a gateway is unreachable or the server stops, keep the last list of notebooks.
        with suppress(HTTPError, sqlite3.Error, OSError):
            sessions = await ensure_async(self._session_manager.list_sessions())
            # A console may share a notebook's kernel. Notebooks come last and replace consoles.
            sessions = sorted(sessions, key=lambda session: session["type"] == "notebook")
            # The path of a console or a new notebook is an id without a suffix, so use the name.
            self._notebooks = {
                each["kernel"]["id"]: each["path" if PurePosixPath(each["path"]).suffix else "name"]
                for each in sessions
                if each.get("kernel")
            }
        self.kernels = tuple(
            Kernel(manager.provisioner.pid, kernel, self.notebook(kernel), _idle_since(manager))
            for kernel, manager in self.managers().items()
        )


def _idle_since(manager: Any) -> float | None:
    last = getattr(manager, "last_activity", None)
    if getattr(manager, "execution_state", None) != "idle" or last is None:
        return None
    return float(last.timestamp())


class KernelCells(CellRuns):
    """The recent cell runs in this server's kernels; for use on the event loop only."""

    def __init__(self, notebook: Callable[[str], str | None]) -> None:
        super().__init__(most=2000)
        self.notebook_of = notebook
        self._open: dict[tuple[str, str], str] = {}  # run ids by kernel and request
        self.followed: dict[str, Iopub] = {}  # each kernel's iopub channel
        self._pids: dict[str, int] = {}
        self._sources: dict[str, str] = {}  # the first characters of each kernel's last cell
        self._held: dict[str | None, list[ProcessSample]] = defaultdict(list)  # by kernel

    def follow(self, managers: Mapping[str, Any]) -> None:
        """Record the cells of the kernels in `managers`, and of no other kernels."""
        for kernel, channel in list(self.followed.items()):
            if channel.address != _address(managers.get(kernel)):
                self.followed.pop(kernel).close()
        for kernel in self._pids.keys() - managers.keys():
            self._abandon(kernel, time.time())
        for kernel, manager in managers.items():
            if kernel not in self.followed:
                self.followed[kernel] = Iopub(manager, partial(self.receive, kernel))
            pid = manager.provisioner.pid
            if self._pids.get(kernel, pid) != pid:
                # The kernel was restarted, so no message will report the end of earlier cells.
                self._abandon(kernel, started(pid) or time.time())
        self._pids = {kernel: manager.provisioner.pid for kernel, manager in managers.items()}
        for run in self.since():
            # A new kernel may run a cell before its notebook is known.
            if (name := run.notebook or self.notebook_of(run.kernel or "")) != run.notebook:
                self.keep(replace(run, notebook=name))

    def receive(self, kernel: str, message: Mapping[str, Any]) -> None:
        with suppress(KeyError, TypeError, AttributeError):  # ignore a malformed message
            header, parent = message["header"], message["parent_header"]
            kind, content, date = header["msg_type"], message["content"], header["date"]
            when = date.timestamp() if isinstance(date, datetime) else time.time()
            if parent["msg_type"] != "execute_request":
                return
            asked = str(parent["msg_id"])
            if kind == "execute_input":
                # The kernel's message id identifies a run, because a client may reuse a request id.
                run = str(message["header"]["msg_id"])
                self._open[kernel, asked] = run
                self._sources[kernel] = str(content.get("code", ""))[:200]  # to recognize the cell
                count = content.get("execution_count")
                number = count if isinstance(count, int) else None
                self.start(run, self._held[kernel])
                self.keep(CellRun(run, kernel, self.notebook_of(kernel), number, when))
                self._forget()
            elif kind == "status" and content["execution_state"] == "idle":
                self.end(self._open.pop((kernel, asked), ""), when)

    def see(self, snapshot: Snapshot) -> None:
        """Record which GPUs the current and recent runs use."""
        if not snapshot.processes:
            return  # the sampler lists processes only on request
        self._held = defaultdict(list)
        for process in snapshot.processes:
            self._held[process.kernel].append(process)
        for run in self.since():
            # A snapshot soon after a run's end can still add GPUs to the run.
            if run.end is None or run.end >= snapshot.time - 4.0:
                self.use(run.id, snapshot, self._held[run.kernel])

    def runs(self, since: float | None = None) -> list[CellRun]:
        """Return the runs that had not ended at the time `since`; if None, all runs."""
        self._forget()
        return [run for run in self.since() if since is None or run.end is None or run.end > since]

    def running(self, kernel: str) -> tuple[CellRun | None, str | None]:
        """Return a kernel's running cell and the start of its source; (None, None) if idle."""
        open_runs = [run for run in self.since() if run.kernel == kernel and run.end is None]
        return (open_runs[-1], self._sources.get(kernel)) if open_runs else (None, None)

    def news(self, revision: int) -> bytes:
        """Return the message with the runs that changed after a revision."""
        runs = [vars(run) for run in self.since(revision)]
        return json.dumps({"type": "cells", "cells": runs}, ensure_ascii=False).encode()

    def _abandon(self, kernel: str, when: float) -> None:
        """Record `when` as the end of a kernel's open runs that began before `when`."""
        for asked, run in list(self._open.items()):
            known = self.get(run)
            if asked[0] == kernel and (known is None or known.start <= when):
                del self._open[asked]
                self.end(run, when)

    def _forget(self) -> None:
        self.forget(lambda run: run.end is not None and run.end < time.time() - 600.0)  # 10 min


class Iopub:
    """Calls a listener on the event loop with each correctly signed message of a kernel."""

    def __init__(self, manager: Any, listener: Callable[[Mapping[str, Any]], None]) -> None:
        self._listener = listener
        self.address = _address(manager)
        self._session = manager.session.clone()  # a session accepts each message only once
        self._stream = manager.connect_iopub()
        # Receive only topics that begin with these words, such as "kernel.<id>.status".
        for topic in (b"kernel", b"status", b"execute_input"):
            self._stream.setsockopt(zmq.SUBSCRIBE, topic)
        self._stream.setsockopt(zmq.UNSUBSCRIBE, b"")
        self._stream.on_recv(self._receive)

    def close(self) -> None:
        self._stream.close(linger=0)

    def _receive(self, frames: list[Any]) -> None:
        try:
            _, parts = self._session.feed_identities(frames)
            message = self._session.deserialize(parts)
        except (ValueError, TypeError, KeyError, IndexError):
            return  # not a correctly signed message of Jupyter's protocol
        self._listener(message)


def _address(manager: Any) -> tuple[Any, ...]:
    return (id(manager), manager.iopub_port, manager.session.key) if manager else ()
