"""Serve all clients of the server from one sampler.

Each client has a task that sends one snapshot at a time, so a slow client gets fewer snapshots, not
old ones. A snapshot is encoded once for all clients, and not on the event loop.
"""

import asyncio
import json
import math
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tornado.websocket import WebSocketClosedError

from gpumagic import faults
from gpumagic.server.deaths import Deaths
from gpumagic.server.kernels import KernelCells, KernelTable
from gpumagic.telemetry.doctor import Check, Doctor
from gpumagic.telemetry.sampler import PERIODS_S, Sampler, Subscription, stalled
from gpumagic.telemetry.snapshot import Snapshot
from gpumagic.telemetry.source import T


@dataclass(frozen=True)
class Want:
    """The subscription of one client."""

    period_s: float = 1.0
    processes: bool = False
    past: bool = False  # whether to send the history once
    since: float | None = None  # only history after this Unix time; all if None


def parse_want(text: str | bytes, before: Want) -> Want | None:
    """Parse a client's message; None if malformed. `before` gives the values of missing fields."""
    try:
        message = json.loads(text)
        period_s = float(message.get("period", before.period_s))
        since = None if message.get("since") is None else float(message["since"])
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    if message.get("type") != "want" or not math.isfinite(period_s + (since or 0.0)):
        return None
    least, greatest = PERIODS_S
    processes = bool(message.get("processes", before.processes))
    return Want(min(max(period_s, least), greatest), processes, "since" in message, since)


class Client:
    """Sends messages to one client; `write` finishes when a message has left this process."""

    def __init__(self, hub: "Hub", write: Callable[[bytes], Awaitable[None]]) -> None:
        self._hub = hub
        self._write = write
        self._woken = asyncio.Event()
        self._newest = b""  # the message with the newest snapshot
        self.subscription: Subscription | None = None
        self.ask(Want())
        self.task = asyncio.create_task(self._run())

    def ask(self, want: Want) -> None:
        self.want, before = want, self.subscription
        self.subscription = self._hub.sampler.subscribe(
            partial(self._hub.pass_on, self), period_s=want.period_s, processes=want.processes
        )
        if before is not None:
            before.close()
        self.wake()

    def close(self) -> None:
        self.task.cancel()
        if self.subscription is not None:
            self.subscription.close()

    def wake(self, newest: bytes = b"") -> None:
        """Make the task send `newest` (if given), requested history and changed cell runs."""
        self._newest = newest or self._newest
        self._woken.set()

    async def _run(self) -> None:
        sent, revision = b"", self._hub.cells.revision
        with faults.kept("sending to a page"), suppress(WebSocketClosedError):
            while True:
                await self._woken.wait()
                self._woken.clear()
                if self._newest is not sent:
                    sent = self._newest
                    await self._write(sent)
                if self.want.past:
                    self.want = replace(self.want, past=False)
                    await self._write(await self._hub.past(self.want.since))
                if revision < self._hub.cells.revision:
                    news, revision = self._hub.cells.news(revision), self._hub.cells.revision
                    await self._write(news)


