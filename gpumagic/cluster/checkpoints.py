"""Save variables of the ranks through `torch.distributed.checkpoint`, and load them again.

A checkpoint is a directory. It is written under a temporary name and renamed when it is complete,
so an interrupted save leaves the previous checkpoint intact.

The ranks call `save` and `restore`. Tensors are stored by the names of parameters, so a checkpoint
fits any number of ranks, with or without DDP or `fully_shard`. All ranks make the same calls; if
one fails, none proceeds.
"""

import json
import os
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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

from gpumagic.cluster.engines import RanksError
from gpumagic.display.units import size, some
from gpumagic.errors import GpuError
from gpumagic.faults import in_words
from gpumagic.usercode.files import shell

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_INCOMPLETE, _ABOUT = ".incomplete", "about.json"
_KEPT = 2
dist: Any = torch.distributed  # without the types that leave names out
dcp: Any = torch.distributed.checkpoint
_DATA = (int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device)
# Modules that wrap another one add these to the names of its parameters.
_WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod|_checkpoint_wrapped_module)\.")
_FAILURES = (Exception, CheckpointException)  # torch's derives from BaseException


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its directory and contents."""

    path: str
    variables: dict[str, str]  # kinds by name: module, tensor, …
    nbytes: int
    ranks: int  # number of ranks that saved it
    saved: float  # Unix time

    def __str__(self) -> str:
        return f"checkpoint of {some(self.variables)}: {size(self.nbytes)} to {self.path}"

    def loaded(self) -> str:
        """Return the message after loading."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.saved))
        names, ranks = some(self.variables), f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{names} loaded from {self.path}, saved {when} by {ranks}"


def begin(directory: str) -> Path:
    """Create the directory of the next checkpoint."""
    numbers = [int(path.name[:6]) for path in _each(Path(directory))]
    path = Path(directory) / f"{max(numbers, default=0) + 1:06}{_INCOMPLETE}"
    path.mkdir(parents=True)
    return path


def complete(path: Path, checkpoint: Checkpoint) -> None:
    """Rename a complete checkpoint, and remove old ones."""
    (path / _ABOUT).write_text(json.dumps(asdict(checkpoint)))
    os.replace(path, checkpoint.path)
    older = [each for each in _each(path.parent) if each.name[:6] < path.name[:6]]
    whole = [each for each in older if not each.suffix]
    for each in {*older} - {*whole[1 - _KEPT :]}:
        shutil.rmtree(each, ignore_errors=True)


def find(directory: str) -> Checkpoint:
    """Return the last complete checkpoint in a directory, or the directory itself."""
    for path in (Path(directory), *reversed(_each(Path(directory)))):
        if (path / _ABOUT).is_file() and path.suffix != _INCOMPLETE:
            about = json.loads((path / _ABOUT).read_text())
            return Checkpoint(**{**about, "path": str(path)})
    raise GpuError(f"{directory}: there is no complete checkpoint")


def _each(directory: Path) -> list[Path]:
    """Return the checkpoints, the oldest first."""
    return sorted(p for suffix in ("", _INCOMPLETE) for p in directory.glob("[0-9]" * 6 + suffix))


class State(NamedTuple):
    """The state of a variable, as tensors and data by path; `put` changes the variable."""

    kind: str
    values: dict[str, Any]
    put: Callable[[dict[str, Any]], object]


def states(names: list[str], space: dict[str, Any], saved: dict[str, Any]) -> dict[str, State]:
    """Return states by name; optimizers with room for their entries in `saved`."""
    if missing := [name for name in names if name not in space]:
        raise GpuError(f"there is no {some(missing)}; make it in a cell of %%ongpu @all")
    modules = {name: space[name] for name in names if isinstance(space[name], nn.Module)}
    parameters = {
        f"{name}.{_WRAPPERS.sub('', path)}": parameter
        for name, module in modules.items()
        for path, parameter in module.named_parameters()
    }
    return {name: _state(name, space, parameters, saved.get(name, {})) for name in names}


def _state(
    name: str, space: dict[str, Any], parameters: dict[str, Any], saved: dict[str, Any]
) -> State:
    value = space[name]
    if isinstance(value, Optimizer):
        return _optimizer(name, value, parameters, saved)
    if isinstance(value, nn.Module):
        found: Any = state_dict.get_model_state_dict(value)
        return State("module", found, lambda given: state_dict.set_model_state_dict(value, given))
    if torch.is_tensor(value):
        return State("tensor", {"": value.detach()}, lambda v: value.detach().copy_(v[""]))
    if isinstance(value, Stateful):
        own = {"": _on_cpu(value.state_dict())}
        return State("state", own, lambda given: value.load_state_dict(given[""]))
    leaves = tree_leaves(value)
    if not all(isinstance(leaf, _DATA) or type(leaf).__module__ == "numpy" for leaf in leaves):
        raise GpuError(
            f"{name} is a {type(value).__name__}, which cannot be saved; what has a state_dict(), "
            "tensors, numbers, texts, and lists and dicts of them can"
        )
    return _new("data", name, space, _on_cpu(value))


