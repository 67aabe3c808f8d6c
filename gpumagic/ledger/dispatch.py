"""Count torch's copies and waits, and measure peak memory, while code runs.

The first call of `counting` wraps kernels at the GPUs' dispatch key. `uninstall` restores torch.
The functions `synchronize` and `_tensor_str._str` are no operators, so wrappers replace them.
"""

import functools
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch._tensor_str
from torch.cuda import device_count  # saved, because `%%ongpu` replaces torch.cuda.device_count

from gpumagic.device import devices_changed
from gpumagic.ledger import attribute, copy_kernels
from gpumagic.ledger.attribute import HOST, Alarm, add, counts, here, serials
from gpumagic.ledger.copy_kernels import INDEXING, WAITS, After, Kernel, counted, read_by
from gpumagic.ledger.entry import Memory, Tally
from gpumagic.usercode.files import is_ours, swap_attribute, unseen


def patch_synchronizing(stack: ExitStack) -> None:
    """Count the calls of torch's `synchronize` functions, until `stack` is closed."""
    for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator):
        # torch.accelerator's function may call torch.cuda's. `within` prevents a second count.
        wrap = functools.partial(counted, before=_before, within="synchronize")
        _swap(stack, owner, "synchronize", wrap)


def _swap(stack: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    real = vars(owner)[name]
    swap_attribute(stack, owner, name, functools.wraps(real)(wrap(real)))


def _numbered(print_tensor: Callable[..., str]) -> Callable[..., str]:
    @unseen
    def numbered(*args: Any, **kwargs: Any) -> str:
        __tracebackhide__ = True
        before, here.serial = here.serial, next(serials)
        try:
            return print_tensor(*args, **kwargs)
        finally:
            here.serial = before

    return numbered


def _before(*args: Any, **kwargs: Any) -> After | None:
    __tracebackhide__ = True
    # Do not count gpumagic's own waits, or waits inside a function that is already counted.
    if here.within or is_ours(sys._getframe(3).f_code.co_filename):
        return None
    thing = next(iter((*args, *kwargs.values())), None)
    try:
        index = torch.cuda._utils._get_device_index(getattr(thing, "device", thing), optional=True)
    except (ValueError, RuntimeError, AttributeError):
        return None
    found = counts(("wait", "synchronize", index, HOST, False), None)
    return lambda seconds: add(found, 0, seconds, True)


C: Any = torch._C
aten: Any = torch.ops.aten
# Operators whose kernel copies the result's size to the host. Other operators in WAITS leave this
# copy to an operator that they call, such as `item`.
_SIZED = ("nonzero", "_unique2", "unique_consecutive", "unique_dim")
_CAN_CALL_REPLACED = hasattr(torch.library, "get_kernel")  # torch 2.9 and later
_retired: deque[list[Any]] = deque(maxlen=8)  # removed kernels that running threads still need


class Hooks:
    """Wrap the kernels at one dispatch key, and torch's functions that synchronize or print."""

    def __init__(self, key: str = "CUDA", virtual: str = "") -> None:
        self.key, self.virtual = key, virtual  # `virtual`: the first virtual GPU's UUID, or ""
        self._library = torch.library.Library("aten", "IMPL")
        self._known = set(torch.library._impls)
        self._names: list[str] = []
        self._patches = ExitStack()
        try:
            options = {"allow_override": True} if _CAN_CALL_REPLACED else {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "overriding a previously registered kernel"
                for name, kernel in [*self._kernels()]:
                    self._library.impl(name, kernel, self.key, **options)
                    self._names.append(name)
            # Each print of a tensor gets a serial number, so that all its waits count as one call.
            _swap(self._patches, torch._tensor_str, "_str", _numbered)
            patch_synchronizing(self._patches)
        except BaseException:
            self.remove()
            raise

    def _kernels(self) -> Iterator[tuple[str, Kernel]]:
        copy, item = self._copy(), "_local_scalar_dense"
        yield "copy_", copy_kernels.copying(copy, bool(self.virtual))
        read = self._replaced(item) if self.virtual else functools.partial(read_by, copy)
        yield item, counted(read, copy_kernels.reading)
        registered = set(C._dispatch_get_registrations_for_dispatch_key(self.key))
        for name in (*WAITS, *(INDEXING if self.virtual else ())):
            sized = copy_kernels.sizing if name in _SIZED else copy_kernels.naming
            wrap = copy_kernels.counting_whole if self.virtual else sized
            for overload in getattr(aten, name).overloads():
                full = f"{name}.{overload}".removesuffix(".default")
                if f"aten::{full}" not in registered:
                    continue
                if full == "nonzero" and not self.virtual:
                    yield full, copy_kernels.sizing(self._nonzero, full)
                elif self.virtual or (_CAN_CALL_REPLACED and full != "nonzero.out"):
                    yield full, wrap(self._replaced(full), name)

    def _copy(self) -> Kernel:
        if self.virtual:
            return self._replaced("copy_")
        # torch has one `copy_` for all devices. A call at the unused key IPU avoids our wrapper.
        unused = C.DispatchKeySet(C.DispatchKey.IPU)
        run = aten.copy_.default.redispatch  # unlike a direct call, it releases the GIL
        return lambda self, src, *rest: run(unused, self, copy_kernels.as_tensor(src), *rest)

    def _nonzero(self, tensor: torch.Tensor) -> Any:
        keys = C.DispatchKeySet(getattr(C.DispatchKey, self.key))
        with torch._C.DisableTorchFunction():
            out = torch.empty(0, dtype=torch.int64, device=tensor.device)
        return aten.nonzero.out.redispatch(keys, tensor, out=out)

    def _replaced(self, name: str) -> Kernel:
        # A virtual GPU's kernel is a Python function, so call it directly, not through C++.
        virtuals = sys.modules.get("gpumagic.virtual.switch") if self.virtual else None
        dump = C._dispatch_dump(f"aten::{name}")
        if virtuals is not None and f"\nCUDA: registered at {virtuals.__file__}:" in dump:
            return cast(Kernel, virtuals.kernels[name])
        kernel = torch.library.get_kernel(f"aten::{name}", self.key)
        # A kernel at a device's own key ignores all other keys, so this key is enough.
        keys = C.DispatchKeySet(getattr(C.DispatchKey, self.key))
        return functools.partial(kernel.call_boxed, keys)

    def remove(self) -> None:
        self._patches.close()
        if _CAN_CALL_REPLACED:
            _retired.append([torch.library.get_kernel(f"aten::{n}", self.key) for n in self._names])
        ours = set(self._library._op_impls)
        self._library._destroy()
        self._library._op_impls.clear()  # so that the Library's finalizer removes no kernel
        if self.virtual == _virtual():
            # `_destroy` also removed the virtual GPUs' kernels from torch's list. Add them again.
            torch.library._impls.update(ours & self._known)


def _virtual() -> str:
    module = sys.modules.get("gpumagic.virtual.virtual_gpus")
    return str(module.GPUS[0].properties.uuid) if module is not None and module.GPUS else ""


_lock = threading.RLock()  # protects `hooks` and `attribute.running`
hooks: Hooks | None = None  # the installed wrappers of torch's kernels, or None


def install() -> bool:
    """Wrap the kernels of the GPUs; return whether the GPUs are virtual."""
    global hooks
    with _lock:
        if hooks is None and (device_count() or torch.backends.mps.is_available()):
            attribute.gpu = "cuda" if device_count() else "mps"
            hooks = Hooks(attribute.gpu.upper(), _virtual())
        return hooks is not None and bool(hooks.virtual)


def uninstall() -> None:
    """Restore torch as it was before `install`."""
    global hooks
    with _lock:
        gone, hooks = hooks, None
        if gone is not None:
            gone.remove()


# Our wrappers call the kernels of virtual GPUs. Remove the wrappers when these GPUs change.
devices_changed.append(uninstall)


@contextmanager
def counting(tally: Tally, *, strict: bool, warn: bool) -> Iterator[None]:
    """Count calls in this context and in threads started in it. Any thread may exit the context."""
    outer = attribute.current.get()
    while outer is not None and not outer.live:  # contexts in generators may end in any order
        outer = outer.outer
    active = attribute.ActiveWatch(tally, Alarm(strict=strict) if strict or warn else None, outer)
    try:
        with _lock:
            attribute.running = (*attribute.running, active)
        attribute.current.set(active)
        tally.virtual |= install()
        yield
    finally:
        active.live = False
        with _lock:
            attribute.running = tuple(w for w in attribute.running if w is not active)
        if attribute.current.get() is active:
            attribute.current.set(active.outer)


def _forget() -> None:
    attribute.running = ()
    attribute.current.set(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # do not watch a DataLoader's workers


class MemoryMeter:
    """Measure the peak memory of code on each CUDA device, from `start` to `stop`."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] = {}
        self._peaks: dict[int, int] = {}

    def start(self) -> None:
        """Start measuring every device that CUDA has initialized."""
        for index, (allocated, peak, allocations) in _read_memory():
            for meter in meters:  # save the peak, because the reset below erases it
                meter._peaks[index] = max(meter._peaks.get(index, 0), peak)
            torch.cuda.reset_peak_memory_stats(index)
            self._before[index] = allocated, allocations
        meters.append(self)

    def stop(self) -> list[Memory]:
        """Return the measurement of each device that had allocations since `start`."""
        if self in meters:
            meters.remove(self)
        found = []
        for index, (allocated, peak, allocations) in _read_memory():
            before, allocations_before = self._before.get(index, (0, 0))
            peak = max(peak, self._peaks.get(index, 0))
            if made := allocations - allocations_before:
                found.append(Memory(f"cuda:{index}", peak, allocated, before, made))
        return found


meters: list[MemoryMeter] = []  # all running meters


def _read_memory() -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield each device's ordinal, allocated bytes, peak bytes and total number of allocations."""
    # Do not initialize CUDA, which would take seconds and hundreds of MiB on each device.
    for index in range(device_count() if torch.cuda.is_initialized() else 0):
        if stats := torch.cuda.memory_stats_as_nested_dict(index):
            used = stats["allocated_bytes"]["all"]
            count = stats["allocation"]["all"]["allocated"]
            yield index, (used["current"], used["peak"], count)
