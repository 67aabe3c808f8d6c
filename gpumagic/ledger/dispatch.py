"""Our kernels in front of torch's own, at the dispatch key of the devices, while anything watches.

A kernel at the device's own key is asked only for tensors of that device: other operators, and all
of the CPU's, cannot tell that it is there.
"""

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gpumagic.device import here as devices_here
from gpumagic.ledger import copy_kernels, synchronize, torch_2_8

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


class Hooks:
    """Kernels of ours at one dispatch key, and around torch's functions that synchronise.

    Parameters
    ----------
    key : str
        ``"CUDA"``, or another that has a copy between devices.
    virtual : str
        The first virtual GPU's UUID, where virtual GPUs have their kernels there.
    """

    def __init__(self, key: str = "CUDA", virtual: str = "") -> None:
        self.key, self.virtual = key, virtual
        self._library = torch.library.Library("aten", "IMPL")
        self._known = set(torch.library._impls)
        self._names: list[str] = []
        self._patches = synchronize.Patches()
        for gone in [k for k in _replaced if k[2] != virtual]:
            del _replaced[gone]
        try:
            self._register()
        except BaseException:
            self.remove()
            raise

    def _register(self) -> None:
        for name, kernel in self._kernels():
            options = {"allow_override": True} if _CAN_CALL_REPLACED else {}
            self._library.impl(name, kernel, self.key, **options)
            self._names.append(name)
        self._patches.printing()
        if not self.virtual:
            self._patches.synchronising()

    def _kernels(self) -> list[tuple[str, Callable[..., Any]]]:
        found = [("copy_", copy_kernels.copying(self._copy(), bool(self.virtual)))]
        if not _CAN_CALL_REPLACED:
            settle = synchronize.settle if self.key == "CUDA" else None
            every = [full for name in WAITS for full in _overloads(name)]
            torch_2_8.register({full: _operator(full) for full in every}, settle)
            return found
        registered = set(C._dispatch_get_registrations_for_dispatch_key(self.key))
        settle = None if self.virtual or self.key != "CUDA" else synchronize.settle
        for operators in (WAITS, INDEXING if self.virtual else ()):
            for name in operators:
                for full in _overloads(name):
                    if f"aten::{full}" not in registered:
                        continue
                    base = self._replaced(full)
                    if operators is INDEXING:
                        kernel = copy_kernels.indexing(base, name)
                    elif name == "_local_scalar_dense":
                        kernel = copy_kernels.reading(base, settle)
                    else:
                        kernel = copy_kernels.waiting(base, name, settle)
                    found.append((full, kernel))
        return found

    def _copy(self) -> Callable[..., Any]:
        if self.virtual:
            return self._replaced("copy_")
        # The same kernel serves every device, found here by way of one that nobody has. Unlike
        # `call_boxed`, `redispatch` lets other threads run while the host waits.
        anyones = C.DispatchKeySet(C.DispatchKey.IPU)
        redispatch = aten.copy_.default.redispatch
        return functools.partial(redispatch, anyones)

    def _replaced(self, name: str) -> Callable[..., Any]:
        stands = C._dispatch_dump(f"aten::{name}")
        # A virtual GPU's is Python's: called as it is, it costs no second way through C++.
        ours = sys.modules.get("gpumagic.virtual.registry") if self.virtual else None
        if ours is not None and f"\nCUDA: registered at {ours.__file__}:" in stands:
            kernel_of_virtual: Callable[..., Any] = ours.kernels[name]
            return kernel_of_virtual
        # Asked for once: torch notes each asking for as long as the kernel lives.
        known, kernel = _replaced.get((name, self.key, self.virtual), ("", None))
        if kernel is None or known != stands:
            kernel = torch.library.get_kernel(f"aten::{name}", self.key)
            _replaced[name, self.key, self.virtual] = stands, kernel
        # Kernels of a device's own key look at no other.
        return functools.partial(
            kernel.call_boxed, C.DispatchKeySet(getattr(C.DispatchKey, self.key))
        )

    def remove(self) -> None:
        """Put everything back."""
        self._patches.remove()
        # A thread may be within one of our kernels now: they outlive their place for a while.
        if _CAN_CALL_REPLACED:
            _retired.append(
                [torch.library.get_kernel(f"aten::{name}", self.key) for name in self._names]
            )
            del _retired[:-_KEPT]
        ours = set(self._library._op_impls)
        self._library._destroy()
        self._library._op_impls.clear()  # it is struck out once more when the library is collected
        if self.virtual == _virtual():
            # torch strikes out what it had noted of the virtual GPUs' kernels of the same name.
            torch.library._impls.update(ours & self._known)


# By operator, key and virtual GPUs: all that stood there, in words, and the kernel.
_replaced: dict[tuple[str, str, str], tuple[str, Any]] = {}
_retired: list[Any] = []
_KEPT = 8


def _operator(full: str) -> Any:
    name, _, overload = full.partition(".")
    return getattr(getattr(aten, name), overload or "default")


def _overloads(name: str) -> list[str]:
    overloads = getattr(aten, name).overloads()
    return [name if o == "default" else f"{name}.{o}" for o in overloads]


def _virtual() -> str:
    found = devices_here(memory=False)
    return str(found[0].uuid) if found and found[0].virtual else ""


_lock = threading.RLock()
_holders = 0
_hooks: Hooks | None = None
_warned_of_overriding = False


def install() -> bool:
    """Put them in place, once for all watches; `remove` undoes one call.

    Returns
    -------
    bool
        Whether the devices are virtual.
    """
    global _holders, _hooks
    with _lock:
        key = _key()
        virtual = _virtual() if key == "CUDA" else ""
        if _hooks is not None and (_hooks.key, _hooks.virtual) != (key, virtual):
            _remove()
        if _hooks is None and key is not None:
            _hooks = _quietly(key, virtual)
        _holders += 1
        return bool(virtual)


def remove() -> None:
    """Undo one `install`."""
    global _holders
    with _lock:
        _holders -= 1
        if not _holders:
            _remove()


def installed() -> bool:
    """Whether any kernel of ours is in place."""
    return _hooks is not None


def _remove() -> None:
    global _hooks
    hooks, _hooks = _hooks, None
    if hooks is not None:
        hooks.remove()


def _key() -> str | None:
    # Where there is no device there is no copy, and nothing to watch.
    if torch.cuda.device_count():
        return "CUDA"
    return "MPS" if torch.backends.mps.is_available() else None


def _quietly(key: str, virtual: str) -> Hooks:
    global _warned_of_overriding
    if _warned_of_overriding:
        return Hooks(key, virtual)
    # torch says once that kernels are overridden. Silenced only then: to change the filters makes
    # Python forget which warnings it has given.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooks = Hooks(key, virtual)
    _warned_of_overriding = True
    return hooks
