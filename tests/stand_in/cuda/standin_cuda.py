"""Load the stand-in libraries before torch, its kernels after; read the runtime's own log.

import standin_cuda, torch          # STANDIN_CUDA_DEVICES=2 in the environment, and what build.py installs
with standin_cuda.log() as log:
    x.cuda().sum().item()
log.bytes("h2d"), log.count("stream_sync"), log.launches()
"""

import ctypes
import os
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

_FOLDER = Path(os.environ.get("STANDIN_CUDA_LIBRARIES", "."))
KINDS = (
    "malloc malloc_failed free host_alloc host_free h2d d2h d2d peer h2h memset launch launch_unknown "
    "stream_sync device_sync event_sync event_record stream_wait"
).split()
SYNCS = {"stream_sync", "device_sync", "event_sync"}


class _Record(ctypes.Structure):
    _fields_ = [("ns", ctypes.c_uint64), ("kind", ctypes.c_int), ("dev", ctypes.c_int), ("bytes", ctypes.c_size_t),
                ("stream", ctypes.c_void_p), ("name", ctypes.c_char_p), ("blocking", ctypes.c_int),
                ("announced", ctypes.c_int)]  # fmt: skip


def _load(name):
    path = _FOLDER / name
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) if path.exists() else None


runtime = kernels = None
if os.environ.get("STANDIN_CUDA_DEVICES"):
    if "torch" in sys.modules:
        raise ImportError("standin_cuda must be imported before torch")
    # A name that is loaded is not looked for again: torch's own folders of libraries do not matter.
    runtime = _load(next(_FOLDER.glob("libcudart.so.*")).name)
    _first = ("libcuda.so.1", "libnvidia-ml.so.1")
    _others = [_load(n) for n in _first]
    _others += [_load(p.name) for p in sorted(_FOLDER.glob("lib*.so.*")) if p.name not in _first]
    runtime.standin_used.restype = ctypes.c_size_t


class Log:
    """What the runtime was asked for, in order: (kind, device, bytes, name, blocking)."""

    def __init__(self):
        self.records = []

    def of(self, *kinds):
        return [r for r in self.records if r[0] in kinds]

    def count(self, *kinds):
        return len(self.of(*kinds))

    def bytes(self, *kinds):
        return sum(r[2] for r in self.of(*kinds))

    def launches(self):
        return Counter(r[3] for r in self.of("launch"))

    def __str__(self):
        told = Counter((r[0], r[1]) for r in self.records)
        return ", ".join(
            f"{kind}[{dev}] {n}"
            + (f" ({b:,} B)" if (b := sum(r[2] for r in self.of(kind) if r[1] == dev)) else "")
            for (kind, dev), n in sorted(told.items())
        )


def _all():
    found = ctypes.POINTER(_Record)()
    runtime.standin_log.restype = ctypes.c_size_t
    n = runtime.standin_log(ctypes.byref(found))
    return [
        (KINDS[r.kind], r.dev, r.bytes, (r.name or b"").decode(), bool(r.blocking))
        for r in found[:n]
    ]


@contextmanager
def log():
    """All that is asked of the runtime meanwhile."""
    found, begun = Log(), len(_all())
    try:
        yield found
    finally:
        found.records = _all()[begun:]


def used(device=0, peak=False):
    """Bytes of the device that are taken, with the context's; at most, ever, if `peak`."""
    return runtime.standin_used(device, int(peak))


def plant(error=710):
    """From now on each call fails with this error, as after a device-side assert."""
    runtime.standin_plant(error)


def install():
    """torch calls this at the end of its import: an entry point of "torch.backends" names it."""
    global kernels
    if runtime is not None and kernels is None:
        kernels = _load("libstandin_kernels.so")
        kernels.standin_install()
