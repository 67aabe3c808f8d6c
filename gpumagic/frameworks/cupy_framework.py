"""Support CuPy: its device, arrays, memory pool and copies. It has real GPUs only.

CuPy never copies an operand silently. Arrays reach a GPU through `cupy._core.array` and the host
through `cupy.ndarray.get`, which `cupy.asnumpy`, `x.item()`, `float(x)` and `print` use; both are
counted. What `x.set(y)` and `x[:] = y` copy is not seen.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import cupy

from gpumagic import faults
from gpumagic.device import Device, here
from gpumagic.errors import GpuError, ImplicitCopyError
from gpumagic.frameworks.array_framework import ArrayFramework
from gpumagic.frameworks.framework import Place, Pool, place_of, replace
from gpumagic.frameworks.watching import Inside, called_from, refusal
from gpumagic.ledger.advice import ADVISERS, OFTEN, Advice, all_but_one
from gpumagic.ledger.entry import DISPLAY, PRINT, Count, Entry, Tally
from gpumagic.usercode.lines import called, in_cell


class CuPy(ArrayFramework):
    """Adapt CuPy to the contract of a framework."""

    name = "CuPy"

    def __init__(self) -> None:
        # To ask a GPU that nobody has used would make a context there, of some 500 MiB.
        self._used: set[int] = set()

    def started(self) -> bool:
        """Whether a cell has used it."""
        return bool(self._used)

    def devices(self) -> list[Device]:
        """The GPUs that it can use here, by ordinal."""
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or no GPU
            return []
        known = {device.ordinal: device for device in here(memory=False) if not device.virtual}
        return [known.get(number, Device("cuda", number)) for number in range(count)]

    def own(self, device: Device) -> Any:
        """CuPy's object for a device, or GpuError."""
        if device.kind != "cuda" or device.ordinal is None:
            raise GpuError(
                f"CuPy's arrays are on GPUs alone, not on {device}; cupy.asnumpy(x)"
                " makes NumPy's of them"
            )
        if device.virtual:
            self.make_virtual(1)
        self._used.add(device.ordinal)
        return cupy.cuda.Device(device.ordinal)

    def make_virtual(self, count: int) -> None:
        """Raise GpuError: it has no virtual GPUs."""
        raise GpuError("CuPy has no virtual GPUs: it needs a real one; NumPy has its functions")

    def place(self, device: Device, **options: Any) -> AbstractContextManager[None]:
        """Make this thread's new arrays on `device`, within the context."""
        return _current(self.own(device))

    def is_array(self, value: object) -> bool:
        """Whether it is an array of CuPy's."""
        return isinstance(value, cupy.ndarray)

    def where(self, array: Any) -> str:
        """The device that an array is on, ``"cuda:1"``."""
        return f"cuda:{array.device.id}"

    def nbytes(self, array: Any) -> int:
        """The bytes of its data."""
        return int(array.nbytes)

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        """Return a copy on another device; the array itself if it is there."""
        with self.own(device):
            return cupy.asarray(array)

    def copy(self, array: Any, device: Device) -> Any:
        """Return a new copy on a device, even if the array is there."""
        with self.own(device):
            return cupy.array(array)

    def wait(self, *devices: str) -> None:
        """Wait until the GPUs that it was placed on have finished, and the current one."""
        for ordinal in {*self._used, cupy.cuda.Device().id}:
            cupy.cuda.Device(ordinal).synchronize()

    def allocated(self, device: Device) -> tuple[int, int | None]:
        """Return the bytes that its memory pool has given out on a device; it keeps no peak."""
        with self.own(device):
            return int(cupy.get_default_memory_pool().used_bytes()), None

    def places(self, array: Any) -> list[Place]:
        """The memory of an array."""
        place = place_of(array)
        return [place] if place is not None else []

    def pool(self, device: Device) -> Pool | None:
        """Return the figures of its memory pool for a GPU that was used."""
        if device.ordinal not in self._used:
            return None
        with self.own(device):
            pool = cupy.get_default_memory_pool()
            return Pool(self.name, int(pool.used_bytes()), None, int(pool.total_bytes()), None)

    def count(
        self, tally: Tally, strict: bool, *, warn: bool = False
    ) -> AbstractContextManager[object]:
        """While this holds, count its copies and its reads, by the user's line."""
        return CuPyCopies(tally, strict)


@contextmanager
def _current(own: Any) -> Iterator[None]:
    with own:
        yield


_inside = Inside(cupy, "cupy_")
# What is called to read an array, and names the host.
_READING = {"get", "asnumpy"}


class CuPyCopies:
    """Count from `__enter__` to `__exit__`, on the thread that entered."""

    def __init__(self, tally: Tally, strict: bool) -> None:
        self._tally = tally
        self._strict = strict
        self._thread = 0
        self._stack = ExitStack()

    def __enter__(self) -> "CuPyCopies":
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            try:
                self._stand(stack, cupy.ndarray, "get", self._read)
                self._stand(stack, cupy._core, "array", self._made)
            except (AttributeError, TypeError) as error:
                raise GpuError(
                    f"copies are not counted with CuPy {cupy.__version__}: {error}"
                ) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _stand(self, stack: ExitStack, owner: Any, name: str, run: Callable[..., Any]) -> None:
        real = getattr(owner, name)

        def door(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if threading.get_ident() != self._thread:
                return real(*args, **kwargs)
            return run(real, *args, **kwargs)

        replace(stack, owner, name, door)

    def _read(self, real: Callable[..., Any], array: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        count = None
        with faults.kept("counting a read of CuPy's"):
            count = self._count(sys._getframe(2), f"cuda:{array.device.id}", "cpu", array.size)
        if count is not None and self._strict and count.implicit and count.how != DISPLAY:
            raise ImplicitCopyError(refusal(count, "name it first: cupy.asnumpy(x)"))
        start = time.perf_counter()
        read = real(array, *args, **kwargs)
        if count is not None:
            count.add(array.nbytes, time.perf_counter() - start)
        return read

    def _made(self, real: Callable[..., Any], given: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        made = real(given, *args, **kwargs)
        with faults.kept("counting a copy of CuPy's"):
            source = "cpu" if hasattr(given, "__array_interface__") else None
            source = f"cuda:{given.device.id}" if isinstance(given, cupy.ndarray) else source
            there = f"cuda:{made.device.id}"
            if source not in (None, there):
                count = self._count(sys._getframe(2), str(source), there)
                if count is not None:
                    count.add(made.nbytes, time.perf_counter() - start)
        return made

    def _count(self, frame: FrameType, source: str, there: str, items: int = 0) -> Count | None:
        call = called_from(frame, _inside, ())
        if call is None:
            return None
        asked = "" if call.user is None else called(*in_cell(call.user))
        if asked == "print":  # of C, which has no frame
            call = call._replace(how=PRINT)
        explicit = there != "cpu" or asked in _READING
        copy = explicit or items != 1
        operator = "asarray" if there != "cpu" else "get" if copy else "item"
        key = (copy, operator, source, there, call.how, *call.at())
        new = call.counting(copy, operator, (source, there), not explicit, framework="CuPy")
        return self._tally.counts.get(key) or self._tally.add(key, new)


def _advise(entry: Entry) -> Advice | None:
    """Advise on reads; None for any other entry."""
    if entry.destination != "cpu" or entry.via == "print" or entry.calls < OFTEN:
        return None
    text = "keep the results on the device and read them once: cupy.asnumpy(cupy.stack(results))"
    return all_but_one(entry, text)


ADVISERS["CuPy"] = _advise
