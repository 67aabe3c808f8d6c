"""Take the state of a rank's variables for a checkpoint, and put one back into them.

By the names of parameters: it fits any number of ranks, with or without DDP or `fully_shard`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from gpumagic.display.units import some
from gpumagic.errors import GpuError

_DATA = (int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device)


class State(NamedTuple):
    """What a variable holds: its own tensors, and copies of the rest; `put` changes it."""

    kind: str
    values: dict[str, Any]
    put: Callable[[dict[str, Any]], object]


def states(names: list[str], space: dict[str, Any], begun: list[str]) -> dict[str, State]:
    """The states of variables by name, of optimizers in `begun` as if they had made a step."""
    if missing := [name for name in names if name not in space]:
        raise GpuError(f"there is no {some(missing)}; make it in a cell of %%ongpu @all")
    values = {name: space[name] for name in names}
    modules = [value for value in values.values() if isinstance(value, nn.Module)]
    return {n: _state(n, value, space, modules, n in begun) for n, value in values.items()}


def _state(
    name: str, value: Any, space: dict[str, Any], modules: list[nn.Module], begun: bool
) -> State:
    if isinstance(value, Optimizer):
        return _optimizer(name, value, modules, begun)
    if isinstance(value, nn.Module):
        found: Any = state_dict.get_model_state_dict(value)
        return State("module", found, lambda given: state_dict.set_model_state_dict(value, given))
    if torch.is_tensor(value):
        return State("tensor", {"": value.detach()}, lambda v: value.detach().copy_(v[""]))
    if isinstance(value, Stateful):
        own = {"": _own(value.state_dict())}
        return State("state", own, lambda given: value.load_state_dict(given[""]))
    leaves = tree_leaves(value)
    if not all(isinstance(leaf, _DATA) or type(leaf).__module__ == "numpy" for leaf in leaves):
        raise GpuError(
            f"{name} is a {type(value).__name__}, which cannot be saved; what has a state_dict(), "
            "tensors, numbers, texts, and lists and dicts of them can"
        )
    return anew("data", name, space, _own(value))


def anew(kind: str, name: str, space: dict[str, Any], value: Any) -> State:
    """Of a variable that is set, whether it is there or not."""
    return State(kind, {"": value}, lambda given: space.update({name: given[""]}))


def _optimizer(name: str, optimizer: Optimizer, modules: list[nn.Module], begun: bool) -> State:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    its = [module for module in modules if mine <= {id(p) for p in module.parameters()}]
    if not its:
        raise GpuError(f"{name}: name the module that has its parameters too, as in net,{name}")
    with _as_it_is(optimizer, begun):
        found: Any = state_dict.get_optimizer_state_dict(its[0], optimizer)
    values = {
        f"state/{parameter}/{key}": value if torch.is_tensor(value) else _own(value)
        for parameter, each in found["state"].items()
        for key, value in each.items()
    }

    def put(values: dict[str, Any]) -> None:
        steps: dict[str, dict[str, Any]] = {}
        for key in values.keys() - {"groups"}:
            _, parameter, what = key.split("/", 2)
            steps.setdefault(parameter, {})[what] = values[key]
        optimizer.state.clear()
        given: Any = {"state": steps, "param_groups": values["groups"]}
        # A parameter that has had no gradient has no state.
        options = state_dict.StateDictOptions(strict=False)
        with _as_it_is(optimizer, bool(steps)):
            state_dict.set_optimizer_state_dict(its[0], optimizer, given, options=options)

    return State("optimizer", {**values, "groups": _own(found["param_groups"])}, put)


@contextmanager
def _as_it_is(optimizer: Optimizer, begun: bool) -> Iterator[None]:
    """Have torch make a state of zeros, by a step without gradients, just where it is `begun`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    if not optimizer.state:
        for number, parameter in enumerate(parameters):
            parameter.grad = None if begun or number else torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _own(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)
