"""Register our kernels in front of torch's own, at the dispatch key of the devices.

Once in a process, at the first watch; `uninstall` puts everything back. A kernel at the device's
own key is asked only for tensors of that device: other operators, and all of the CPU's, cannot tell
that it is there.
"""

import functools
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpumagic.device import devices_changed
from gpumagic.ledger import copy_kernels, torch_2_8
from gpumagic.ledger.copy_kernels import Kernel
from gpumagic.ledger.synchronize import Patches, settled

C: Any = torch._C
aten: Any = torch.ops.aten
WAITS = (
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
)
"""Operators for which the host waits, because a value or a shape depends on the data."""
INDEXING = ("_index_put_impl_", "index")

# Calling a kernel that was replaced needs torch 2.9.
_CAN_CALL_REPLACED = hasattr(torch.library, "get_kernel")
# A thread may be within one of our kernels when they are removed: they live on for a while.
_retired: deque[list[Any]] = deque(maxlen=8)


class Hooks:
    """Kernels of ours at one dispatch key, and around torch's functions that synchronize."""

    def __init__(self, key: str = "CUDA", virtual: str = "") -> None:
        # The first virtual GPU's UUID, where virtual GPUs have their kernels there.
        self.key, self.virtual = key, virtual
        self._library = torch.library.Library("aten", "IMPL")
        self._known = set(torch.library._impls)
        self._names: list[str] = []
        self._patches = Patches()
        try:
            self._register()
        except BaseException:
            self.remove()
            raise

    def _register(self) -> None:
        options = {"allow_override": True} if _CAN_CALL_REPLACED else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "overriding a previously registered kernel"
            for name, kernel in [*self._kernels()]:
                self._library.impl(name, kernel, self.key, **options)
                self._names.append(name)
        self._patches.printing()
        if not self.virtual:
            self._patches.synchronizing()

    def _kernels(self) -> Iterator[tuple[str, Kernel]]:
        yield "copy_", copy_kernels.copying(self._copy(), bool(self.virtual))
        waits_apart = self.key == "CUDA" and not self.virtual
        apart: Callable[[Kernel], Kernel] = settled if waits_apart else lambda base: base
        if not _CAN_CALL_REPLACED:
            every = [full for name in WAITS for full in _overloads(name)]
            torch_2_8.register({full: _operator(full) for full in every}, apart)
            return
        registered = set(C._dispatch_get_registrations_for_dispatch_key(self.key))
        for name in (*WAITS, *(INDEXING if self.virtual else ())):
            for full in _overloads(name):
                if f"aten::{full}" not in registered:
                    continue
                base = apart(self._replaced(full))
                if name in INDEXING:
                    yield full, copy_kernels.indexing(base, name)
                elif name == "_local_scalar_dense":
                    yield full, copy_kernels.reading(base)
                else:
                    yield full, copy_kernels.waiting(base, name)

    def _copy(self) -> Kernel:
        if self.virtual:
            return self._replaced("copy_")
        # The same kernel serves every device, found here by way of one that nobody has. Unlike
        # `call_boxed`, `redispatch` lets other threads run while the host waits.
        anyones = C.DispatchKeySet(C.DispatchKey.IPU)
        redispatch = aten.copy_.default.redispatch
        return lambda self, src, *rest: redispatch(
            anyones, self, copy_kernels.as_tensor(src), *rest
        )

    def _replaced(self, name: str) -> Kernel:
        # A virtual GPU's is Python's: called as it is, it costs no second way through C++.
        virtuals = sys.modules.get("gpumagic.virtual.registry") if self.virtual else None
        stands = C._dispatch_dump(f"aten::{name}")
        if virtuals is not None and f"\nCUDA: registered at {virtuals.__file__}:" in stands:
            kernel_of_virtual: Kernel = virtuals.kernels[name]
            return kernel_of_virtual
        kernel = torch.library.get_kernel(f"aten::{name}", self.key)
        # Kernels of a device's own key look at no other.
        keys = C.DispatchKeySet(getattr(C.DispatchKey, self.key))
        return functools.partial(kernel.call_boxed, keys)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.remove()
        if _CAN_CALL_REPLACED:
            kernels = [torch.library.get_kernel(f"aten::{n}", self.key) for n in self._names]
            _retired.append(kernels)
        ours = set(self._library._op_impls)
        self._library._destroy()
        self._library._op_impls.clear()  # it is struck out once more when the library is collected
        if self.virtual == _virtual():
            # torch strikes out what it had noted of the virtual GPUs' kernels of the same name.
            torch.library._impls.update(ours & self._known)


def _operator(full: str) -> Any:
    name, _, overload = full.partition(".")
    return getattr(getattr(aten, name), overload or "default")


def _overloads(name: str) -> list[str]:
    overloads = getattr(aten, name).overloads()
    return [name if o == "default" else f"{name}.{o}" for o in overloads]


def _virtual() -> str:
    module = sys.modules.get("gpumagic.virtual.virtual_gpus")
    return str(module.GPUS[0].properties.uuid) if module is not None and module.GPUS else ""


_lock = threading.RLock()
hooks: Hooks | None = None
"""What stands in front of torch's own kernels now."""


def install() -> bool:
    """Have the kernels stand in front of those of the devices; tell whether they are virtual."""
    global hooks
    with _lock:
        if hooks is None and (key := _key()) is not None:
            hooks = Hooks(key, _virtual() if key == "CUDA" else "")
        return hooks is not None and bool(hooks.virtual)


def uninstall() -> None:
    """Put torch back as it was before the first `install`."""
    global hooks
    with _lock:
        gone, hooks = hooks, None
        if gone is not None:
            gone.remove()


# What stood in front of the kernels of GPUs that are gone is in front of nothing.
devices_changed.append(uninstall)


def _key() -> str | None:
    # Where there is no device there is no copy, and nothing to watch.
    if torch.cuda.device_count():
        return "CUDA"
    return "MPS" if torch.backends.mps.is_available() else None
