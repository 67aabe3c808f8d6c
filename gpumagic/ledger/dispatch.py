"""Register our kernels in front of torch's own, at the dispatch key of the devices.

At the first watch; `uninstall` puts everything back, and so do many calls that nothing watches,
until the next watch. A kernel at the device's own key is asked only for tensors of that device:
other operators, and all of the CPU's, cannot tell that it is there.
"""

import functools
import itertools
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from gpumagic.device import devices_changed
from gpumagic.ledger import attribute, copy_kernels
from gpumagic.ledger.copy_kernels import Kernel
from gpumagic.ledger.synchronize import patch_printing, patch_synchronizing, settled
from gpumagic.usercode.files import unseen

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
INDEXING = ("_index_put_impl_", "index", "index_put", "index_put_")

# Calling a kernel that was replaced needs torch 2.9.
_CAN_CALL_REPLACED = hasattr(torch.library, "get_kernel")
# A thread may be within one of our kernels when they are removed: they live on for a while.
_retired: deque[list[Any]] = deque(maxlen=8)
Apart = Callable[[Kernel], Kernel]
# torch 2.6 to 2.8 cannot call a kernel that was replaced. A key above all others is free there: a
# watched thread's operators pass by it, and those that wait have a kernel of ours at it. Threads
# that the watched code starts itself are not seen this way, and reading an element of a CPU tensor
# costs 2 µs more meanwhile. Untested on a real GPU.
_ABOVE = "TESTING_ONLY_GenericMode"
# Never taken back: to do so while a thread's operators pass by would end in an error of torch's.
above: list[Any] = []


class Hooks:
    """Kernels of ours at one dispatch key, and around torch's functions that synchronize."""

    def __init__(self, key: str = "CUDA", virtual: str = "") -> None:
        # The first virtual GPU's UUID, where virtual GPUs have their kernels there.
        self.key, self.virtual = key, virtual
        self._library = torch.library.Library("aten", "IMPL")
        self._known = set(torch.library._impls)
        self._names: list[str] = []
        self._patches = ExitStack()
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
        patch_printing(self._patches)
        if not self.virtual:
            patch_synchronizing(self._patches)

    def _kernels(self) -> Iterator[tuple[str, Kernel]]:
        yield "copy_", copy_kernels.copying(self._copy(), bool(self.virtual))
        waits_apart = self.key == "CUDA" and not self.virtual
        apart: Callable[[Kernel], Kernel] = settled if waits_apart else lambda base: base
        if not _CAN_CALL_REPLACED:
            every = [full for name in WAITS for full in _overloads(name)]
            register_above({full: _operator(full) for full in every}, apart)
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
        self._patches.close()
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
            copy_kernels.passed = itertools.count()
            hooks = Hooks(key, _virtual() if key == "CUDA" else "")
        return hooks is not None and bool(hooks.virtual)


def uninstall() -> None:
    """Put torch back as it was before the first `install`."""
    global hooks
    with _lock:
        gone, hooks = hooks, None
        if gone is not None:
            gone.remove()


def _uninstall_idle() -> None:
    """Leave torch's own kernels alone again, until the next watch."""
    with _lock:
        if not attribute.running:
            uninstall()


if _CAN_CALL_REPLACED:  # one that was replaced lives on while it runs, where it can be held
    copy_kernels.idle = _uninstall_idle
# What stood in front of the kernels of GPUs that are gone is in front of nothing.
devices_changed.append(uninstall)


def _key() -> str | None:
    # Where there is no device there is no copy, and nothing to watch.
    if torch.cuda.device_count():
        return "CUDA"
    return "MPS" if torch.backends.mps.is_available() else None


def register_above(names: dict[str, Any], apart: Apart, device: str = "cuda") -> None:
    """Put kernels at the free key, once; they are asked only between `enter` and `leave`."""
    if above:
        return
    others = torch.library.Library("_", "IMPL", _ABOVE)
    others.fallback(torch.library.fallthrough_kernel)
    ours = torch.library.Library("aten", "IMPL")
    for name, operator in names.items():
        ours.impl(name, _kernel_above(name, operator, apart, device), _ABOVE, with_keyset=True)
    above.extend((others, ours))


def _kernel_above(name: str, operator: Any, apart: Apart, kind: str) -> Kernel:
    below = C._dispatch_keyset_full_after(C._parse_dispatch_key(_ABOVE))

    @unseen
    def kernel(keys: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        base = functools.partial(operator.redispatch, keys & below)
        if not isinstance(self, torch.Tensor):
            self = torch.tensor(self, device="cpu")
        if self.device.type != kind:
            return base(self, *args, **kwargs)
        if name == "_local_scalar_dense":
            return copy_kernels.reading(apart(base))(self)
        return copy_kernels.waiting(apart(base), name.partition(".")[0])(self, *args, **kwargs)

    return kernel


def enter() -> tuple[int, Any] | None:
    """Let this thread's operators pass by the key, if anything stands there."""
    if not above:
        return None
    guard = C._IncludeDispatchKeyGuard(C._parse_dispatch_key(_ABOVE))
    guard.__enter__()
    return threading.get_ident(), guard


def leave(entered: tuple[int, Any] | None) -> None:
    """Undo `enter`; on another thread than that, nothing can be undone, and nothing is lost."""
    if entered is not None and entered[0] == threading.get_ident():
        entered[1].__exit__(None, None, None)
