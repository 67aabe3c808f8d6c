"""Raise CUDA's errors for tensors on different devices.

PyTorch has two rules for devices. Operators built on TensorIterator accept 0-dim CPU tensors. Their
error says "found at least two devices". Most other operators have a generated wrapper that checks
each argument, and the error names this wrapper. torch's ``native_functions.yaml`` has the rules.
"""

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpumagic.ledger.copy_kernels import INDEXING
from gpumagic.virtual.virtual_gpus import GPUS, VirtualGpu

Found = list[tuple[str, Tensor, Tensor]]
"""For each tensor argument, in order: name, tensor, and the tensor that the CPU's kernel gets."""

TAKEN_FROM_CPU = {"cpu_nested_shape_example", "input_lengths", "lengths", "lr", "target_lengths"}
"""Names of arguments that may be CPU tensors, because CUDA's kernels read them on the host."""
INDEX = "indices should be either on cpu or on the same device as the indexed tensor ({})"
LENGTHS = "'lengths' argument should be a 1D CPU int64 tensor, but got 1D {} Long tensor"
SAME = "Expected all tensors to be on the same device, but"


def mixed(plan: Any, found: Found) -> VirtualGpu:
    """Choose the GPU for an operator with tensors on several devices, or raise CUDA's error."""
    __tracebackhide__ = True
    found = sorted(found, key=lambda each: each[0] not in plan.outs)
    gpu = GPUS[next(tensor for _, tensor, _ in found if tensor.is_cuda).get_device()]
    home = found[0][1].device
    if plan.name in INDEXING:
        if any(tensor.is_cuda and tensor.device != home for _, tensor, _ in found[1:]):
            raise RuntimeError(INDEX.format(home))
    elif plan.name == "masked_fill_" and (mask := found[1][1].device) != home:
        got = f"mask on {mask} and self on {home}"
        raise RuntimeError(f"expected self and mask to be on the same device, but got {got}")
    else:
        _check_each(plan, found, gpu)
    return gpu


def _check_each(plan: Any, found: Found, gpu: VirtualGpu) -> None:
    """If a tensor is on a wrong device, raise TensorIterator's or the generated wrapper's error."""
    __tracebackhide__ = True
    iterates, structured = _rules().get(plan.op.name().removeprefix("aten::"), (True, False))
    home = gpu.device if iterates else found[0][1].device
    for argument, tensor, _ in found:
        if tensor.device == home or argument in TAKEN_FROM_CPU:
            continue
        if not iterates:
            got = f"{argument} is on {tensor.device}, different from other tensors on {home}"
            when = f"when checking argument in method {_wrapper(plan, structured, found)}"
            raise RuntimeError(f"{SAME} got {got} ({when})")
        if argument in plan.written or tensor.is_cuda or tensor.dim():
            raise RuntimeError(f"{SAME} found at least two devices, {home} and {tensor.device}!")


def _wrapper(plan: Any, structured: bool, found: Found) -> str:
    """Return torchgen's name for the wrapper that checks an operator's devices."""
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
    """Map names to (whether TensorIterator checks devices, whether the kernel is structured)."""
    path = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    text = ""
    with suppress(OSError):
        text = path.read_text(encoding="utf-8")
    return {
        entry.split("(", 1)[0]: (
            "device_check: NoCheck" in entry,
            "structured: True" in entry or "structured_delegate" in entry,
        )
        for entry in text.split("\n- func: ")[1:]
    }
