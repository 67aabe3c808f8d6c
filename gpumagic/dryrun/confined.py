"""Prevent the code of a dry run from writing files, running programs and sending data.

A refused action ends the dry run at the user's line. Printed and displayed output is captured.
Nothing here can be undone, so this module is only for a forked child that will exit. The Linux
kernel refuses actions that Python's audit hook misses. Landlock refuses `os.mkfifo`, shared memory,
and writes by C code. A seccomp filter refuses signals, and C code's chmod and connections.
"""

import builtins
import ctypes
import errno
import getpass
import io
import os
import struct
import sys
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import FrameType
from typing import Any

from gpumagic.dryrun.fakes import Stopped, refusing, suspended
from gpumagic.placement import suspended as unplaced
from gpumagic.usercode.files import is_users, shell

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
_REFUSED = {
    **dict.fromkeys(_PROGRAMS, "starting a program"),
    **dict.fromkeys(("os.fork", "os.forkpty"), "starting a process"),
    "socket.connect": "connecting to a network",
    "socket.bind": "opening a port",
    **dict.fromkeys(("socket.sendto", "socket.sendmsg"), "sending to a network"),
    "os.remove": "removing a file",
    "os.rename": "renaming a file",
    **dict.fromkeys(("os.rmdir", "shutil.rmtree"), "removing a folder"),
    "os.mkdir": "making a folder",
    **dict.fromkeys(("os.truncate", "os.chmod", "os.chown", "os.utime"), "changing a file"),
    **dict.fromkeys(("os.setxattr", "os.removexattr"), "changing a file"),
    **dict.fromkeys(("os.link", "os.symlink"), "making a link"),
    **dict.fromkeys(("os.kill", "os.killpg", "signal.pthread_kill"), "sending a signal"),
    "sqlite3.connect": "opening a database",
    "builtins.input": "asking for input",
}


class Confinement:
    """Capture printed text from the constructor on; refuse actions from `begin` on."""

    def __init__(self) -> None:
        self.printed = io.StringIO()
        self._importing = 0
        for name, sink in (("stdout", self.printed), ("stderr", io.StringIO())):
            with suppress(TypeError):  # also redirect the old stream, which logging may use
                vars(getattr(sys, name)).update(write=sink.write, flush=sink.flush)
            setattr(sys, name, sink)
        warnings.simplefilter("ignore")
        if (ipython := shell()) is not None:
            from IPython.core.displaypub import CapturingDisplayPublisher

            ipython.display_pub = CapturingDisplayPublisher()

    def begin(self) -> bool:
        """Start to refuse actions; return whether the kernel refuses actions of C++ code."""
        sys.dont_write_bytecode = True
        if bars := sys.modules.get("tqdm.std"):  # tqdm's progress bars start a thread
            bars.tqdm.monitor_interval = 0
        setattr(threading.Thread, "start", refusing("starting threads is not allowed in a dry run"))  # noqa: B010
        setattr(ThreadPoolExecutor, "submit", _at_once)  # noqa: B010
        builtins.input = getpass.getpass = refusing("asking for input is not allowed in a dry run")
        self._import_without_fakes()
        sys.addaudithook(self._audit)
        return held_by_the_kernel()

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        reason = ""
        if event == "open":
            path, mode, flags = args
            writes = set(mode) & set("wax+") if isinstance(mode, str) else flags & _WRITES
            if writes and path != os.devnull and not isinstance(path, int):
                reason = f"writing to {path!r}: a dry run writes no file"
        elif event in _REFUSED:
            reason = f"{_REFUSED[event]} is not allowed in a dry run"
        if reason and self._importing:
            raise PermissionError(reason)  # the imported library can work without cache files
        if reason:
            stopped = Stopped(reason)  # the constructor records the reason
            if event in _PROGRAMS and not _asked_by_user(sys._getframe(1)):
                raise PermissionError(reason)  # libraries that run `nvidia-smi` handle this error
            raise stopped

    def _import_without_fakes(self) -> None:
        """Suspend fakes while a library is imported, because its modules may use real tensors."""
        run = SourceFileLoader.exec_module

        def execute(loader: SourceFileLoader, module: Any) -> None:
            if is_users(loader.path):
                run(loader, module)
                return
            self._importing += 1
            try:
                with suspended(), unplaced():
                    run(loader, module)
            finally:
                self._importing -= 1

        SourceFileLoader.exec_module = execute  # type: ignore[assignment, method-assign]


