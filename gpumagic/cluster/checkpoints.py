"""Save and load the ranks' variables with `torch.distributed.checkpoint`.

torch writes the file `.metadata` last, so a directory without this file is incomplete. All ranks
call `save` or `restore` together. If one call fails, all calls fail.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from gpumagic.display.units import some
from gpumagic.errors import GpuError
from gpumagic.faults import in_words
from gpumagic.isolation.settings import deferred
from gpumagic.usercode.files import shell

dist: Any = torch.distributed  # Any, since torch's annotations lack some names
dcp: Any = torch.distributed.checkpoint
_DATA = (int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device)
_FAILURES = (Exception, CheckpointException)  # CheckpointException derives from BaseException only


class Checkpoint(NamedTuple):
    """A checkpoint's directory and variables, or the error of saving or loading."""

    path: str
    variables: tuple[str, ...] = ()
    error: str = ""


def find(directory: str) -> Path:
    """Return `directory` if it is a complete checkpoint, else the newest complete one in it."""
    for path in (Path(directory), *reversed(_each(directory))):
        if (path / ".metadata").is_file():
            return path
    raise GpuError(f"{directory}: there is no complete checkpoint")


def _next(directory: str) -> Path:
    """Create the directory of the next checkpoint."""
    numbers = [int(path.name) for path in _each(directory)]
    path = Path(directory) / f"{max(numbers, default=0) + 1:06}"
    path.mkdir(parents=True)
    return path


def _each(directory: str) -> list[Path]:
    """Return the checkpoints in a directory, the oldest first."""
    return sorted(Path(directory).glob("[0-9]" * 6))


class State(NamedTuple):
    """A variable's tensors and data. `put` loads new values into the variable."""

    values: dict[str, Any]  # by path inside the variable: "0/exp_avg", or "" for a whole value
    put: Callable[[dict[str, Any]], object]
    same: tuple[str, ...] = ()  # paths of entries that must match the checkpoint's


def _state(name: str, space: dict[str, Any], saved: dict[str, Any]) -> State:
    """Return a variable's state. `saved`: the checkpoint's entries to load; empty when saving."""
    whole = saved.get("")
    if whole is not None and not (hasattr(whole, "size") and torch.is_tensor(space.get(name))):
        return _assigned(name, space, _slot(whole))
    if name not in space:
        raise GpuError(f"no variable {name}; read or assign it in a cell of %%ongpu @all")
    value = space[name]
    if isinstance(value, Optimizer):
        return _optimizer(value, saved)
    if isinstance(value, nn.Module):
        found: Any = state_dict.get_model_state_dict(value)
        return State(found, lambda given: state_dict.set_model_state_dict(value, given))
    if torch.is_tensor(value):
        return State({"": value.detach()}, lambda given: value.detach().copy_(given[""]))
    if isinstance(value, Stateful):
        own = {"state": _on_cpu(value.state_dict())}
        return State(own, lambda given: value.load_state_dict(given["state"]))
    leaves = tree_leaves(value)
    if not all(isinstance(leaf, _DATA) or type(leaf).__module__ == "numpy" for leaf in leaves):
        what = "tensors, numbers, strings, lists and dicts of them, or objects with a state_dict()"
        raise GpuError(f"{name} is a {type(value).__name__}, which cannot be saved; save {what}")
    return _assigned(name, space, _on_cpu(value))


def _assigned(name: str, space: dict[str, Any], value: Any) -> State:
    return State({"": value}, lambda given: space.update({name: given[""]}))


def _optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> State:
    """Return an optimizer's state; paths begin with the parameter's number: ``"0/exp_avg"``."""
    mine = [each for group in optimizer.param_groups for each in group["params"]]
    now, parameters = optimizer.state_dict(), dict(enumerate(mine))
    values = {f"{n}/{key}": v for n, held in now["state"].items() for key, v in held.items()}
    if saved:  # a new optimizer has no state yet, so take the checkpoint's paths
        numbered = {path: int(path.partition("/")[0]) for path in saved if "/" in path}
        values = {path: _slot(saved[path], parameters.get(n)) for path, n in numbered.items()}
    shapes = [tuple(each.shape) for each in mine]
    values |= {"groups": _on_cpu(now["param_groups"]), "of": [type(optimizer).__name__, shapes]}

    def put(given: dict[str, Any]) -> None:
        state: dict[int, dict[str, Any]] = {}
        for path in given.keys() - {"groups", "of"}:
            number, _, key = path.partition("/")
            state.setdefault(int(number), {})[key] = given[path]
        optimizer.load_state_dict({"state": state, "param_groups": given["groups"]})

    return State(values, put, ("of", "groups"))


