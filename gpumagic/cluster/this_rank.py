"""Join a rank to its process group, and report to the notebook where its cell is.

Everything here runs in a rank. A collective waits in C++, where Python sees no interrupt. Aborting
its connection ends it and keeps all variables. A thread does this, since the main thread waits; it
is the one that reports the position.

A late interrupt ends no other cell: the store names the cell that is to end.
"""

import contextlib
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpumagic import faults
from gpumagic.cluster import parent_watch
from gpumagic.device import Device
from gpumagic.usercode.files import is_users

_connections: set[int] = set()
_dist: Any = dist  # without the types that leave its stores out
_make_group = distributed_c10d._new_process_group_helper


def _sockets() -> set[int]:
    """Return the numbers of this process's open sockets."""
    found = set()
    for each in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISSOCK(os.fstat(int(each)).st_mode):
                found.add(int(each))
    return found


def _make_and_note(*args: Any, **kwargs: Any) -> Any:
    before = _sockets()
    try:
        return _make_group(*args, **kwargs)
    finally:
        _connections.update(_sockets() - before)


def _init_once(*args: Any, **kwargs: Any) -> None:
    """Replace `init_process_group`: a script's call gets the existing group."""
    if not dist.is_initialized():
        _init(*args, **kwargs)


_init = dist.init_process_group


def new_store(listener: socket.socket) -> Any:
    """Return a store in this process that listens on the socket only."""
    host, port, *_ = listener.getsockname()
    number = listener.detach()
    return _dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=number
    )


def store_at(host: str, port: int) -> Any:
    """Return the store of the notebook's process."""
    return _dist.TCPStore(host, port, is_master=False)


def join(generation: int, backend: str) -> None:
    """Leave the group, if there is one, and join the next with all other ranks.

    The store is in the notebook's process; each generation has its own keys.
    """
    leave()
    distributed_c10d._new_process_group_helper = _make_and_note
    dist.init_process_group = distributed_c10d.init_process_group = _init_once
    given = os.environ
    store = store_at(given["MASTER_ADDR"], int(given["MASTER_PORT"]))
    _init(
        backend,
        store=_dist.PrefixStore(f"generation-{generation}", store),
        rank=int(given["RANK"]),
        world_size=int(given["WORLD_SIZE"]),
    )


def leave() -> None:
    """End the group."""
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception as error:  # noqa: BLE001  of a group that another rank has broken
            faults.keep("leaving a process group", error)
    _connections.clear()


def cut() -> bool:
    """Close the group's connections, so waiting threads fail. Return whether any were open."""
    if not dist.is_initialized():
        return False
    if "nccl" in dist.get_backend_config():
        distributed_c10d._abort_process_group()
    for number in _connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()  # raises for a listening one, which gloo needs
            connection.shutdown(socket.SHUT_RDWR)
    return bool(_connections)


def sequence() -> int:
    """Return the number of collectives that this rank has begun; -1 if unknown."""
    if not dist.is_initialized():
        return -1
    try:
        group: Any = distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return -1


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of(thread: int) -> tuple[str, int, str]:
    """Return a thread's position: the user's file and line, and its `torch.distributed` call."""
    call = ""
    for frame in _frames(sys._current_frames().get(thread)):
        code = frame.f_code
        if is_users(code.co_filename):
            return code.co_filename, frame.f_lineno, call
        if code.co_filename == distributed_c10d.__file__ and code.co_name != "wrapper":
            call = code.co_name
        elif code.co_name == "_engine_run_backward":
            call = call or "backward"
    return "", 0, call


_PULSE_S = 0.5
# A cell that runs this many pulses after it was to end waits in a collective.
_FREE = 3

# Keys of the store.
ENDING = "end/{}"
"""Set when a cell must end."""
PULSE = "pulse/{}"
"""The last position of a rank."""


class ThisRank:
    """This process as a rank."""

    def __init__(self, rank: int, device: Device, store: tuple[str, int]) -> None:
        self.rank, self.device = rank, device
        self.main = threading.get_ident()
        self.running = ""  # the cell
        self.cut = self.in_code = False
        self._store = store_at(*store)
        threading.Thread(target=self._pulse, daemon=True).start()

    @contextmanager
    def runs(self, cell: str) -> Iterator[None]:
        """Within, report the cell's position, and let an interrupt end a collective."""
        handler = signal.signal(signal.SIGINT, self._interrupt)
        self.cut, self.running = False, cell
        try:
            yield
        finally:
            self.running = ""
            signal.signal(signal.SIGINT, handler)

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            parent_watch.end_orphan()
            return True

    def _is_to_end(self, cell: str) -> bool:
        return bool(cell) and self._is_there(ENDING.format(cell))

    def _interrupt(self, *_: object) -> None:
        """Interrupt the user's code, but not the work after it."""
        if self.in_code and self._is_to_end(self.running):
            self.in_code = False
            raise KeyboardInterrupt

    def _pulse(self) -> None:
        """Report the cell's position and idle time twice a second.

        Abort a collective in which a cell waits that is to end.
        """
        last, since, used, ending_for = None, 0.0, 0.0, 0
        while True:
            time.sleep(_PULSE_S)
            running = self.running
            ending_for = ending_for + 1 if self._is_to_end(running) else 0
            if ending_for >= _FREE and self.running == running:
                self.cut |= cut()
            if not running:
                self._say(PULSE.format(self.rank), "")
                continue
            now, busy = time.monotonic(), time.process_time()
            place = running, *place_of(self.main)
            if place != last or busy - used > _PULSE_S / 4:
                last, since = place, now
            used = busy
            pulse = dict(zip(("cell", "file", "line", "call"), place, strict=True))
            self._say(PULSE.format(self.rank), json.dumps({**pulse, "idle": now - since}))

    def _say(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except RuntimeError:
            parent_watch.end_orphan()