def _new(kind: str, name: str, space: dict[str, Any], value: Any) -> State:
    """Return the state of a variable that may not exist yet."""
    return State(kind, {"": value}, lambda given: space.update({name: given[""]}))


def _optimizer(
    name: str, optimizer: Optimizer, parameters: dict[str, Any], saved: dict[str, Any]
) -> State:
    paths = {id(parameter): path for path, parameter in parameters.items()}
    mine = [each for group in optimizer.param_groups for each in group["params"]]
    if any(id(each) not in paths for each in mine):
        raise GpuError(f"{name}: name the module that has its parameters too, as in net,{name}")
    order, now = [paths[id(each)] for each in mine], optimizer.state_dict()
    groups = [each["params"] for each in now["param_groups"]]
    values = {
        f"{order[number]}/{key}": value
        for number, state in now["state"].items()
        for key, value in state.items()
    }
    if saved:  # a new optimizer has no state before its first step
        entries = [(path.partition("/")[0], path, at) for path, at in saved.items()]
        values = {path: _room(at, parameters[its]) for its, path, at in entries if its in order}
    values |= {"groups": _on_cpu(now["param_groups"]), "order": order}

    def put(given: dict[str, Any]) -> None:
        state: dict[int, dict[str, Any]] = {}
        for path in given.keys() - {"groups", "order"}:
            parameter, _, key = path.partition("/")
            state.setdefault(order.index(parameter), {})[key] = given[path]
        optimizer.load_state_dict({"state": state, "param_groups": given["groups"]})

    return State(f"{type(optimizer).__name__} of {[*map(len, groups)]}", values, put)


def _room(at: Any, parameter: Any = None) -> Any:
    """Return a tensor for a saved one, sharded as its parameter if they are alike; 0 for data."""
    if not hasattr(at, "properties"):
        return 0
    if parameter is not None and parameter.shape == at.size:
        return parameter.detach().to("cpu", at.properties.dtype, copy=True)
    return torch.empty(at.size, dtype=at.properties.dtype)


def _on_cpu(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)


def _why(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {in_words(cause)}"
    return str(error) if isinstance(error, GpuError) else in_words(error)


def _on_all(step: Callable[[], Any]) -> list[Any]:
    """Run a step on each rank and return all results; if one fails, raise `GpuError` on all."""
    try:
        mine = step(), ""
    except _FAILURES as error:  # raised below, on all ranks
        mine = None, _why(error)
    found: list[Any] = [mine]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, mine)
    for rank, (_, why) in enumerate(found):
        if why:
            raise GpuError(why if all(each == why for _, each in found) else f"rank {rank}: {why}")
    return [value for value, _ in found]


def _by_path(found: dict[str, State]) -> dict[str, Any]:
    return {f"{n}/{key}": value for n, each in found.items() for key, value in each.values.items()}


def save(names: list[str], directory: str) -> Checkpoint | str | None:
    """Write a checkpoint, or return why not; without a directory, only check the variables."""
    found: dict[str, State] = {}

    def look() -> list[Any]:
        found.update(states(names, shell().user_ns, {}))
        return [{k: getattr(v, "shape", 0) for k, v in s.values.items()} for s in found.values()]

    try:
        alike = zip(names, zip(*_on_all(look), strict=True), strict=True)
        if odd := [name for name, (first, *others) in alike if any(o != first for o in others)]:
            raise GpuError(f"{some(odd)}: the shapes are not the same on all ranks")
        if not directory:
            return None
        # Rank 0 creates the directory; other hosts may not see it.
        is_first = dist.get_rank() == 0
        path = _on_all(lambda: begin(directory) if is_first else None)[0]
        if not all(_on_all(path.is_dir)):
            raise GpuError(f"not all hosts see {directory}; give a directory that they share")
        values = _by_path(found)
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        dcp.save(values, checkpoint_id=path, planner=planner)
        kinds = {name: found[name].kind for name in names}
        nbytes = sum(v.numel() * v.itemsize for v in values.values() if torch.is_tensor(v))
        whole = str(path.with_suffix(""))
        checkpoint = Checkpoint(whole, kinds, nbytes, dist.get_world_size(), time.time())
        _on_all(lambda: complete(path, checkpoint) if is_first else None)
    except (GpuError, CheckpointException) as error:
        return _why(error)
    return checkpoint


