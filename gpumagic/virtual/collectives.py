"""Run collectives on virtual GPUs by the CPU's backend, on the tensors' bytes without a copy."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gpumagic.usercode.files import unseen
from gpumagic.virtual.flip import flip

C: Any = torch._C


def register(stack: ExitStack) -> None:
    """Register them at the key CUDA until `stack` is closed."""
    if not torch.distributed.is_available():
        return
    names = C._dispatch_get_registrations_for_dispatch_key("CUDA")
    library = torch.library.Library("c10d", "IMPL")
    stack.callback(library._destroy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel": on purpose
        for name in (name.removeprefix("c10d::") for name in names if name.startswith("c10d::")):
            operator = getattr(torch.ops.c10d, name).default
            library.impl(name, _on_the_cpu(operator), "CUDA", allow_override=True)


def refused_reducer(*args: Any, **kwargs: Any) -> None:
    """Refuse DistributedDataParallel's reducer, on a build where it cannot work."""
    raise NotImplementedError(
        "virtual GPUs: DistributedDataParallel asks the driver for times on a CUDA build of "
        "PyTorch; use a CPU build, or all_reduce the gradients"
    )


def _on_the_cpu(operator: Any) -> Callable[..., Any]:
    @unseen
    def kernel(*args: Any, **kwargs: Any) -> Any:
        loan = _Loan()
        out = operator(*tree_map(loan.lend, args), **tree_map(loan.lend, kwargs))
        return tree_map(loan.back, out)

    return kernel


class _Loan:
    """Keep the tensors of one collective with the CPU tensors that replace them.

    Closures would refer to each other, and free them only at the next garbage collection.
    """

    def __init__(self) -> None:
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}

    def lend(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_cuda:
            return x
        low = flip(x)
        self._lent[id(low)] = x, low
        return low

    def back(self, x: Any) -> Any:
        if isinstance(x, C.ScriptObject):
            return Lent.boxed(Lent(Lent.unbox(x), self.back))
        return self._lent[id(x)][0] if id(x) in self._lent else x


# C++ keeps of a work in Python no more than its own half alive.
_running: set[Any] = set()


_Work: Any = getattr(torch.distributed, "Work", object)  # a build of torch may have none


class Lent(_Work):  # type: ignore[misc]
    """Represent a collective in flight; its future has the original tensors."""

    def __init__(self, work: Any, back: Callable[[Any], Any]) -> None:
        super().__init__()
        self._work, self._back = work, back
        _running.add(self)

    def wait(self, *timeout: Any) -> Any:
        try:
            return self._work.wait(*timeout)
        finally:
            _running.discard(self)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        _running.discard(self)
        return self._work.get_future().then(lambda done: tree_map(self._back, done.value()))
