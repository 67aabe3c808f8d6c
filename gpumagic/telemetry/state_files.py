"""Publish virtual GPUs, and processes whose CUDA is dead, to all processes of this user.

A process with virtual GPUs has a ``.state`` file. The file is mapped into memory, so writing a
counter takes 50 ns. A process whose CUDA is dead (unusable until a restart) has a ``.dead`` file.
"""

import atexit
import json
import mmap
import os
import struct
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from gpumagic.device import cuda_state
from gpumagic.errors import Problem
from gpumagic.telemetry.processes import started
from gpumagic.telemetry.snapshot import GpuSample, Host, ProcessSample
from gpumagic.telemetry.source import Source, T

NAME = "Virtual GPU"  # the model name of every virtual GPU

COUNTERS = 4
RESERVED, BUSY_NS, WINDOW_END_NS, OTHERS = range(COUNTERS)
"""Columns of a GPU's row of counters. RESERVED: bytes that torch's allocator reserves. BUSY_NS:
nanoseconds of work in the last time window. WINDOW_END_NS: the end of that window, from
``time.time_ns()``. OTHERS: bytes of the arrays of other frameworks."""

WINDOW_NS = 1_000_000_000  # length of a window; the utilization is ``BUSY_NS / WINDOW_NS``

_STALE_NS = 1_500_000_000  # a GPU counts as idle this long after the end of its last window
_HEADER = 16384  # bytes of the header, which is JSON padded with spaces
_ROW = COUNTERS * 8  # bytes of each GPU's row of counters, after the header


@dataclass(frozen=True)
class VirtualFacts:
    """The constants of a virtual GPU; ``memory_total`` in bytes."""

    uuid: str
    name: str
    memory_total: int


class VirtualState(NamedTuple):
    """One virtual GPU of a living process, at one moment."""

    pid: int
    sample: GpuSample


class Publisher:
    """Counters of this process's virtual GPUs, readable by all of this user's processes."""

    # One writable row of int64 per GPU, indexed by ``RESERVED`` etc. A forked child has copies.
    counters: list[memoryview]

    def __init__(self, gpus: Sequence[VirtualFacts], folder: Path | None = None) -> None:
        self._pid = os.getpid()
        self._facts = tuple(gpus)
        self.refresh: Callable[[], None] = lambda: None  # called before `states` reads the counters
        # None if no file could be written. Then only this process sees its virtual GPUs.
        self.path: Path | None = None
        self._shared = mmap.mmap(-1, _HEADER + _ROW * len(gpus))
        header = {"pid": self._pid, "started": started(self._pid), "gpus": [*map(asdict, gpus)]}
        self._shared[:_HEADER] = json.dumps(header).encode().ljust(_HEADER)
        with suppress(OSError):
            path = (folder or state_folder()) / f"{self._pid}.state"
            write_file(path, self._shared[:])
            with path.open("r+b") as file:
                self._shared = mmap.mmap(file.fileno(), 0)
            self.path = path
        self._cut_rows(self._shared)
        _live.add(self)
        atexit.register(self.close)

    def _cut_rows(self, memory: mmap.mmap | bytearray) -> None:
        rows = memoryview(memory)[_HEADER:].cast("q")
        self.counters = [rows[n * COUNTERS : (n + 1) * COUNTERS] for n in range(len(self._facts))]

    def states(self) -> list[VirtualState]:
        """Return the current states of these GPUs, without reading the file."""
        self.refresh()
        return _states(self._pid, self._facts, [list(row) for row in self.counters])

    def close(self) -> None:
        """Remove the state file. The counters stay writable."""
        _live.discard(self)
        atexit.unregister(self.close)
        if self.path is not None and os.getpid() == self._pid:
            self.path.unlink(missing_ok=True)
        self.path = None


_live: weakref.WeakSet[Publisher] = weakref.WeakSet()


def count_others(allocated: Callable[[int], int]) -> None:
    """Publish the bytes that arrays of frameworks other than torch hold on each virtual GPU."""
    for publisher in list(_live):
        for ordinal, row in enumerate(publisher.counters):
            row[OTHERS] = allocated(ordinal)


def _after_fork() -> None:
    for publisher in list(_live):  # the files and the GPUs belong to the parent
        publisher.path = None
        publisher._cut_rows(bytearray(publisher._shared[:]))
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def state_folder() -> Path:
    """Return the folder of this user's state files; ``GPUMAGIC_RUNTIME_DIR`` overrides it."""
    if chosen := os.environ.get("GPUMAGIC_RUNTIME_DIR"):
        return Path(chosen) / "virtual"
    from platformdirs import user_runtime_path

    with warnings.catch_warnings():
        # Without XDG_RUNTIME_DIR, platformdirs warns and uses the temporary folder. That is fine.
        warnings.simplefilter("ignore")
        return user_runtime_path("gpumagic") / "virtual"


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically, so that no reader sees a partial file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(name, path)