def restore(directory: str) -> Checkpoint | str:
    """Read a whole checkpoint, then load it into the variables here; or return why not."""
    found: dict[str, State] = {}
    read: dict[str, Any] = {}

    def look() -> Checkpoint:
        checkpoint = find(directory)
        found.update(_fitting(checkpoint, shell().user_ns))
        return checkpoint

    def load() -> None:
        for path, value in _by_path(found).items():
            read[path] = value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that each rank reads alone
            dcp.load(read, checkpoint_id=checkpoint.path, planner=planner, no_dist=True)
        for name, each in found.items():
            if each.values.get("order", 0) != read.get(f"{name}/order", 0):
                raise GpuError(f"{name}: its parameters are not those of the checkpoint")

    try:
        checkpoint: Checkpoint = _on_all(look)[0]
        _on_all(load)
    except GpuError as error:
        return str(error)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # all or nothing
    try:
        for name, each in found.items():
            each.put({key: read[f"{name}/{key}"] for key in each.values})
    finally:
        signal.signal(signal.SIGINT, before)
    return checkpoint


def _fitting(checkpoint: Checkpoint, space: dict[str, Any]) -> dict[str, State]:
    """Return the states of the variables here; raise `GpuError` if they do not fit."""
    kinds, new_too = checkpoint.variables, ("tensor", "data")
    saved: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    metadata = dcp.FileSystemReader(checkpoint.path).read_metadata()
    for path, each in metadata.state_dict_metadata.items():
        name, _, key = path.partition("/")
        saved[name][key] = each
    found = states([n for n in kinds if n in space or kinds[n] not in new_too], space, saved)
    for name, kind in kinds.items():
        if kind in new_too and (name not in found or found[name].kind != kind):
            found[name] = _new(kind, name, space, _room(saved[name][""]))
        if found[name].kind != kind:
            raise GpuError(f"{name}: the checkpoint has {kind} and here is {found[name].kind}")
        # torch compares shapes and missing entries.
        if lacking := sorted(saved[name].keys() - found[name].values.keys()):
            raise GpuError(f"{name}: there is no {lacking[0]} here, which the checkpoint has")
    return found


class Checkpoints:
    """The checkpoints of one cluster."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._plan: tuple[list[str], str, float] | None = None  # names, directory, seconds
        self._due = 0.0
        self._calls = False

    def save(self, *names: str, to: str | None, every: str | None = None) -> Checkpoint | None:
        """Save variables of the ranks, now or after cells.

        Tensors, numbers, lists, dicts, and objects with a `state_dict`; replicated values from
        rank 0. `to` is a directory that all ranks see; the last two checkpoints stay there. `every`
        is ``"10min"``, ``"30s"``, ``"2h"``, after cells. If it raises `GpuError`, there is no new
        checkpoint.
        """
        if not names or len(set(names)) < len(names) or not to:
            raise GpuError("name each variable once, as in checkpoint net,opt --to runs/cats")
        directory = os.path.abspath(os.path.expanduser(to))
        if every is None:
            made: Checkpoint = self._call(f"save({[*names]}, {directory!r})")
            return made
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", every)
        if not found or not float(found[1]):
            raise GpuError(f"--every {every}: type --every 10min, 30s or 2h")
        self._call(f"save({[*names]}, '')")  # refuse now what would fail later
        self._plan = [*names], directory, float(found[1]) * _SECONDS[found[2]]
        self._due = time.monotonic() + self._plan[2]
        return None

    def restore(self, directory: str) -> Checkpoint:
        """Load a checkpoint into the variables of all ranks, of any number.

        Loads the last complete one in the directory, or the directory itself. Raises `GpuError` if
        a module or an optimizer is missing or has another shape; then nothing is changed.
        """
        path = os.path.abspath(os.path.expanduser(directory))
        loaded: Checkpoint = self._call(f"restore({path!r})")
        self._cluster.keep(*loaded.variables)
        return loaded

    def off(self) -> None:
        """Stop saving after cells."""
        self._plan = None

    def after_cell(self) -> None:
        """Save if it is due, and report it below the cell; never raises."""
        if self._calls or not self._plan or time.monotonic() < self._due:
            return
        names, directory, every_s = self._plan
        try:
            note = str(self._call(f"save({names}, {directory!r})"))
        except (GpuError, RanksError, KeyboardInterrupt) as error:
            note = f"no checkpoint: {error}"
        self._due = time.monotonic() + every_s
        if report := self._cluster.last_report:
            self._cluster.last_report = replace(report, notes=(*report.notes, note))

    def _call(self, call: str) -> Any:
        """Call `save` or `restore` on all ranks, as a cell; return rank 0's answer."""
        report = self._cluster.last_report
        self._calls = True
        try:
            code = f"__import__('gpumagic.cluster.checkpoints', fromlist=['save']).{call}"
            answer, *_ = self._cluster.run(code)[0] or [None]
        finally:
            self._cluster.last_report, self._calls = report, False
        if isinstance(answer, str):
            raise GpuError(answer)
        return answer
