"""Imitate streams and events: all work on them is done, since virtual GPUs compute at once."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from gpumagic.usercode.files import unseen
from gpumagic.virtual.virtual_gpus import gpu_of

C: Any = torch._C
_CUDA = 1  # c10::DeviceType::CUDA
_numbers = itertools.count(1)  # 0 is the default stream of each GPU


class _AnyStream(type(C.Stream)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, C.Stream)


class AnyStream(C.Stream, metaclass=_AnyStream):  # type: ignore[misc]
    """``torch.Stream`` while virtual GPUs are on: torch's own, and one for ``"cuda"``."""

    def __new__(cls, device: Any = None, **options: Any) -> Any:
        if device is None:
            return C.Stream(**options)
        wanted = torch.device(device)
        return Stream(wanted) if wanted.type == "cuda" else C.Stream(wanted, **options)


class _AnyEvent(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (C.Event, Event))


class AnyEvent(metaclass=_AnyEvent):
    """``torch.Event`` while virtual GPUs are on: torch's own, and one for ``"cuda"``."""

    def __new__(cls, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type == "cuda":
            return Event(**options)
        return C.Event(device, **options)


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

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def synchronize(self, *other: Any) -> None:
        """Wait for all work; or let later work wait for another stream or an event."""

    wait_event = wait_stream = synchronize

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

    def query(self) -> bool:
        """Whether the work before this point is done."""
        return True

    def synchronize(self, stream: Any = None) -> None:
        """Wait for the work before this point; or let a stream's later work wait for it."""

    wait = synchronize

    @unseen
    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of CPU time to a later event: they say nothing about a GPU."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end_event._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at - self._at) * 1e3