def read(folder: Path | None = None) -> list[VirtualState]:
    """Return all virtual GPUs of this user's living processes, sorted by process and ordinal."""
    own = [state for publisher in list(_live) for state in publisher.states()]
    folder = folder or state_folder()
    # Unlike `Path.glob`, `glob.glob` raises no error if the folder is unreadable.
    names = {*glob("*.state", root_dir=folder)} - {f"{os.getpid()}.state" if own else ""}
    found = own + [state for name in names for state in read_file(folder / name)]
    return sorted(found, key=lambda state: state.pid)


def read_file(path: Path) -> list[VirtualState]:
    """Return the virtual GPUs in a state file; [] if the file is invalid or its process ended."""
    return _read(path, _virtual) or []


def _virtual(header: dict[str, Any], rows: bytes) -> list[VirtualState]:
    every = header["gpus"]
    facts = [VirtualFacts(str(g["uuid"]), str(g["name"]), int(g["memory_total"])) for g in every]
    if len(rows) != _ROW * len(facts):  # another version of gpumagic wrote the file
        raise ValueError(f"{len(rows)} bytes of counters for {len(facts)} GPUs")
    return _states(int(header["pid"]), facts, [*struct.iter_unpack(f"<{COUNTERS}q", rows)])


def _read(path: Path, parse: Callable[[dict[str, Any], bytes], T]) -> T | None:
    """Parse a file; return None if it is invalid. Delete the file of a process that has ended."""
    try:
        with path.open("rb") as file:
            header, rows = json.loads(file.read(_HEADER)), file.read()
        pid, start, found = int(header["pid"]), float(header["started"]), parse(header, rows)
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    if path.stem != str(pid):
        return None
    # Allow 2 s, because setting the clock changes start times a little.
    if (begun := started(pid)) is not None and abs(begun - start) <= 2.0:
        return found
    with suppress(OSError):
        path.unlink()
    return None


def _states(
    pid: int, facts: Sequence[VirtualFacts], rows: Sequence[Sequence[int]]
) -> list[VirtualState]:
    now = time.time_ns()
    states = []
    for ordinal, (gpu, row) in enumerate(zip(facts, rows, strict=True)):
        fresh = now - row[WINDOW_END_NS] <= _STALE_NS
        busy = min(max(row[BUSY_NS] / WINDOW_NS, 0.0), 1.0) if fresh else 0.0
        sample = GpuSample(
            **vars(gpu),
            virtual=True,
            memory_used=max(row[RESERVED], 0) + max(row[OTHERS], 0),
            utilization=100.0 * busy,
            virtual_ordinal=ordinal,
        )
        states.append(VirtualState(pid, sample))
    return states


def publish_death(death: cuda_state.Death) -> None:
    """Publish to all processes of this user that this process's CUDA is dead."""
    pid, notebook = os.getpid(), os.path.basename(os.environ.get("JPY_SESSION_NAME", ""))
    whose = f"{notebook} (process {pid})" if notebook else f"process {pid}"
    cause = f"CUDA in the kernel of {whose} is dead: {death.cause}"
    fields = {"pid": pid, "started": started(pid), "cause": cause, "cure": death.cure}
    write_file(state_folder() / f"{pid}.dead", json.dumps(fields).encode())


class VirtualSource(Source):
    """Samples this user's virtual GPUs, and reports the processes whose CUDA is dead."""

    name = "virtual"

    def __init__(self, states: Callable[[], Sequence[VirtualState]] = read) -> None:
        self._read = states
        self._states: list[VirtualState] = []

    def gpus(self, host: Host, max_age: float = 0.0) -> list[GpuSample]:
        """Return all virtual GPUs. This process can use only its own GPUs, which come first."""
        self._states = sorted(self._read(), key=lambda state: state.pid != os.getpid())
        return [state.sample for state in self._states]

    def processes(self, max_age: float = 0.0) -> list[ProcessSample]:
        return [
            ProcessSample(state.sample.uuid, state.pid, state.sample.memory_used)
            for state in self._states
        ]

    def problems(self) -> list[Problem]:
        """Return a problem for each live process whose CUDA is dead, this process first."""
        death = cuda_state.death()  # recorded earlier, because the sampler must not call CUDA
        found = [] if death is None else [Problem("cuda-dead", death.said, death.cure)]
        for path in map(state_folder().joinpath, sorted(glob("*.dead", root_dir=state_folder()))):
            if death is None or path.stem != str(os.getpid()):
                fields = _read(path, lambda header, _: (str(header["cause"]), str(header["cure"])))
                found += [Problem("cuda-dead", *fields)] if fields else []
        return found
