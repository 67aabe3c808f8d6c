"""Let a forked child be one rank of many: it joins torch's fake process group, which sends nothing.

Guarantees: `torch.distributed` answers as in that rank of a group that a launcher has started,
whatever group the process had before. What other ranks would send is taken to be what this rank
sends. DistributedDataParallel's buckets count as one copy of the gradients, reduced once in each
backward pass: its own C++ would ask the driver for times.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from gpumagic.dryrun.fakes import Stopped, suspended
from gpumagic.dryrun.result import Collective
from gpumagic.errors import GpuError

GPUS_OF_A_HOST = 8
"""The number of GPUs that a host has, for cards that are not here."""
_c10d: Any = getattr(dist, "distributed_c10d", None)
_groups_before: list[Any] = []


@dataclass(frozen=True)
class Rank:
    """One rank of a group, as a launcher numbers them."""

    number: int
    world: int
    of_a_host: int

    @property
    def local(self) -> int:
        """Its number on its host, which is also its GPU's."""
        return self.number % self.of_a_host


def can_join(reads: list[tuple[str, Any]]) -> None:
    """Raise `GpuError` where torch has no process groups, or a variable belongs to another one."""
    if not dist.is_available():
        raise GpuError("a dry run of many ranks needs torch.distributed, which this build lacks")
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, value in reads:
        if isinstance(value, (DistributedDataParallel, sharded)):
            raise GpuError(f"{name} was wrapped for another group; wrap it in the code to follow")
    # What these import reads files, and starts more than a forked child may.
    import torch.distributed.device_mesh
    import torch.distributed.tensor
    import torch.distributed.utils
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend


def join(rank: Rank, namespace: dict[str, Any], note: Callable[[str], object]) -> None:
    """Become that rank until the end, in a forked child, before the code in `namespace` runs."""
    environment = {
        "RANK": rank.number,
        "WORLD_SIZE": rank.world,
        "LOCAL_RANK": rank.local,
        "LOCAL_WORLD_SIZE": min(rank.of_a_host, rank.world),
        "GROUP_RANK": rank.number // rank.of_a_host,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    _leave()
    from torch.distributed.tensor import _sharding_prop
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank.number, world_size=rank.world)
    _replace(namespace, note)
    # A mesh is a tensor of ranks, which are known; shapes are computed on tensors without data.
    for kind in (dist.device_mesh.DeviceMesh, _sharding_prop.ShardingPropagator):
        for name, method in list(vars(kind).items()):
            if isinstance(method, FunctionType):
                setattr(kind, name, _suspending(method))


def _leave() -> None:
    """Forget the groups that the process has, whose threads the fork has left behind."""
    if not dist.is_initialized():
        return
    world = _c10d._world
    _groups_before.extend(world.pg_map)  # the end of a group would wait for its threads
    _c10d._update_default_pg(None)
    of_groups = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
    for name in (*of_groups, "tags_to_pg", "pg_coalesce_state"):
        getattr(world, name).clear()
    _c10d._unregister_all_process_groups()
    world.group_count = 0


def _replace(namespace: dict[str, Any], note: Callable[[str], object]) -> None:
    """Replace the functions that would reach other ranks or need data, wherever imported."""
    make_group = dist.new_group
    left_out = ("init_process_group", "destroy_process_group", "broadcast_object_list")
    answers: dict[str, Any] = {
        **dict.fromkeys((*left_out, "_verify_params_across_processes"), _nothing),
        "new_group": lambda ranks=None, *args, **options: make_group(ranks, backend="fake"),
        "all_gather_object": _all_gather_object,
        "init_device_mesh": _suspending(dist.device_mesh.init_device_mesh),
        "Reducer": partial(_OneCopy, note),
        "Logger": _Silent,
        **dict.fromkeys(
            ("_register_comm_hook", "_register_builtin_comm_hook"),
            lambda *args: note("the communication hook was left out: it may send less"),
        ),
    }
    new = {id(getattr(dist, name)): answer for name, answer in answers.items()}
    modules = [vars(m) for m in [*sys.modules.values()] if isinstance(m, ModuleType)]
    for space in (namespace, *modules):
        for name, value in list(space.items()):
            if id(value) in new:
                space[name] = new[id(value)]


