"""Say in words what a variable is that a dry run has assigned."""

from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gpumagic.dryrun.result import Assigned
from gpumagic.dryrun.unknown import NotKnown
from gpumagic.moving.find_tensors import TensorFinder


def describe(name: str, value: Any) -> Assigned:
    """A variable's kind, device and bytes."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape = tuple(int(n) for n in value.shape)
        return Assigned(
            name, f"{dtype}{list(shape)}", str(value.device), value.nbytes, shape, value.dtype
        )
    if isinstance(value, NotKnown):
        return Assigned(name, "a value that depends on data")
    finder = TensorFinder()
    finder.variables([(name, value)])
    tensors = [found.tensor for found in finder.tensors]
    devices = dict.fromkeys(str(t.device) for t in tensors)
    nbytes = sum(t.nbytes for t in tensors)
    return Assigned(name, _words(value, tensors), ", ".join(devices), nbytes)


def _words(value: Any, tensors: list[Tensor]) -> str:
    kind = type(value).__name__
    if isinstance(value, nn.Module):
        count = sum(1 for _ in value.parameters())
        return f"{kind}, {_many(count, 'parameter')}"
    if isinstance(value, Optimizer):
        count = sum(len(group["params"]) for group in value.param_groups)
        return f"{kind} of {_many(count, 'parameter')}"
    if isinstance(value, (list, tuple, dict, set)):
        return f"{kind} of {len(value)}" + (f", {_many(len(tensors), 'tensor')}" * bool(tensors))
    if isinstance(value, (bool, int, float, str)) and len(repr(value)) <= 40:
        return f"{kind} {value!r}"
    if is_dataclass(value) and tensors:
        return f"{kind}, {_many(len(tensors), 'tensor')}"
    return kind


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
