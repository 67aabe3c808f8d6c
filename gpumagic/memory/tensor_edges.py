"""List what torch keeps with a tensor in C: its gradient, its graph, its hooks."""

import gc
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from gpumagic.memory import autograd_graph
from gpumagic.memory.autograd_graph import Edge

# A subclass may override these attributes, so they are read from C's own class.
_base: Any = torch._C.TensorBase
_grad, _grad_fn = vars(_base)["grad"].__get__, vars(_base)["grad_fn"].__get__
_retains, _layout = vars(_base)["retains_grad"].__get__, vars(_base)["layout"].__get__
_HOOKS = [
    (f".{name}", vars(_base)[name].__get__)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
]
_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), (*_ROWS, "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), (*_COLUMNS, "values")),
}
"""What a sparse tensor is made of, which C makes a tensor of whenever it is asked."""
# Of a tensor the collector sees its class, if nothing else.
CLASSES = {id(Tensor), id(nn.Parameter)}


def refer_to_nothing(tensors: list[Any]) -> bool:
    """Whether tensors of torch's own classes hold nothing, all of them."""
    try:
        # Torch warns who asks others than leaves for their gradient.
        for get in (_grad_fn, _grad):
            if not all(map(is_, map(get, tensors), repeat(None))):
                return False
    except RuntimeError:  # see `of_tensor`
        return False
    if any(map(_PARTS.get, map(_layout, tensors))):
        return False
    return {*map(id, gc.get_referents(*tensors))} <= CLASSES


def of_tensor(tensor: Any, graphs: bool) -> list[Edge]:
    """List what torch keeps with a tensor, each with the step that reaches it."""
    found: list[Edge] = [(held, step) for step, get in _HOOKS if (held := get(tensor)) is not None]
    if (parts := _PARTS.get(_layout(tensor))) is not None:
        with torch.no_grad():
            found += [(getattr(_base, part)(tensor), f".{part}()") for part in parts]
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


def of_script(module: Any) -> list[Edge]:
    """List the tensors of a TorchScript module, which C++ holds."""
    kinds: Any = torch._C.ParameterDict, torch._C.BufferDict
    return [(tensor, f".{name}") for kind in kinds for name, tensor in kind(module).items()]
