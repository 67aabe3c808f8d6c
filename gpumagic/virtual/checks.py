"""Check which devices an operator's tensors are on, and raise CUDA's own words where they differ.

Two rules are alive in PyTorch: operators built on TensorIterator let CPU scalars in and say "found
at least two devices"; most others check argument by argument in a generated wrapper, whose name is
part of the text. Which operator follows which is read from the ``native_functions.yaml`` that torch
ships, when the first such error is raised.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpumagic.ledger.cuda_reads import INDEXING, brought
from gpumagic.virtual.events import emit
from gpumagic.virtual.virtual_gpus import GPUS, VirtualGpu

Found = list[tuple[str, Tensor, Tensor]]
"""An operator's tensors in order: the argument's name, the tensor, the CPU tensor that stands for
it."""

TAKEN_FROM_CPU = frozenset(
    ["cpu_nested_shape_example", "input_lengths", "lengths", "lr", "target_lengths"]
)
"""Arguments that CUDA's kernels read on the host."""
_SAME = "Expected all tensors to be on the same device, but"


def one_gpu(found: Found) -> VirtualGpu | None:
    """The GPU that all the tensors are on, or None if they are not on one."""
    first = found[0][1].get_device()
    if first < 0:
        return None
    for _, tensor, _ in found:
        if tensor.get_device() != first:
            return None
    return GPUS[first]


def mixed(op: Any, name: str, outs: frozenset[str], found: Found, args: Any) -> VirtualGpu:
    """The GPU on which an operator with tensors on several devices runs, or CUDA's RuntimeError."""
    __tracebackhide__ = True
    gpu = GPUS[next(tensor for _, tensor, _ in found if tensor.is_cuda).get_device()]
    home = found[0][1].device
    if name in INDEXING:
        _check_indices(home, found)
        for tensor, operator, nbytes, _ in brought(name, *args[1:]):
            emit("index" if operator == "index" else "copy", operator, tensor.device, home, nbytes)
        return gpu
    if name in ("masked_fill", "masked_fill_") and found[1][1].device != home:
        raise RuntimeError(
            "expected self and mask to be on the same device, but got mask on "
            f"{found[1][1].device} and self on {home}"
        )
    iterates, method = _rules().get(op.name().removeprefix("aten::"), (True, ""))
    if iterates:
        home = gpu.device
    for argument, tensor, _ in found:
        if tensor.device == home or argument in TAKEN_FROM_CPU:
            continue
        if not iterates:
            raise RuntimeError(
                f"{_SAME} got {argument} is on {tensor.device}, different from other tensors on "
                f"{home} (when checking argument in method {method})"
            )
        if argument in outs or tensor.is_cuda or tensor.dim():
            raise RuntimeError(f"{_SAME} found at least two devices, {home} and {tensor.device}!")
    return gpu


def _check_indices(home: torch.device, found: Found) -> None:
    __tracebackhide__ = True
    for _, tensor, _ in found[1:]:
        if tensor.is_cuda and tensor.device != home:
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({home})"
            )


@cache
def _rules() -> dict[str, tuple[bool, str]]:
    """Whether an operator leaves the check to TensorIterator, and its wrapper's name."""
    path = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return {}
    rules = {}
    for entry in text.split("\n- func: ")[1:]:
        full = entry.split("(", 1)[0]
        name, _, overload = full.partition(".")
        structured = "structured: True" in entry or "structured_delegate" in entry
        wrapper = full.replace(".", "_") if structured else f"{overload}_{name}"
        rules[full] = ("device_check: NoCheck" in entry, f"wrapper_CUDA_{wrapper}")
    return rules
