"""Save and load variables of the ranks through `torch.distributed.checkpoint`.

Tensors are stored by the names of parameters, so a checkpoint fits any number of ranks, with or
without DDP or `fully_shard`. All ranks make the same calls; if one fails, none proceeds. The
traffic has a process group of its own.
"""

import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from gpumagic.cluster.checkpoints import Checkpoint, begin, complete, find
from gpumagic.display.units import some
from gpumagic.errors import GpuError
from gpumagic.faults import in_words
from gpumagic.usercode.files import shell

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


dist: Any = torch.distributed  # without the types that leave names out
dcp: Any = torch.distributed.checkpoint
_BEHIND_S = 30.0  # a rank may be behind rank 0
_FAILURES = (Exception, CheckpointException)  # torch's is none of Exception's

_save: "Future[str] | None" = None  # the end of the last one: why it failed, if it did
_group: tuple[Any, Any] = (None, None)  # the ranks' group, and ours beside it


def _why(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {in_words(cause)}"
    return str(error) if isinstance(error, GpuError) else in_words(error)


def _our_group() -> Any:
    """A group in which nothing is sent but here, by one thread at a time; None without ranks."""
    global _group
    if not dist.is_initialized():
        return None
    if _group[0] is not dist.group.WORLD:
        _group = dist.group.WORLD, dist.new_group(backend="gloo")
    elif _save is not None:
        wait([_save], _BEHIND_S)
    return _group[1]


def _on_all(step: Callable[[], Any]) -> list[Any]:
    """What a step gives on each rank; if it fails on one it raises `GpuError` on all."""
    try:
        mine = step(), ""
    except _FAILURES as error:  # raised below, on all ranks
        mine = None, _why(error)
    found: list[Any] = [mine]
    if group := _our_group():
        found *= dist.get_world_size()
        dist.all_gather_object(found, mine, group=group)
    for rank, (_, why) in enumerate(found):
        if why:
            raise GpuError(why if all(each == why for _, each in found) else f"rank {rank}: {why}")
    return [value for value, _ in found]


def _by_path(found: dict[str, State]) -> dict[str, Any]:
    return {f"{n}/{key}": value for n, each in found.items() for key, value in each.values.items()}


def start(names: list[str], directory: str) -> Checkpoint | str:
    """Copy variables to the CPU, and write them while cells run; without a directory only look."""
    global _save
    space = shell().user_ns
    found: dict[str, State] = {}

    def look() -> list[Any]:
        found.update(states(names, space, []))
        return [{k: getattr(v, "shape", 0) for k, v in s.values.items()} for s in found.values()]

    try:
        alike = zip(names, zip(*_on_all(look), strict=True), strict=True)
        if odd := [name for name, (first, *others) in alike if any(o != first for o in others)]:
            raise GpuError(f"{some(odd)}: the shapes are not the same on all ranks")
        if not directory:
            return ""
        # Rank 0 makes the directory; the others may be on hosts that do not see it.
        path = _on_all(lambda: begin(directory) if dist.get_rank() == 0 else None)[0]
        if not all(_on_all(path.is_dir)):
            raise GpuError(f"not all hosts see {directory}; give a directory that they share")
    except GpuError as error:
        return str(error)
    values = _by_path(found)
    kinds = {name: found[name].kind for name in names}
    nbytes = sum(v.numel() * v.itemsize for v in values.values() if isinstance(v, torch.Tensor))
    whole = str(path.with_suffix(""))
    checkpoint = Checkpoint(whole, kinds, nbytes, dist.get_world_size(), time.time())
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    group = _our_group()
    _save = over = Future[str]()
    writing = dcp.async_save(values, checkpoint_id=path, planner=planner, process_group=group)
    writing.add_done_callback(lambda done: _end(done, over, path, checkpoint))
    return checkpoint


def _end(done: "Future[Any]", over: "Future[str]", path: Any, checkpoint: Checkpoint) -> None:
    try:
        done.result()
        if dist.get_rank() == 0:
            complete(path, checkpoint)
        over.set_result("")
    except _FAILURES as error:  # told under the next cell
        over.set_result(_why(error))


def state(seconds: float) -> tuple[bool, str]:
    """Of the last save: whether it is over in so many seconds, and why it failed."""
    if _save is None or wait([_save], seconds).done:
        return True, _save.result() if _save else "the rank was started anew"
    return False, ""


def restore(directory: str) -> Checkpoint | str:
    """Load a checkpoint, once all of it is read, into the variables here; or say why not."""
    space = shell().user_ns
    found: dict[str, State] = {}
    read: dict[str, Any] = {}
    fresh: list[Any] = []  # optimizers that had no state

    def look() -> Checkpoint:
        checkpoint = find(directory)
        found.update(_fitting(checkpoint, space, fresh))
        return checkpoint

    def load() -> None:
        for path, value in _by_path(found).items():
            is_tensor = isinstance(value, torch.Tensor)
            read[path] = value.detach().to("cpu", copy=True) if is_tensor else value
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each rank reads for itself, and torch says so
            dcp.load(read, checkpoint_id=checkpoint.path, planner=planner, no_dist=True)

    try:
        checkpoint: Checkpoint = _on_all(look)[0]
        _on_all(load)
    except GpuError as error:
        for optimizer in fresh:
            optimizer.state.clear()
        return str(error)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # all or nothing
    try:
        for name, each in found.items():
            each.put({key: read[f"{name}/{key}"] for key in each.values})
    finally:
        signal.signal(signal.SIGINT, before)
    return checkpoint


def _fitting(checkpoint: Checkpoint, space: dict[str, Any], fresh: list[Any]) -> dict[str, State]:
    """The states of the variables here; raises `GpuError` where they do not fit."""
    kinds, anew_too = checkpoint.variables, ("tensor", "data")
    saved: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    metadata = dcp.FileSystemReader(checkpoint.path).read_metadata()
    for path, each in metadata.state_dict_metadata.items():
        name, _, key = path.partition("/")
        saved[name][key] = each
    begun = [name for name in kinds if len(saved[name]) > 1 and kinds[name] == "optimizer"]
    fresh += [space[name] for name in begun if not getattr(space.get(name), "state", True)]
    needed = [name for name in kinds if name in space or kinds[name] not in anew_too]
    found = states(needed, space, begun)
    for name, kind in kinds.items():
        if kind in anew_too and (name not in found or found[name].kind != kind):
            at = saved[name][""]
            empty = torch.empty(at.size, dtype=at.properties.dtype) if kind == "tensor" else 0
            found[name] = anew(kind, name, space, empty)
        if kind == "optimizer":  # what has come here since is forgotten
            mine = {key: v for key, v in found[name].values.items() if key in saved[name]}
            found[name] = found[name]._replace(values=mine)
        # Shapes, and what was not saved, torch compares.
        if lacking := sorted(saved[name].keys() - found[name].values.keys()):
            raise GpuError(f"{name}: there is no {lacking[0]} here, which the checkpoint has")
    return found
