"""Plays CuPy with two GPUs, for machines that have none: what gpumagic and its tests use of it.

As docs.cupy.dev has it: an array is made on the current device; `asarray` copies only what is on
another; nothing becomes an array of NumPy by itself; the default pool counts by device.
"""

import math
import threading

import numpy

__version__ = "13.6.0"
COUNT = 2
_current = threading.local()
_used = dict.fromkeys(range(COUNT), 0)
synchronized = []  # the devices that were waited for, in turn


class _Runtime:
    class CUDARuntimeError(RuntimeError):
        pass

    def getDeviceCount(self):
        if not COUNT:
            raise self.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return COUNT


class _Device:
    def __init__(self, device=None):
        self.id = getattr(_current, "id", 0) if device is None else int(device)
        self._before = []

    def use(self):
        _current.id = self.id

    def __enter__(self):
        self._before.append(_Device().id)
        self.use()
        return self

    def __exit__(self, *error):
        _current.id = self._before.pop()

    def __eq__(self, other):
        return self.id == other.id

    def __int__(self):
        return self.id

    def synchronize(self):
        synchronized.append(self.id)


class cuda:
    runtime = _Runtime()
    Device = _Device


class _Pool:
    def used_bytes(self):
        return _used[_Device().id]


def get_default_memory_pool():
    return _Pool()


class _ndarray_base:
    """Of C: what it calls of its own, it looks for in the class of the array first."""

    def __init__(self, held):
        self._held, self.device = held, _Device()
        self.nbytes, self.shape = held.nbytes, held.shape
        self.size = math.prod(held.shape)
        _used[self.device.id] += self.nbytes

    def __del__(self):
        _used[self.device.id] -= self.nbytes

    def __array__(self, *how, **options):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use .get()")

    def __dlpack_device__(self):
        return 2, self.device.id

    @property
    def __cuda_array_interface__(self):
        return {"data": (self._held.ctypes.data, False), "shape": self.shape, "version": 3}

    def get(self):
        return self._held.copy()

    def item(self):
        return self.get().item()

    def __float__(self):
        return float(self.get())

    def __str__(self):
        return str(self.get())

    def __add__(self, other):
        return ndarray(self._held + getattr(other, "_held", other))


class ndarray(_ndarray_base):
    pass


class _core:
    ndarray = ndarray

    @staticmethod
    def array(held, copy=True):
        if isinstance(held, ndarray) and not copy and held.device == _Device():
            return held
        return ndarray(numpy.array(getattr(held, "_held", held)))


def array(held):
    return _core.array(held)


def asarray(held):
    return _core.array(held, False)


def ones(shape):
    return ndarray(numpy.ones(shape))


def asnumpy(held):
    return held.get()
