"""Serve all clients of the server from one sampler.

A snapshot is encoded once, on the sampler's thread, and sent to the clients in small groups, so
that other requests are served in between. Sending never raises. One message is in flight per
client, and a newer message replaces a waiting one: a slow client gets fewer snapshots, not older
ones.
"""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from gpumagic import faults
from gpumagic.server.deaths import Deaths
from gpumagic.server.kernels import KernelCells, KernelTable
from gpumagic.telemetry.doctor import Check, Doctor
from gpumagic.telemetry.processes import Owner, Owners
from gpumagic.telemetry.sampler import PERIODS_S, TOLERANCE, Sampler, Subscription
from gpumagic.telemetry.snapshot import Problem, Snapshot

LONGEST_MESSAGE = 4096
"""Bytes; a client that sends more is disconnected."""


@dataclass(frozen=True)
class Want:
    """The subscription of one client."""

    period_s: float = 1.0
    processes: bool = False
    past: bool = False  # the history is to be sent once
    since: float | None = None  # only entries after this Unix time, all if None


def parse_want(text: str | bytes, before: Want) -> Want | None:
    """Return the request of a message, None if malformed; missing fields stay unchanged."""
    try:
        message = json.loads(text)
        if message["type"] != "want":
            return None
        period_s = float(message.get("period", before.period_s))
        since = message.get("since")
        since = None if since is None else float(since)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    if not math.isfinite(period_s) or not math.isfinite(since or 0.0):
        return None
    least, greatest = PERIODS_S
    processes = bool(message.get("processes", before.processes))
    return Want(min(max(period_s, least), greatest), processes, "since" in message, since)


class Outbox:
    """Sends to one client, on the event loop; ``write`` returns a future that is done when the
    message has left this process."""

    def __init__(self, write: Callable[[bytes], asyncio.Future[None]], cells: KernelCells) -> None:
        self._write = write
        self._cells = cells
        self._waits: dict[str, bytes] = {}
        self._told = cells.revision
        self._due = -math.inf
        self._under_way = False
        self._closed = False
        self.want = Want()

    def ask(self, want: Want) -> None:
        """Change the client's request."""
        # A shorter period takes effect at once.
        self._due = min(self._due, time.monotonic() + want.period_s)
        self.want = want

    def snapshot(self, message: bytes) -> None:
        """Offer a new snapshot, which may not be due for this client."""
        now = time.monotonic()
        period = self.want.period_s
        if now < self._due - TOLERANCE * period:
            return
        # In step with the ticks, without a burst after a pause.
        self._due = max(self._due + period, now + period / 2)
        self._waits["snapshot"] = message
        self.flush()

    def history(self, message: bytes) -> None:
        """Send the requested history."""
        self._waits["history"] = message
        self.flush()

    def flush(self) -> None:
        """Send a waiting message, if none is in flight."""
        if self._under_way or self._closed:
            return
        message = self._next()
        if message is not None:
            self._under_way = True
            self._write(message).add_done_callback(self._written)

    def close(self) -> None:
        """Stop sending and drop everything, since the client is gone."""
        self._closed = True
        self._waits = {}

    def _next(self) -> bytes | None:
        for kind in ("snapshot", "history"):
            if kind in self._waits:
                return self._waits.pop(kind)
        if self._told < self._cells.revision:
            told, self._told = self._told, self._cells.revision
            return self._cells.news(told)
        return None

    def _written(self, future: asyncio.Future[None]) -> None:
        self._under_way = False
        # Read the result even if unused: an unread error is logged with its traceback.
        if future.cancelled() or future.exception() is not None:
            self.close()
        self.flush()


# Send to this many clients without a pause; each takes some 50 µs.
_GROUP = 4
_YOUNG_S = 2.0
_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

T = TypeVar("T")


