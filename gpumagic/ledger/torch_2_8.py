"""Count waits on torch 2.6 to 2.8, where a kernel that was replaced cannot be called.

A key above all others is free there: this thread's operators pass by it, and those that wait have a
kernel of ours at it. Threads that the watched code starts itself are not seen this way, and reading
an element of a CPU tensor costs 2 µs more meanwhile. Untested on a real GPU.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from gpumagic.ledger import copy_kernels
from gpumagic.ledger.copy_kernels import Kernel

C: Any = torch._C
Apart = Callable[[Kernel], Kernel]
_KEY = "TESTING_ONLY_GenericMode"
# Never taken back: to do so while a thread's operators pass by would end in an error of torch's.
kept: list[Any] = []


def register(names: dict[str, Any], apart: Apart, device: str = "cuda") -> None:
    """Put kernels at the free key, once; they are asked only between `enter` and `leave`."""
    if kept:
        return
    others = torch.library.Library("_", "IMPL", _KEY)
    others.fallback(torch.library.fallthrough_kernel)
    ours = torch.library.Library("aten", "IMPL")
    for name, operator in names.items():
        ours.impl(name, _kernel(name, operator, apart, device), _KEY, with_keyset=True)
    kept.extend((others, ours))


def _kernel(name: str, operator: Any, apart: Apart, kind: str) -> Kernel:
    below = C._dispatch_keyset_full_after(C._parse_dispatch_key(_KEY))

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
    if not kept:
        return None
    guard = C._IncludeDispatchKeyGuard(C._parse_dispatch_key(_KEY))
    guard.__enter__()
    return threading.get_ident(), guard


def leave(entered: tuple[int, Any] | None) -> None:
    """Undo `enter`; on another thread than that, nothing can be undone, and nothing is lost."""
    if entered is not None and entered[0] == threading.get_ident():
        entered[1].__exit__(None, None, None)