def _fixed(value: Any) -> Any:
    """Return what to compare: the parameter numbers if `value` is groups, else `value` itself."""
    return [each["params"] for each in value] if isinstance(value[0], dict) else value


def _slot(at: Any, parameter: Any = None) -> Any:
    """Return a tensor that can receive the checkpoint's entry `at`; 0 if `at` is not a tensor."""
    if not hasattr(at, "properties"):
        return 0
    if parameter is not None and parameter.shape == at.size:  # shard the tensor like the parameter
        return parameter.detach().to("cpu", at.properties.dtype, copy=True)
    return torch.empty(at.size, dtype=at.properties.dtype)


def _on_cpu(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)


def _fitting(path: Path, space: dict[str, Any]) -> dict[str, State]:
    """Return states of a checkpoint's variables. Raise `GpuError` if a variable lacks an entry."""
    saved: dict[str, dict[str, Any]] = {}
    for key, at in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        saved.setdefault(key.partition("/")[0], {})[key.partition("/")[2]] = at
    found = {name: _state(name, space, each) for name, each in saved.items()}
    for name, each in saved.items():
        # torch raises only in the reverse case: if the checkpoint lacks an entry of a variable.
        if lacking := sorted(each.keys() - found[name].values.keys()):
            raise GpuError(f"{name}: the checkpoint's {lacking[0]} does not exist here")
    return found


def _by_path(found: dict[str, State]) -> dict[str, Any]:
    return {f"{n}/{key}": value for n, each in found.items() for key, value in each.values.items()}


def _why(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {in_words(cause)}"
    return str(error) if isinstance(error, GpuError) else in_words(error)


def _on_all(step: Callable[[], Any]) -> list[Any]:
    """Run a step on each rank and return all results. If one fails, all ranks raise `GpuError`."""
    try:
        mine = step(), ""
    except _FAILURES as error:  # raised below as GpuError, on all ranks
        mine = None, _why(error)
    found: list[Any] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for rank, (_, why) in enumerate(found):
        if why:
            raise GpuError(why if all(each == why for _, each in found) else f"rank {rank}: {why}")
    return [value for value, _ in found]


def save(directory: str, names: list[str]) -> Checkpoint:
    """Save variables in a new checkpoint. Errors are returned, not raised."""
    values: dict[str, Any] = {}

    def look() -> dict[str, Any]:
        values.update(_by_path({name: _state(name, shell().user_ns, {}) for name in names}))
        return {path: getattr(value, "shape", 0) for path, value in values.items()}

    try:
        first, *others = _on_all(look)
        if odd := {path for each in others for path, _ in first.items() ^ each.items()}:
            named = some(sorted({path.partition("/")[0] for path in odd}))
            raise GpuError(f"{named}: the shapes are not the same on all ranks")
        # Only rank 0 creates the directory. Then each rank checks that its host sees the directory.
        path = _on_all(lambda: _next(directory) if dist.get_rank() == 0 else None)[0]
        if not all(_on_all(path.is_dir)):
            raise GpuError(f"not all hosts see {directory}; give a directory that they share")
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        dcp.save(values, checkpoint_id=path, planner=planner)
    except (GpuError, CheckpointException) as error:
        return Checkpoint(directory, error=_why(error))
    return Checkpoint(str(path), tuple(names))


def restore(directory: str) -> Checkpoint:
    """Read a whole checkpoint, then set variables. Errors in reading are returned, not raised."""
    found: dict[str, State] = {}
    read: dict[str, Any] = {}

    def load() -> Path:
        path = find(directory)
        found.update(_fitting(path, shell().user_ns))
        for key, value in _by_path(found).items():
            read[key] = value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that each rank reads alone
            dcp.load(read, checkpoint_id=path, planner=planner, no_dist=True)
        for name, each in found.items():
            if any(_fixed(each.values[key]) != _fixed(read[f"{name}/{key}"]) for key in each.same):
                raise GpuError(f"{name}: its class, shapes or groups differ from the checkpoint's")
        return path

    try:
        path = _on_all(load)[0]
    except GpuError as error:
        return Checkpoint(directory, error=str(error))
    with deferred():  # otherwise an interrupt could leave some variables unloaded
        for name, each in found.items():
            each.put({key: read[f"{name}/{key}"] for key in each.values})
    return Checkpoint(str(path), tuple(found))
