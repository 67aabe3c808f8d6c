"""End an orphan: a process of this user whose kernel is gone and that still holds GPU memory.

Nothing else can be ended here. Who asks names the process twice, by pid and by when it began, so
that another one that has its pid by now is left alone.
"""

import asyncio
import json
from dataclasses import dataclass

import psutil

from gpumagic.telemetry.processes import Owner, is_alive
from gpumagic.telemetry.snapshot import Snapshot

WAIT_S = 3.0
"""How long a process has to end, in seconds."""

# The clock may be set while a process lives, which moves the start time that the system reports.
_SAME_START_S = 1.0
_PAUSE_S = 0.05


class NotEnded(Exception):
    """Why nothing was done; ``status`` is that of the HTTP answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Order:
    """Which process; ``force``: do not ask it, kill it."""

    pid: int
    started: float
    force: bool = False


def parse_order(body: bytes) -> Order:
    """The order in a request; raises NotEnded where it is malformed."""
    try:
        order = json.loads(body)
    except (ValueError, RecursionError):
        order = None
    given = order if isinstance(order, dict) else {}
    pid, started, force = given.get("pid"), given.get("started"), given.get("force", False)
    # True is an integer too, to Python.
    if type(pid) is int and type(started) in (int, float) and type(force) is bool:
        made = Order(pid, started or 0.0, force)
        if 0 < made.pid < 2**31 and 0 < made.started < 2**53:
            return made
    raise NotEnded(400, 'give {"pid": 4242, "started": 1700000000.0}, both as in the snapshot')


async def terminate(order: Order, snapshot: Snapshot, owner: Owner) -> tuple[bool, str]:
    """End an orphan: whether it has ended, and what to say. NotEnded where it is no orphan of this
    user that holds GPU memory, or another process."""
    _check(order, snapshot, owner)
    named = f"process {order.pid} ({owner.name or 'unknown'})"
    try:
        process = psutil.Process(order.pid)
        # Another may have its pid since its owner was looked up; from here on psutil takes care.
        if abs(process.create_time() - order.started) > _SAME_START_S:
            raise psutil.NoSuchProcess(order.pid)
        process.kill() if order.force else process.terminate()
    except psutil.NoSuchProcess:
        return True, f"{named} has ended by itself"
    except psutil.AccessDenied:
        raise NotEnded(403, f"the system does not allow to end process {order.pid}") from None
    if await _ends(order.pid):
        return True, f"{named} has ended"
    again = 'ask again with "force": true to kill it'
    if order.force:
        again = "it is in a call of the driver, perhaps; look again in a while"
    return False, f"{named} still runs after {WAIT_S:.0f} s; {again}"


def _check(order: Order, snapshot: Snapshot, owner: Owner) -> None:
    if all(process.pid != order.pid for process in snapshot.processes):
        silent = [p.cause for p in snapshot.problems if p.code == "stalled"]
        if silent:
            raise NotEnded(503, f"who holds memory is not known: {silent[0]}")
        raise NotEnded(404, f"process {order.pid} holds no GPU memory; look again")
    if not is_alive(order.pid):
        raise NotEnded(404, f"process {order.pid} has ended; look again")
    if owner.started is None:
        raise NotEnded(403, f"process {order.pid} is another user's")
    if abs(owner.started - order.started) > _SAME_START_S:
        raise NotEnded(
            409,
            f"process {order.pid} began at another time: it is another one by now; look again",
        )
    # By both: the snapshots saw it while its kernel lived; the owner is of this moment.
    told = any(process.orphan for process in snapshot.processes if process.pid == order.pid)
    if not owner.orphan or not told:
        raise NotEnded(
            403,
            f"process {order.pid} is no orphan: only what a dead kernel left behind is ended here; "
            "shut down its kernel, or use kill in a terminal",
        )


async def _ends(pid: int) -> bool:
    """Within ``WAIT_S``; also where nobody takes note of its end, as in containers without init."""
    left = WAIT_S
    while is_alive(pid) and left > 0:
        await asyncio.sleep(_PAUSE_S)
        left -= _PAUSE_S
    return not is_alive(pid)
