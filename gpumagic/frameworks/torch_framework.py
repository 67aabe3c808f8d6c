"""Implement the `Framework` protocol for torch. Other files here can be imported without torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpumagic.device import Device, cuda_state
from gpumagic.frameworks.framework import Counting, Framework
from gpumagic.ledger.dispatch import MemoryMeter, counting
from gpumagic.ledger.entry import Memory, Tally
from gpumagic.mismatch.explanation import Explanation
from gpumagic.moving import move
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.moved import Moves, Origins
from gpumagic.placement import Placement, torch_devices
from gpumagic.placement.swap import enter, leave

_GONE = "virtual GPUs are off, so their tensors are unusable; create these tensors again"


class Torch(Framework):
    name = "torch"
    counts_allocations = True

    def started(self) -> bool:
        return bool(torch.cuda.is_initialized())

    def devices(self) -> list[Device]:
        return torch_devices.devices(memory=False)

    def own(self, device: Device) -> torch.device:
        return torch_devices.as_torch(device)

    @contextmanager
    def place(
        self, device: Device, *, batches: bool = True, namespace: dict[str, Any] | None = None
    ) -> Iterator[Placement]:
        placed = enter(self.own(device), batches=batches, namespace=namespace)
        try:
            yield placed
        finally:
            leave(placed)

    def is_array(self, value: object) -> bool:
        return issubclass(type(value), Tensor)

    def arrays(self, namespace: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """Return the variables of class `Tensor` itself whose names do not begin with "_"."""
        return [(n, v) for n, v in [*namespace.items()] if type(v) is Tensor and n[:1] != "_"]

    def where(self, array: Tensor) -> str:
        return str(array.device)

    def nbytes(self, array: Tensor) -> int:
        """Return the bytes of a tensor's data; 0 for a tensor without a shape or strides."""
        return move.bytes_of(array)

    def move(
        self,
        variables: Iterable[tuple[str, Any]],
        device: Device,
        namespace: dict[str, Any],
        origins: Origins,
        line: Any = None,
    ) -> Moves:
        """Move tensors, modules and optimizers in place; optimizer state follows its parameters."""
        return move.move_all(variables, self.own(device), namespace, origins=origins, line=line)

    def remember(self, origins: Origins, cell: str) -> None:
        move.remember(origins, cell)

    def home(self, namespace: dict[str, Any], origins: Origins | None = None) -> Moves:
        return move.bring_home(namespace, origins)

    def away(self, namespace: Mapping[str, Any]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for each in TensorFinder(namespace.items()).tensors:
            if each.tensor.device.type not in ("cpu", "meta"):
                found.setdefault(each.root, set()).add(str(each.tensor.device))
        return found

    def wait(self, *devices: str) -> None:
        """Wait for these devices; without arguments, for all initialized GPUs."""
        for name in devices or _with_context():
            move.wait_for(torch.device(name))

    def peak(self, device: Device) -> Callable[[], Iterable[Memory]]:
        meter = MemoryMeter()
        meter.start()
        return meter.stop

    def count(self, tally: Tally, strict: bool, *, warn: bool = False) -> Counting:
        return counting(tally, strict=strict, warn=warn)

    def explain(self, error: BaseException, namespace: Mapping[str, Any]) -> Explanation | None:
        from gpumagic.mismatch.explainer import explain  # imported only after an error

        found = explain(error, namespace=namespace)
        if found is None or torch.cuda.device_count():
            return found
        gone = any("cuda" in device for operand in found.operands for device in operand.devices)
        return replace(found, fix=None, first=None, reason=_GONE) if gone else found


def _with_context() -> list[str]:
    """Return the GPUs that this process uses. Waiting for others would create CUDA contexts."""
    if torch.cuda.is_initialized():
        return [f"cuda:{ordinal}" for ordinal in cuda_state.started()]
    if torch.xpu.is_initialized():
        return [f"xpu:{ordinal}" for ordinal in range(torch.xpu.device_count())]
    return ["mps:0"] if torch.backends.mps.is_available() else []


def bring_results(namespace: dict[str, Any]) -> list[str]:
    """Move the data of tensors with a `grad_fn` to the CPU; return the names of their variables."""
    tensors = TensorFinder(namespace.items()).tensors
    results = [t for t in tensors if t.tensor.is_cuda and t.tensor.grad_fn is not None]
    for each in results:
        each.tensor.data = each.tensor.data.cpu()
    return [*dict.fromkeys(each.root for each in results)]
