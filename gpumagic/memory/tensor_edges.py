"""Tell what torch keeps with a tensor, where C keeps it: its gradient, its graph, its hooks."""

import gc
from typing import Any

import torch
from torch import Tensor, nn

from gpumagic.memory import autograd_graph
from gpumagic.memory.autograd_graph import Edge

# What a subclass may define anew is read where C defines it.
_base: Any = torch._C.TensorBase
_grad, _grad_fn = vars(_base)["grad"].__get__, vars(_base)["grad_fn"].__get__
_retains = vars(_base)["retains_grad"].__get__
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Of a tensor the collector sees its class, if nothing else.
CLASSES = {id(Tensor), id(nn.Parameter)}


def refer_to_nothing(tensors: list[Any]) -> bool:
    """Whether tensors of torch's own classes hold nothing, all of them."""
    try:
        # Torch warns who asks others than leaves for their gradient.
        for get in (_grad_fn, _grad):
            if any(found is not None for found in map(get, tensors)):
                return False
    except RuntimeError:  # see `of_tensor`
        return False
    return {*map(id, gc.get_referents(*tensors))} <= CLASSES


def of_tensor(tensor: Any, graphs: bool) -> list[Edge]:
    """What torch keeps with a tensor, each with the step that leads there."""
    found: list[Edge] = []
    try:
        function = _grad_fn(tensor)
        if function is not None and graphs:
            found.append((function, autograd_graph.GRAPH))
        # Torch warns who asks others for their gradient.
        has_gradient = function is None or _retains(tensor)
        if has_gradient and (grad := _grad(tensor)) is not None:
            found.append((grad, ".grad"))
    except RuntimeError:  # a view whose base was changed in a way that autograd forbids
        pass
    return found


def hooks(tensor: Any) -> list[Edge]:
    """The hooks of a tensor, by kind."""
    return [(vars(_base)[name].__get__(tensor), f".{name}") for name in _HOOKS]
