"""Join the ranks' process group, say where a rank waits in it, and free one that waits in vain.

All of it runs in a rank. A collective waits in C++, where an interrupt is not seen: only the end of
its connection ends it, and then every variable is still there.
"""

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpumagic import faults
from gpumagic.usercode.files import is_users

_connections: set[int] = set()
_dist: Any = dist  # without the types that leave its stores out
_make_group = distributed_c10d._new_process_group_helper


def _sockets() -> set[int]:
    """The numbers of this process's open sockets."""
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
    """In place of `init_process_group`: a script's call finds the group that it asks for."""
    if not dist.is_initialized():
        _init(*args, **kwargs)


_init = dist.init_process_group


def new_store(listener: socket.socket) -> Any:
    """A store in this process, which listens where the socket does and nowhere else."""
    host, port, *_ = listener.getsockname()
    number = listener.detach()
    return _dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=number
    )


def store_at(host: str, port: int) -> Any:
    """The store that the notebook's process has."""
    return _dist.TCPStore(host, port, is_master=False)


def join(generation: int, backend: str) -> None:
    """Leave the group, if there is one, and join the next with all other ranks.

    The notebook's process has the store, in which each generation has keys of its own.
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
    """End the group's connections: who waits in it has an error. Whether there were any."""
    if not dist.is_initialized():
        return False
    if "nccl" in dist.get_backend_config():
        distributed_c10d._abort_process_group()
    for number in _connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()  # raises for one that listens: gloo could not bear its end
            connection.shutdown(socket.SHUT_RDWR)
    return bool(_connections)


def sequence() -> int:
    """How many collectives this rank has begun in the group, -1 where that is not known."""
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
    """Where a thread is: the user's file and line, and what of `torch.distributed` it is in."""
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
