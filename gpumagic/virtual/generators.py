"""Draw random numbers by one generator per virtual GPU, as the CPU would draw them.

The same seed gives the same numbers as on the CPU, and drawing on a GPU leaves the CPU's own
stream alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpumagic.usercode.files import unseen
from gpumagic.virtual.virtual_gpus import gpu_of

C: Any = torch._C
aten: Any = torch.ops.aten
ANYONES = C.DispatchKeySet(C.DispatchKey.IPU)
"""Kernels that serve every device are found by a key that nobody has."""
_on_cuda: set[int] = set()
_swapping = threading.RLock()


class _AnyGenerator(type(C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, C.Generator)


class Generator(C.Generator, metaclass=_AnyGenerator):  # type: ignore[misc]
    """``torch.Generator`` while virtual GPUs are on: a CPU generator that says where it belongs."""

    _device: torch.device

    @unseen
    def __new__(cls, device: Any = "cpu") -> Generator:
        self: Generator = super().__new__(cls)
        wanted = torch.device(device)
        on_cuda = wanted.type == "cuda"
        self._device = gpu_of(wanted).device if on_cuda else wanted
        if on_cuda:
            _on_cuda.add(self._cdata)  # C++ hands it back as a plain torch._C.Generator
        return self

    @property
    def device(self) -> torch.device:
        """Where it draws."""
        return self._device

    def __del__(self, _on_cuda: set[int] = _on_cuda) -> None:
        # By default argument: at the interpreter's exit the module's names are gone already.
        _on_cuda.discard(self._cdata)


def belongs_to_cuda(generator: Any) -> bool:
    """Whether a generator, however C++ handed it over, is one of a virtual GPU."""
    return generator._cdata in _on_cuda


def host_kernels() -> dict[str, Any]:
    """Kernels for the dispatch key CPU, by the names of operators that are given a generator.

    C++ takes a virtual GPU's for one of the CPU, which it is; a real one it would refuse.
    """
    named = (aten.randperm, aten.rand, aten.randn, aten.randint)
    ops = [*(packet.generator for packet in named), aten.randint.low_generator]
    return {op.name().removeprefix("aten::"): _on_host(op) for op in ops}


def _on_host(op: Any) -> Callable[..., Tensor]:
    def kernel(*args: Any, generator: Any, **options: Any) -> Tensor:
        if generator is not None and belongs_to_cuda(generator):
            raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")
        drawn: Tensor = op.redispatch(ANYONES, *args, generator=generator, **options)
        return drawn

    return kernel


@contextlib.contextmanager
def cpu_draws_from(generator: Any) -> Iterator[None]:
    """Give `generator`'s state to the default one, for CPU kernels that take no generator."""
    cpu = torch.default_generator
    with _swapping:
        saved = cpu.get_state()
        cpu.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(cpu.get_state())
            cpu.set_state(saved)
