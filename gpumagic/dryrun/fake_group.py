"""Let a forked child be one rank of many, alone: its group sends nothing and waits for none.

Guarantees: `torch.distributed` answers as it would in that rank of a group that a launcher has
started, whatever group the process had before; code that makes one gets this one. What other ranks
would send is taken to be what this one sends.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

import torch.distributed as dist

from gpumagic.dryrun.fakes import suspended
from gpumagic.dryrun.wire import DryLogger, DryReducer
from gpumagic.errors import GpuError

GPUS_OF_A_HOST = 8
"""Of how many GPUs a host of cards that are not here is taken to be."""
_LEFT_OUT = (
    *("init_process_group", "destroy_process_group", "monitored_barrier", "broadcast_object_list"),
    "_verify_params_across_processes",  # compares numbers
)
_kept: list[Any] = []


@dataclass(frozen=True)
class Rank:
    """One rank of a group, as a launcher numbers them."""

    number: int
    world: int
    of_a_host: int

    @property
    def local(self) -> int:
        """Its number among those of its host, which is also its GPU's."""
        return self.number % self.of_a_host


def can_join() -> None:
    """Return if this build of torch has process groups; else `GpuError`."""
    if not dist.is_available():
        raise GpuError("a dry run of many ranks needs torch.distributed, which this build lacks")
    # What it imports reads files, and starts more than a forked child may.
    import torch.distributed.device_mesh
    import torch.distributed.tensor
    import torch.distributed.utils
    import torch.nn.parallel.distributed
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend


def join(rank: Rank, namespace: dict[str, Any]) -> None:
    """In a forked child, before the code in `namespace` runs: be that rank until the end."""
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
    _replace(namespace)
    for kind in (dist.device_mesh.DeviceMesh, _sharding_prop.ShardingPropagator):
        _set_modes_aside(kind)


def _leave() -> None:
    """Forget the groups that the process has, whose threads a fork has left behind."""
    c10d: Any = dist.distributed_c10d
    if not dist.is_initialized():
        return
    world = c10d._world
    _kept.extend(world.pg_map)  # to end one would be to wait for its threads
    c10d._update_default_pg(None)
    of_groups = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
    for name in (*of_groups, "tags_to_pg", "pg_coalesce_state"):
        getattr(world, name).clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0


def _replace(namespace: dict[str, Any]) -> None:
    """Replace what would reach for other ranks, or for what only data could tell."""
    group = dist.new_group

    def new_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
        return group(ranks)

    answers: dict[str, Any] = {
        **dict.fromkeys(_LEFT_OUT, _nothing),
        "new_group": new_group,
        "all_gather_object": _all_gather_object,
        "gather_object": _gather_object,
        "scatter_object_list": _scatter_object_list,
        "init_device_mesh": _suspending(dist.device_mesh.init_device_mesh),
        "Reducer": DryReducer,
        "_register_comm_hook": DryReducer.register_hook,
        "Logger": DryLogger,
    }
    new = {id(getattr(dist, name)): answer for name, answer in answers.items()}
    modules = [vars(m) for m in [*sys.modules.values()] if isinstance(m, ModuleType)]
    for space in (namespace, *modules):  # wherever it was imported to
        for name, value in list(space.items()):
            if id(value) in new:
                space[name] = new[id(value)]


def _set_modes_aside(kind: Any) -> None:
    """A mesh is a tensor of ranks, which are known; shapes are found out on tensors without data
    that nobody holds."""
    for name, value in list(vars(kind).items()):
        if isinstance(value, FunctionType):
            setattr(kind, name, _suspending(value))
        elif isinstance(value, property) and value.fget is not None:
            setattr(kind, name, property(_suspending(value.fget)))


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


def _gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **options: Any
) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *args: Any,
    **options: Any,
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank()]
