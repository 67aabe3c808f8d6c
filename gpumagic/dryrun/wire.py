"""Count what a rank would send to the others: each collective, and the bytes of its tensors."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from gpumagic.dryrun.result import Collective
from gpumagic.dryrun.unknown import Stopped

C: Any = torch._C
_c10d: Any = getattr(dist, "distributed_c10d", None)
# By a part of their operators' names, the first that fits.
_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "send", "recv")},
}
_OF_PARTS = ("all_gather", "gather", "scatter")  # given what is one rank's
_INTO_ANOTHER = ("all_gather", "reduce_scatter", "all_to_all", "gather")
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_running: set[Any] = set()  # C++ keeps of a work in Python no more than its own half alive


class Wire:
    """Adds up collectives by their kind and the size of their group."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[int]] = {}

    def takes(self, func: Any) -> bool:
        """Whether an operator is one of `torch.distributed`."""
        return getattr(func, "namespace", None) in _NAMESPACES

    def note(self, func: Any, name: str, args: tuple[Any, ...]) -> None:
        """Count an operator that is about to run; one that would really send ends the dry run."""
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

    def collectives(self) -> tuple[Collective, ...]:
        """What was counted, the most bytes first."""
        found = (Collective(*key, *count) for key, count in self._found.items())
        return tuple(sorted(found, key=lambda c: (-c.nbytes, c.name)))


def with_value(out: Any, value: Any) -> Any:
    """What an operator gave, whose work has tensors in its future: the fake group's has none."""

    def done(item: Any) -> Any:
        if not isinstance(item, C.ScriptObject):
            return item
        return _Done.boxed(_Done(value))

    return tree_map(done, out)


def _group(args: tuple[Any, ...]) -> Any:
    """The process group that an operator is given, itself or by its name."""
    for arg in args:
        if isinstance(arg, C.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
    name = next(arg for arg in reversed(args) if isinstance(arg, str))
    return _c10d._resolve_process_group(name)


_Work: Any = getattr(dist, "Work", object)  # a build of torch may have none


class _Done(_Work):  # type: ignore[misc]
    """A collective that has ended."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value
        _running.add(self)

    def wait(self, *timeout: Any) -> bool:
        _running.discard(self)
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        _running.discard(self)
        future: Any = torch.futures.Future()
        future.set_result(self._value)
        return future
