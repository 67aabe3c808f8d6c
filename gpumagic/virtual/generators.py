"""Random numbers: one generator per virtual GPU, drawn from as the CPU would draw.

The same seed gives the same numbers as on the CPU, and drawing on a GPU leaves the CPU's own
stream alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from gpumagic.virtual.gpus import gpu_of

C: Any = torch._C
_on_cuda: set[int] = set()
_swapping = threading.RLock()


class _AnyGenerator(type(C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, C.Generator)


class Generator(C.Generator, metaclass=_AnyGenerator):  # type: ignore[misc]
    """``torch.Generator`` while virtual GPUs are on: a CPU generator that says where it belongs."""

    _device: torch.device

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


@contextlib.contextmanager
def cpu_draws_from(generator: Any) -> Iterator[None]:
    """For CPU kernels that take no generator: the default one has `generator`'s state meanwhile."""
    cpu = torch.default_generator
    with _swapping:
        saved = cpu.get_state()
        cpu.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(cpu.get_state())
            cpu.set_state(saved)