def _suspending(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def suspending(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            return function(*args, **kwargs)

    return suspending


def _nothing(*args: Any, **options: Any) -> None:
    pass


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


class _Silent:
    """Replace `torch.distributed.Logger`: every method does nothing."""

    def __init__(self, *args: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _nothing


_NOT_FOLLOWED = ("_set_mixed_precision_param_dtype", "_get_zeros_like_grad_buckets")


class _OneCopy(_Silent):
    """Replace `torch.distributed.Reducer`: one bucket for the gradients of each dtype."""

    def __init__(
        self,
        note: Callable[[str], object],
        params: list[Tensor],
        indices: object,
        limits: object,
        group: Any,
        sparse: list[bool],
        cap: int = 0,
        find_unused: bool = False,
        as_views: bool = False,
        *options: object,
    ) -> None:
        if any(sparse):
            raise Stopped("sparse gradients of DistributedDataParallel have no dry run")
        note("DistributedDataParallel's buckets count as one copy of the gradients, in one call")
        self._group, alike = group, dict[Any, list[Tensor]]()
        for param in params:
            alike.setdefault((param.dtype, param.device), []).append(param)
        self._buckets = []
        for (dtype, device), those in alike.items():
            sizes = [param.numel() for param in those]
            self._buckets.append(torch.empty(sum(sizes), dtype=dtype, device=device))
            if as_views:
                for param, part in zip(those, self._buckets[-1].split(sizes), strict=True):
                    use = partial(_use_as_gradient, part.view_as(param))
                    param.register_post_accumulate_grad_hook(use)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_FOLLOWED:
            raise Stopped(f"{name.strip('_')} of DistributedDataParallel has no dry run")
        return super().__getattr__(name)

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Count the reduction of the backward pass that follows."""
        for bucket in self._buckets:
            dist.all_reduce(bucket, group=self._group)


def _use_as_gradient(view: Tensor, param: Tensor) -> None:
    param.grad = view


# By a part of an operator's name, the first that fits.
_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "send", "recv")},
}
_OF_PARTS = ("all_gather", "gather", "scatter")  # whose input is one rank's part
_INTO_ANOTHER = ("all_gather", "reduce_scatter", "all_to_all", "gather")  # output before input


class Collectives:
    """Add up collectives by kind and size of the group."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[int]] = {}

    def count(self, func: Any, name: str, args: tuple[Any, ...]) -> None:
        """Count an operator about to run if it sends; `Stopped` if it would really send."""
        if getattr(func, "namespace", None) not in ("c10d", "_c10d_functional", "_dtensor"):
            return
        name = name.replace("_", "")
        kind = next((_KINDS[part] for part in _KINDS if part in name), None)
        if kind is None:  # a barrier, a wait
            return
        group = _group(args)
        if _c10d._world.pg_map.get(group, ("",))[0] != "fake":
            raise Stopped(
                f"{kind} in a process group that there was before: a dry run sends nothing"
            )
        ranks = int(group.size())
        tensors = args[func.namespace == "c10d" and kind in _INTO_ANOTHER]
        nbytes = sum(t.numel() * t.element_size() for t in tree_leaves(tensors))
        count = self._found.setdefault((kind, ranks), [0, 0])
        count[0] += 1
        count[1] += nbytes * (ranks if kind in _OF_PARTS else 1)

    def found(self) -> tuple[Collective, ...]:
        """Return what was counted, the most bytes first."""
        found = (Collective(*key, *count) for key, count in self._found.items())
        return tuple(sorted(found, key=lambda c: (-c.nbytes, c.name)))


def _group(args: tuple[Any, ...]) -> Any:
    """Return the process group among an operator's arguments, where it is an object or a name."""
    for arg in args:
        if isinstance(arg, torch._C.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
    return _c10d._resolve_process_group(next(a for a in reversed(args) if isinstance(a, str)))