def _at_once(pool: Any, function: Any, /, *args: Any, **options: Any) -> Future[Any]:
    """Run a thread pool's job in the calling thread; return the finished future."""
    future = Future[Any]()
    try:
        future.set_result(function(*args, **options))
    except Exception as error:  # noqa: BLE001  `Future.result` raises it
        future.set_exception(error)
    return future


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the user's code, not a library, called the standard library."""
    own = os.path.dirname(os.__file__)
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == own:
        frame = frame.f_back
    return frame is None or is_users(frame.f_code.co_filename)


def held_by_the_kernel() -> bool:
    """Make Linux refuse actions that the audit hook misses; return whether this succeeded."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    machine = os.uname().machine
    steps = ctypes.create_string_buffer(_filter(machine))
    program = struct.pack("HP", len(steps) // 8, ctypes.addressof(steps))
    refused = libc.prctl(_SECCOMP, _FILTER, program, 0, 0)
    return _no_file_written(libc) and refused == 0 and machine in _CALLS


# Landlock (since Linux 5.13) restricts access to files. Its call numbers are the same on all CPUs.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = _PATH_BENEATH = 1
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_WRITING = sum(1 << bit for bit in (1, *range(4, 13)))  # writing, removing and creating files


def _no_file_written(libc: Any) -> bool:
    """Refuse writes to all files except the null device; return whether this succeeded."""
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    truncating = _TRUNCATE if version >= 3 else 0
    rules = struct.pack("=Q", _WRITING | truncating)
    ruleset = libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    if ruleset < 0:
        return False
    allowed = struct.pack("=Qi", _WRITE_FILE | truncating, os.open(os.devnull, os.O_PATH))
    libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, allowed, 0)
    return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)


# A seccomp filter refuses the system calls that Landlock does not cover.
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IS, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
# By architecture: its number, the calls that are always refused, and the calls that are refused if
# they act on another process. All these system calls change files, send data, or affect processes.
_CALLS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        (
            *(76, *range(90, 95), 132, *range(188, 191), *range(197, 200), 235, 260, 261, 268),
            *(280, 452, 463, 466, 42, 44, 46, 49, 307, 425, 59, 322, 101, 311, 424, 129, 297),
            *(200, 141, 251),
        ),
        (62, 234, 302, 142, 144, 203, 314, 109),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(*range(5, 8), *range(14, 17), 45, *range(52, 56), 88, 452, 463, 466),
            *(200, 203, 206, 211, 269, 425, 221, 281, 117, 271, 424, 138, 240, 130, 140, 30),
        ),
        (129, 131, 261, 118, 119, 122, 274, 154),
    ),
}


def _filter(machine: str) -> bytes:
    """Return the BPF program that the kernel runs before each system call."""

    def step(does: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("=HBBI", does, then, otherwise, value)  # then, otherwise: steps to skip

    allow, refuse = step(_RETURN, _ALLOW), step(_RETURN, _REFUSE)
    if machine not in _CALLS:
        return allow
    number, always, of_others = _CALLS[machine]
    steps = [step(_LOAD, 4), step(_IS, number, 1), allow, step(_LOAD, 0)]
    for call in always:
        steps += [step(_IS, call, 0, 1), refuse]
    process = [step(_LOAD, 16), step(_IS, 0, 2), step(_IS, os.getpid(), 1)]
    for call in of_others:
        steps += [step(_IS, call, 0, 5), *process, refuse, allow]
    return b"".join([*steps, allow])
