"""Load the stand-in libraries before torch, its kernels after; read the log; plant faults.

import standin_cuda, torch  # with STANDIN_CUDA_DEVICES=2 in the environment
with standin_cuda.log() as log:
    x.cuda().sum().item()
log.bytes("h2d"), log.count("stream_sync"), log.of("refused")
"""

import atexit
import ctypes
import os
import shutil
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

_FOLDER = Path(os.environ.get("STANDIN_CUDA_LIBRARIES", "."))
_load = partial(ctypes.CDLL, mode=ctypes.RTLD_GLOBAL)
_lost = set()
WAITS = {"stream_sync", "device_sync", "event_sync"}


class _Record(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char_p), ("device", ctypes.c_int), ("bytes", ctypes.c_size_t),
                ("name", ctypes.c_char_p)]  # fmt: skip


def make_machine():
    """A folder for this process and its children: what NVML tells, and who uses how much memory."""
    folder = tempfile.mkdtemp(prefix="standin-cuda-")
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    nvml, mib = Path(folder, "nvml.txt"), int(os.environ.get("STANDIN_CUDA_MEMORY") or 16384)
    nvml.write_text(
        f"gpus={os.environ['STANDIN_CUDA_DEVICES']}\ngpu.*.total={mib * 2**20}\n"
        "gpu.*.reserved=0\ngpu.*.name=Stand-in H100\n"
    )
    os.environ.setdefault("STAND_IN_NVML", str(nvml))
    os.environ["STANDIN_CUDA_USED"] = str(Path(folder, "used"))


HAS_GPUS = int(os.environ.get("STANDIN_CUDA_DEVICES") or 0) > 0
if HAS_GPUS and "STANDIN_CUDA_USED" not in os.environ:
    make_machine()
# A SONAME that is loaded is not searched for again: torch's own folders of libraries do not matter.
_absent = set() if HAS_GPUS else {"libcuda.so.1", "libnvidia-ml.so.1"}
_loaded = [_load(str(p)) for p in _FOLDER.glob("lib*.so.*") if p.name not in _absent]
_runtime = next(library for library in _loaded if "libcudart." in library._name)
_runtime.standin_used.restype = ctypes.c_size_t
_runtime.standin_slow.argtypes = [ctypes.c_double] * 3
runtime = _runtime if HAS_GPUS else None


class Log(list):
    """Records of calls, in order."""

    def of(self, *kinds):
        return [record for record in self if record.kind.decode() in kinds]

    def count(self, *kinds):
        return len(self.of(*kinds))

    def bytes(self, *kinds):
        return sum(record.bytes for record in self.of(*kinds))


@contextmanager
def log():
    """The calls that the runtime gets meanwhile; filled at the end."""
    found, records = Log(), ctypes.POINTER(_Record)()
    begin = runtime.standin_log(ctypes.byref(records))
    try:
        yield found
    finally:
        found += records[begin : runtime.standin_log(ctypes.byref(records))]


def used(device=0):
    """Bytes of the device that this process has, with its context."""
    return runtime.standin_used(device)


def plant(error=710, after=0):
    """Make CUDA fail with `error`, now or once `after` more kernels were launched.

    An error that a driver cannot recover from (214, 700, 702, 710, 714 to 719) stays for the
    process; any other (2: out of memory, 46: busy) is returned once.
    """
    runtime.standin_plant(error, after)


def lose(device, error=46):
    """Let each call on this device fail, and NVML lose the GPU; 0: no longer."""
    runtime.standin_lose(device, error)
    (_lost.add if error else _lost.discard)(device)
    with open(os.environ["STAND_IN_NVML"], "a") as machine:
        machine.write(f"gpu.{device}.lost={int(bool(error))}\n")


def mend():
    """Clear planted errors and lost devices, as only a new process can; return what had stayed."""
    for device in {*_lost}:
        lose(device, 0)
    return runtime.standin_mend()


def slow(kernel_us=0, copy_gbs=0, malloc_ms=0):
    """Set how long a kernel, a copy to or from the host, and cudaMalloc take; 0: no time."""
    runtime.standin_slow(kernel_us, copy_gbs, malloc_ms)


def install():
    """Register the kernels; torch calls this, an entry point, at the end of its import."""
    if HAS_GPUS:
        _load(str(_FOLDER / "libstandin_kernels.so")).standin_install()
