"""Check that an operator's tensors are on one device, and raise CUDA's own text if not.

PyTorch has two rules: operators built on TensorIterator accept CPU scalars and say "found at least
two devices"; most others check each argument in a generated wrapper, whose name is in the text.
Which rule applies is read from torch's ``native_functions.yaml`` at the first such error. Copies
and waits are reported to listeners.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpumagic.ledger.copy_kernels import INDEXING, brought
from gpumagic.virtual.virtual_gpus import GPUS, VirtualGpu

Listener = Callable[[str, str, torch.device, torch.device, int], None]

listeners: list[Listener] = []
"""Called as ``f(kind, operator, source, destination, nbytes)`` on the thread that ran the operator.

kind is ``"copy"`` (bytes go from one device to another), ``"sync"`` (the host waits for a result
that decides a value or a shape) or ``"index"`` (a CPU index is copied to the indexed tensor's GPU).
"""


def emit(
    kind: str, operator: str, source: torch.device, destination: torch.device, nbytes: int
) -> None:
    """Call every listener."""
    for listener in listeners:
        listener(kind, operator, source, destination, nbytes)


Found = list[tuple[str, Tensor, Tensor]]
"""An operator's tensors in order: the argument's name, the tensor, and the CPU tensor that
replaces it."""

TAKEN_FROM_CPU = frozenset(
    ["cpu_nested_shape_example", "input_lengths", "lengths", "lr", "target_lengths"]
)
"""Arguments that CUDA's kernels read on the host."""
SAME = "Expected all tensors to be on the same device, but"


def one_gpu(found: Found) -> VirtualGpu | None:
    """Return the GPU that all the tensors are on; None if they are not on one."""
    first = found[0][1].get_device()
    if first < 0:
        return None
    for _, tensor, _ in found:
        if tensor.get_device() != first:
            return None
    return GPUS[first]


def mixed(plan: Any, found: Found, args: Any) -> VirtualGpu:
    """Return the GPU that runs an operator with tensors on several devices, or raise as CUDA."""
    __tracebackhide__ = True
    found = sorted(found, key=lambda each: each[0] not in plan.outs)
    gpu = GPUS[next(tensor for _, tensor, _ in found if tensor.is_cuda).get_device()]
    if plan.name in INDEXING:
        home = found[0][1].device
        _check_indices(home, found)
        for tensor, operator, nbytes, _ in brought(plan.name, *args[1:]):
            emit("index" if operator == "index" else "copy", operator, tensor.device, home, nbytes)
        return gpu
    if plan.name == "masked_fill_" and found[1][1].device != found[0][1].device:
        raise RuntimeError(
            "expected self and mask to be on the same device, but got mask on "
            f"{found[1][1].device} and self on {found[0][1].device}"
        )
    iterates, structured = _rules().get(plan.op.name().removeprefix("aten::"), (True, False))
    home = gpu.device if iterates else found[0][1].device
    for argument, tensor, _ in found:
        if tensor.device == home or argument in TAKEN_FROM_CPU:
            continue
        if not iterates:
            raise RuntimeError(
                f"{SAME} got {argument} is on {tensor.device}, different from other tensors on "
                f"{home} (when checking argument in method {_wrapper(plan, structured, found)})"
            )
        if argument in plan.written or tensor.is_cuda or tensor.dim():
            raise RuntimeError(f"{SAME} found at least two devices, {home} and {tensor.device}!")
    return gpu


def _check_indices(home: torch.device, found: Found) -> None:
    __tracebackhide__ = True
    for _, tensor, _ in found[1:]:
        if tensor.is_cuda and tensor.device != home:
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({home})"
            )


def _wrapper(plan: Any, structured: bool, found: Found) -> str:
    """The name that torchgen gives to the function that checks an operator's devices."""
    name, variant = plan.name, plan.op._schema.overload_name
    x, given = found[0][1], {argument for argument, _, _ in found}
    cudnn = x.is_cuda and x.dim() > 2 and x.dtype in (torch.float, torch.double)
    if name == "native_batch_norm" and cudnn and {"weight", "bias"} <= given:
        name = "cudnn_batch_norm"
    name += "_out" * bool(plan.outs)
    if structured:
        return f"wrapper_CUDA_{name}{'_' * bool(variant)}{variant}"
    return f"wrapper_CUDA_{variant}_{name}"


@cache
def _rules() -> dict[str, tuple[bool, bool]]:
    """Whether an operator leaves the check to TensorIterator, and whether it is structured."""
    path = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return {}
    return {
        entry.split("(", 1)[0]: (
            "device_check: NoCheck" in entry,
            "structured: True" in entry or "structured_delegate" in entry,
        )
        for entry in text.split("\n- func: ")[1:]
    }