def aside(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking function on a new thread; canceling the future does not stop the function."""
    # Use no executor, because Python would wait for its thread at exit, even if the driver stalls.
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  the future raises it
            future.set_exception(error)

    threading.Thread(target=run, name="gpumagic-aside", daemon=True).start()
    return asyncio.wrap_future(future)


class Hub:
    """Serves the clients. Call methods on the event loop, unless a docstring says otherwise."""

    answer_s = 5.0  # seconds that a request waits for the doctor
    refresh_s = 1.0  # seconds between two refreshes of the kernels
    idle_refresh_s = 3.0  # seconds between two refreshes without clients

    def __init__(
        self, sampler: Sampler, kernels: KernelTable, cells: KernelCells, deaths: Deaths
    ) -> None:
        self.sampler = sampler
        self.kernels = kernels
        self.cells = cells
        self.deaths = deaths
        self.doctor: Callable[[], list[Check]] = lambda: Doctor().checks()
        self.clients: set[Client] = set()
        self._newest: tuple[Snapshot, bytes] | None = None  # the newest snapshot, and its message
        self._checks: asyncio.Future[list[Check]] | None = None
        self._look_now = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._closed = False
        cells.on_change = self._wake

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The clients' tasks, and the task that refreshes the kernels (if that task runs)."""
        return [*(client.task for client in self.clients), *([self._watch] if self._watch else [])]

    def join(self, write: Callable[[bytes], Awaitable[None]]) -> Client | None:
        """Add a client and send it a snapshot soon; return None if the server is stopping."""
        if self._closed:
            return None
        self._loop = asyncio.get_running_loop()
        client = Client(self, write)
        self.clients.add(client)
        self.watch()
        # Accept a snapshot up to 2 s old, so that reloading a page does not query the driver.
        young = self.sampler.fresh(processes=False, max_age_s=2.0)
        # With `young.add_done_callback`, `pass_on` might run on this loop, and block the loop.
        aside(lambda: self.pass_on(client, young.result()))
        return client

    def watch(self) -> None:
        """Refresh the kernels now, and regularly while there are kernels or clients."""
        self._look_now.set()
        if self._watch is None and not self._closed:
            self._watch = asyncio.create_task(self._keep_refreshing())

    def leave(self, client: Client) -> None:
        client.close()
        self.clients.discard(client)

    async def fresh(self, *, max_age_s: float = 1.0) -> Snapshot:
        """Return a recent snapshot. If the driver stalls, return the last one with a Problem."""
        await self.kernels.refresh()
        taken = self.sampler.fresh(max_age_s=max_age_s)
        return await aside(partial(self.deaths.add_to, await asyncio.wrap_future(taken)))

    async def past(self, since: float | None) -> bytes:
        """Return the message with the history and cells after `since`, and all known deaths."""
        cells = [vars(run) for run in self.cells.runs(since)]
        events = [vars(event) for event in self.deaths.events]

        def encoded() -> bytes:
            history = self.sampler.history.since(since)
            message = {"type": "history", "history": history, "cells": cells, "events": events}
            return json.dumps(message, ensure_ascii=False, allow_nan=False).encode()

        return await aside(encoded)

    async def checks(self) -> list[dict[str, Any]]:
        """Return the doctor's checks and gpumagic's own errors. Concurrent requests share a run."""
        if self._checks is None or self._checks.done():
            self._checks = aside(self.doctor)
        done, _ = await asyncio.wait((self._checks,), timeout=self.answer_s)
        silent = stalled(self.answer_s)
        found = self._checks.result() if done else [Check("NVML", False, silent.cause, silent.cure)]
        cure = "report it to gpumagic"
        own = [Check("the server", False, str(fault), cure) for fault in faults.all_kept()]
        return [vars(check) for check in [*found, *own]]

    async def close(self) -> None:
        self._closed = True
        tasks = self.tasks
        for client in list(self.clients):
            self.leave(client)
        for future in (*tasks, self._checks):
            if future is not None:
                future.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stop_following()
        self.sampler.close()

    def _wake(self) -> None:
        for client in self.clients:
            client.wake()

    def pass_on(self, client: Client, snapshot: Snapshot) -> None:
        """Send a snapshot to a client. This may block, so do not call it on the event loop."""
        with suppress(RuntimeError):  # the stopping server has closed the loop
            newest = self._newest
            if newest is None or newest[0] is not snapshot:
                text = self.deaths.add_to(snapshot).to_json()
                message = b'{"type":"snapshot","snapshot":' + text.encode() + b"}"
                newest = self._newest = snapshot, message
                self._loop.call_soon_threadsafe(self.cells.see, snapshot)
            self._loop.call_soon_threadsafe(client.wake, newest[1])

    async def _keep_refreshing(self) -> None:
        # Before Python 3.12, `wait_for` may lose a cancellation, so check `_closed` too.
        while not self._closed and (self.clients or self.kernels.managers()):
            # A kernel manager of another package may raise anything.
            with faults.kept("looking at this server's kernels"):
                await self.kernels.refresh()
                managers = self.kernels.managers()
                self.cells.follow(managers)
                self.deaths.follow(managers)
                await aside(partial(self.deaths.look, measure=not self.clients))
            with suppress(asyncio.TimeoutError):
                pause = self.refresh_s if self.clients else self.idle_refresh_s
                await asyncio.wait_for(self._look_now.wait(), pause)
            self._look_now.clear()
        self._stop_following()
        self._watch = None

    def _stop_following(self) -> None:
        self.cells.follow({})
        self.deaths.follow({})