def aside(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking function on its own thread; cancelling the future only drops the result."""
    # A daemon, unlike an executor's: a stalled driver must not keep the server alive.
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
    """Serves the clients, on the event loop unless a method says otherwise."""

    answer_s = 5.0  # seconds that a request waits for the driver
    refresh_s = 1.0  # seconds between two looks at the kernels
    rest_s = 3.0  # the same without clients, for what must be known when a kernel dies
    linger_s = 60.0  # seconds after the last client has gone, which may be reloading

    def __init__(
        self, sampler: Sampler, kernels: KernelTable, cells: KernelCells, deaths: Deaths
    ) -> None:
        self.sampler = sampler
        self.kernels = kernels
        self.cells = cells
        self.deaths = deaths
        self.doctor: Callable[[], list[Check]] = lambda: Doctor().checks()
        self.clients: dict[Outbox, None] = {}
        self.subscription: Subscription | None = None
        self._checks: asyncio.Future[list[Check]] | None = None
        self._newest: tuple[Snapshot, bytes] | None = None
        self._woken = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ticked = False
        self._left_at = -math.inf
        self._pump: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._asides: set[asyncio.Task[None]] = set()
        self._closed = False
        cells.on_change = self._woken.set

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The running tasks; none some time after the last client has gone."""
        return [task for task in (self._pump, self._watch, *self._asides) if task]

    def join(self, write: Callable[[bytes], asyncio.Future[None]]) -> Outbox:
        """Add a client and send it a snapshot as soon as possible."""
        outbox = Outbox(write, self.cells)
        if self._closed:
            outbox.close()
            return outbox
        self.clients[outbox] = None
        self._loop = asyncio.get_running_loop()
        self._follow()
        if self._pump is None:
            self._pump = asyncio.create_task(self._run())
        self.watch()
        if self._newest is not None:
            outbox.snapshot(self._newest[1])
        else:
            # Perhaps the page was reloaded: a recent snapshot is good enough.
            young = self.sampler.fresh(processes=False, max_age_s=_YOUNG_S)
            young.add_done_callback(lambda future: self._receive(future.result()))
        return outbox

    def watch(self) -> None:
        """Look at the kernels now and from now on, while there are kernels or clients."""
        self._hurry.set()
        if self._watch is None and not self._closed:
            self._watch = asyncio.create_task(self._look_after())

    def ask(self, outbox: Outbox, want: Want) -> None:
        """Handle a client's request."""
        outbox.ask(want)
        self._follow()
        if want.past:
            task = asyncio.create_task(self._send_past(outbox, want.since))
            self._asides.add(task)
            task.add_done_callback(self._asides.discard)

    def leave(self, outbox: Outbox) -> None:
        """Remove a client."""
        outbox.close()
        if self.clients.pop(outbox, self) is None:
            self._follow()

    async def fresh(self, *, processes: bool = True, max_age_s: float = 1.0) -> Snapshot:
        """Return a snapshot for a request; if the driver stalls, the last one with a Problem."""
        await self.kernels.refresh()
        future = asyncio.wrap_future(self.sampler.fresh(processes=processes, max_age_s=max_age_s))
        done, _ = await asyncio.wait((future,), timeout=self.answer_s)
        stalled = Snapshot(time.time(), problems=(self._silent(),))
        snapshot = future.result() if done else self.sampler.latest() or stalled
        return await aside(lambda: self.deaths.add_to(snapshot))

    async def owner(self, pid: int) -> Owner:
        """Return the present owner of a process; snapshots have it some seconds late."""
        await self.kernels.refresh()
        # Without its GPUs' ordinals, which a stalled driver would delay.
        owners = Owners(self.kernels.kernels, gpus=tuple)
        return (await aside(lambda: owners.look_up({pid})))[pid]

    async def past(self, since: float | None) -> bytes:
        """Return the message with the history and cells after a moment."""
        cells = [run.to_dict() for run in self.cells.runs(since)]

        def encoded() -> bytes:
            past = self.sampler.history.since(since)
            # GPU by GPU: one long `dumps` would block the event loop.
            gpus = ",".join(f"{_json(uuid)}:{_json(held)}" for uuid, held in past["gpus"].items())
            history = f'{{"time":{_json(past["time"])},"gpus":{{{gpus}}}}}'
            events = _json([asdict(event) for event in self.deaths.events])
            both = f'"cells":{_json(cells)},"events":{events}'
            return f'{{"type":"history","history":{history},{both}}}'.encode()

        return await aside(encoded)

    async def checks(self) -> list[dict[str, Any]]:
        """Return the doctor's checks; concurrent requests get the same answer."""
        if self._checks is None or self._checks.done():
            self._checks = aside(self.doctor)
        done, _ = await asyncio.wait((self._checks,), timeout=self.answer_s)
        silent = self._silent()
        found = self._checks.result() if done else [Check("NVML", False, silent.cause, silent.cure)]
        own = [
            Check("the server", False, str(f), "report it to gpumagic") for f in faults.all_kept()
        ]
        return [asdict(check) for check in [*found, *own]]

    async def close(self) -> None:
        """Stop with the server."""
        self._closed = True
        for outbox in list(self.clients):
            self.leave(outbox)
        tasks = self.tasks
        for future in (*tasks, self._checks):
            if future is not None:
                future.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stop_following()
        # It waits for its thread, which may be in the driver.
        await aside(self.sampler.close)

    def _silent(self) -> Problem:
        cause = f"a GPU's driver has not answered for {self.answer_s:.0f} s"
        return Problem("stalled", cause, "look at dmesg; if it stays so, restart the machine")

    def _follow(self) -> None:
        """Subscribe to the sampler for all clients."""
        if not self.clients:
            self._left_at = time.monotonic()
            self._newest = None
            if self.subscription is not None:
                self.subscription.close()
                self.subscription = None
            self._woken.set()
            return
        wants = [outbox.want for outbox in self.clients]
        period = min(want.period_s for want in wants)
        processes = any(want.processes for want in wants)
        before = self.subscription
        if before is None or (before.period_s, before.processes) != (period, processes):
            self.subscription = self.sampler.subscribe(
                self._receive, period_s=period, processes=processes
            )
            if before is not None:
                before.close()

    def _receive(self, snapshot: Snapshot) -> None:
        """Take a snapshot over, on the sampler's thread."""
        snapshot = self.deaths.add_to(snapshot)
        message = b'{"type":"snapshot","snapshot":' + snapshot.to_json().encode() + b"}"
        try:
            self._loop.call_soon_threadsafe(self._take, (snapshot, message))
        except RuntimeError:
            return  # the loop was closed: the server stops

    def _take(self, newest: tuple[Snapshot, bytes]) -> None:
        if self.clients:
            self._newest = newest
            self._ticked = True
            self._woken.set()

    async def _run(self) -> None:
        """Send news to the clients, until there are no clients."""
        while self.clients:
            await self._woken.wait()
            self._woken.clear()
            ticked, self._ticked = self._ticked, False
            if ticked and self._newest is not None:
                self.cells.see(self._newest[0])
            for n, outbox in enumerate(list(self.clients), 1):
                if ticked and self._newest is not None:
                    outbox.snapshot(self._newest[1])
                outbox.flush()
                if n % _GROUP == 0:
                    await asyncio.sleep(0)
        self._pump = None

    async def _look_after(self) -> None:
        """Follow the kernels while there are some or clients, and a while longer."""
        while (
            self.clients
            or self.kernels.managers()
            or time.monotonic() - self._left_at < self.linger_s
        ):
            # A kernel manager may be somebody else's class.
            with faults.kept("looking at this server's kernels"):
                await self.kernels.refresh()
                managers = self.kernels.managers()
                self.cells.follow(managers)
                self.deaths.follow(managers)
                await aside(partial(self.deaths.look, measure=not self.clients))
            with suppress(asyncio.TimeoutError):
                pause = self.refresh_s if self.clients else self.rest_s
                await asyncio.wait_for(self._hurry.wait(), pause)
            self._hurry.clear()
        self._stop_following()
        self._watch = None

    def _stop_following(self) -> None:
        self.cells.stop()
        self.deaths.follow({})

    async def _send_past(self, outbox: Outbox, since: float | None) -> None:
        outbox.history(await self.past(since))
