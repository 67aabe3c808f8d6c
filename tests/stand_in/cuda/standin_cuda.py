"""Load the stand-in libraries before torch, its kernels after; read the log; plant faults.

import standin_cuda, torch  # with STANDIN_CUDA_DEVICES=2 in the environment
with standin_cuda.log() as log:
    x.cuda().sum().item()
log.bytes("h2d"), log.count("stream_sync"), log.launches()
"""

import atexit
import ctypes
import os
import shutil
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

_FOLDER = Path(os.environ.get("STANDIN_CUDA_LIBRARIES", "."))
KINDS = [  # as in standin.h
    "malloc", "malloc_failed", "free", "host_alloc", "host_free", "h2d", "d2h", "d2d", "peer",
    "h2h", "memset", "launch", "refused", "stream_sync", "device_sync", "event_sync",
    "event_record", "stream_wait",
]  # fmt: skip
WAITS = {"stream_sync", "device_sync", "event_sync"}


class _Record(ctypes.Structure):
    _fields_ = [("ns", ctypes.c_uint64), ("kind", ctypes.c_int), ("device", ctypes.c_int),
                ("bytes", ctypes.c_size_t), ("stream", ctypes.c_void_p), ("name", ctypes.c_char_p),
                ("blocking", ctypes.c_int)]  # fmt: skip


def _load(path):
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def make_machine():
    """A folder for this process and its children: what NVML tells, and who uses how much memory."""
    folder = tempfile.mkdtemp(prefix="standin-cuda-")
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    mib = int(os.environ.get("STANDIN_CUDA_MEMORY") or 16384)
    nvml = Path(folder, "nvml.txt")
    nvml.write_text(
        f"gpus={os.environ['STANDIN_CUDA_DEVICES']}\ngpu.*.total={mib * 2**20}\n"
        "gpu.*.reserved=0\ngpu.*.name=Stand-in H100\n"
    )
    os.environ.setdefault("STAND_IN_NVML", str(nvml))
    os.environ["STANDIN_CUDA_USED"] = str(Path(folder, "used"))


if "torch" in sys.modules:
    raise ImportError("standin_cuda must be imported before torch")
HAS_GPUS = int(os.environ.get("STANDIN_CUDA_DEVICES") or 0) > 0
if HAS_GPUS and "STANDIN_CUDA_USED" not in os.environ:
    make_machine()
# A SONAME that is loaded is not searched for again: torch's own folders of libraries do not matter.
_runtime = _load(next(_FOLDER.glob("libcudart.so.*")))
_runtime.standin_used.restype = _runtime.standin_log.restype = ctypes.c_size_t
_runtime.standin_slow.argtypes = [ctypes.c_double] * 3
runtime = _runtime if HAS_GPUS else None
_driver = [_FOLDER / "libcuda.so.1", _FOLDER / "libnvidia-ml.so.1"]  # not there without a GPU
_others = sorted({*_FOLDER.glob("lib*.so.*")} - {*_driver})
_loaded = [_load(path) for path in (*(_driver if HAS_GPUS else ()), *_others)]
_kernels = None
_lost = set()


class Log:
    """The calls that the runtime got, in order: (kind, device, bytes, name, blocking)."""

    def __init__(self):
        self.begin, self.end = _all_records()[0], None

    @property
    def records(self):
        length, records = _all_records()
        end = length if self.end is None else self.end
        return [
            (KINDS[r.kind], r.device, r.bytes, (r.name or b"").decode(), bool(r.blocking))
            for r in records[self.begin : end]
        ]

    def of(self, *kinds):
        return [r for r in self.records if r[0] in kinds]

    def count(self, *kinds):
        return len(self.of(*kinds))

    def bytes(self, *kinds):
        return sum(r[2] for r in self.of(*kinds))

    def launches(self):
        return Counter(r[3] for r in self.of("launch"))

    def refused(self):
        """Kernels and functions that nobody computes."""
        return Counter(r[3] for r in self.of("refused"))

    def __str__(self):
        times, nbytes = Counter(), Counter()
        for kind, device, n, *_ in self.records:
            times[kind, device] += 1
            nbytes[kind, device] += n
        return ", ".join(f"{k}[{d}] {n} ({nbytes[k, d]:,} B)" for (k, d), n in times.items())


def _all_records():
    records = ctypes.POINTER(_Record)()
    return runtime.standin_log(ctypes.byref(records)), records


@contextmanager
def log():
    """The calls that the runtime gets meanwhile."""
    found = Log()
    try:
        yield found
    finally:
        found.end = _all_records()[0]


def used(device=0, peak=False):
    """Bytes of the device that this process has, with its context; the most so far if `peak`."""
    return runtime.standin_used(device, int(peak))


def plant(error=710, after=0):
    """Make CUDA fail with `error`, now or once `after` more kernels were launched.

    An error that a driver cannot recover from (214, 700, 702, 710, 716, 719) stays for the
    process; any other (2: out of memory, 46: busy) is returned once.
    """
    runtime.standin_plant(error, after)


def lose(device, error=46):
    """Let each call on this device fail, and NVML lose the GPU with this number."""
    runtime.standin_lose(device, error)
    _lost.add(device)
    _tell_nvml(f"gpu.{device}.lost={int(bool(error))}")


def mend():
    """Clear planted errors and lost devices, as only a new process can on a real GPU."""
    runtime.standin_mend()
    while _lost:
        _tell_nvml(f"gpu.{_lost.pop()}.lost=0")


def _tell_nvml(line):
    with open(os.environ["STAND_IN_NVML"], "a") as machine:
        machine.write(line + "\n")


def broken():
    """The error that stays, or 0."""
    return runtime.standin_sticky()


def slow(kernel_us=0, copy_gbs=0, malloc_ms=0):
    """Set how long a kernel, a copy to or from the host, and cudaMalloc take; 0: no time."""
    runtime.standin_slow(kernel_us, copy_gbs, malloc_ms)


def install():
    """Register the kernels; torch calls this, an entry point, at the end of its import."""
    global _kernels
    if HAS_GPUS and _kernels is None:
        _kernels = _load(_FOLDER / "libstandin_kernels.so")
        _kernels.standin_install()
