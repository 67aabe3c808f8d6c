"""Imitate CUDA's streams, events and random generators.

All work on a stream is done, since virtual GPUs compute at once. There is one generator for each
virtual GPU: the same seed gives the same numbers as on the CPU, and drawing on a GPU leaves the
CPU's own generator alone.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpumagic.usercode.files import unseen
from gpumagic.virtual import asserts
from gpumagic.virtual.virtual_gpus import gpu_of

C: Any = torch._C
_CUDA = 1  # c10::DeviceType::CUDA
_numbers = itertools.count(1)  # 0 is the default stream of each GPU


class _Any(type(C.Generator)):  # type: ignore[misc]
    """Count instances of torch's own classes as instances of those that replace them."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kinds)


class AnyStream(C.Stream, metaclass=_Any):  # type: ignore[misc]
    """``torch.Stream`` while virtual GPUs are on: torch's own, and one for ``"cuda"``."""

    kinds = (C.Stream,)

    def __new__(cls, device: Any = None, **options: Any) -> Any:
        if device is None:
            return C.Stream(**options)
        wanted = torch.device(device)
        return Stream(wanted) if wanted.type == "cuda" else C.Stream(wanted, **options)


class Stream(C.Stream):  # type: ignore[misc]
    """``torch.cuda.Stream`` while virtual GPUs are on."""

    priority = 0

    @unseen
    def __new__(
        cls, device: Any = None, priority: int = 0, stream_id: int | None = None, **of: Any
    ) -> Stream:
        index = gpu_of(of.get("device_index") if device is None else device).index
        number = next(_numbers) if stream_id is None else stream_id
        self: Stream = super().__new__(cls, stream_id=number, device_index=index, device_type=_CUDA)
        return self

    cuda_stream = property(lambda self: self.stream_id)

    @unseen
    def query(self) -> bool:
        """Whether all work is done."""
        asserts.wait()
        return True

    @unseen
    def synchronize(self) -> None:
        """Wait for all work."""
        asserts.wait()

    def wait_stream(self, other: Any) -> None:
        """Let later work wait for another stream or an event."""

    wait_event = wait_stream

    def record_event(self, event: Event | None = None) -> Event:
        """An event at this point of the stream."""
        event = event or Event()
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority."""
        return 0, 0


class Event:
    """``torch.cuda.Event`` while virtual GPUs are on; its clock is the CPU's."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self.enable_timing = enable_timing
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        """Mark this point of a stream."""
        self._at = time.perf_counter()

    @unseen
    def query(self) -> bool:
        """Whether the work before this point is done."""
        asserts.wait()
        return True

    @unseen
    def synchronize(self) -> None:
        """Wait for the work before this point."""
        asserts.wait()

    def wait(self, stream: Any = None) -> None:
        """Let a stream's later work wait for it."""

    @unseen
    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of CPU time to a later event: they say nothing about a GPU."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end_event._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at - self._at) * 1e3


aten: Any = torch.ops.aten


class AnyEvent(metaclass=_Any):
    """``torch.Event`` while virtual GPUs are on: torch's own, and one for ``"cuda"``."""

    kinds = (C.Event, Event)

    def __new__(cls, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type == "cuda":
            return Event(**options)
        return C.Event(device, **options)


ANYONES = C.DispatchKeySet(C.DispatchKey.IPU)
"""Kernels that serve every device are found by a key that nobody has."""
_on_cuda: set[int] = set()
_swapping = threading.RLock()


class Generator(C.Generator, metaclass=_Any):  # type: ignore[misc]
    """``torch.Generator`` while virtual GPUs are on: a CPU generator that says where it belongs."""

    kinds = (C.Generator,)
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
