"""Count what a rank would send to the others: collectives, and gradients in buckets.

DistributedDataParallel's C++ asks the driver for times, which a forked child must not do; its
buckets are repeated here: made at the start, reduced when the last gradient of each is ready, and
made again in the order of the first backward pass.
"""

import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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


_MIB = 2**20


class Bucket:
    """Gradients that are reduced at once; a communication hook asks it as torch's GradBucket."""

    def __init__(self, index: int, params: list[Tensor]) -> None:
        self._index, self._params = index, params
        sizes = [param.numel() for param in params]
        self._buffer = torch.empty(sum(sizes), dtype=params[0].dtype, device=params[0].device)
        parts = self._buffer.split(sizes)
        self.views = [part.view(p.shape) for part, p in zip(parts, params, strict=True)]
        self.pending = len(params)
        self.last = False

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        return self.views

    def parameters(self) -> list[Tensor]:
        return self._params

    def is_last(self) -> bool:
        return self.last


class DryReducer:
    """Stands for `torch.distributed.Reducer`, whose arguments it is given in their order."""

    def __init__(
        self,
        params: list[Tensor],
        bucket_indices: list[list[int]],
        limits: list[int],
        group: Any,
        sparse: list[bool],
        cap: int = 25 * _MIB,
        find_unused: bool = False,
        as_views: bool = False,
        names: object = None,
        first_cap: int = _MIB,
        *options: object,
    ) -> None:
        self._params, self._group, self._sparse = params, group, sparse or [False] * len(params)
        self._caps, self._as_views = [first_cap, cap], as_views
        self._hook: tuple[Any, Any] | None = None
        self._expecting = self._rebuilt = False
        self._order: list[int] = []  # in which gradients were ready
        self._unused: set[int] = set()
        self._used = None
        if find_unused:
            device = params[0].device
            self._used = torch.empty(len(params), dtype=torch.int32, device=device)
        self._allocate(bucket_indices)
        # Not by itself: who lets go of the module lets go of its buckets.
        reducer = weakref.ref(self)
        for number, param in enumerate(params):
            param.register_post_accumulate_grad_hook(partial(_ready, reducer, number))

    def _allocate(self, bucket_indices: list[list[int]]) -> None:
        self._buckets: list[Bucket] = []  # the old ones are let go first
        self._views: dict[int, tuple[Bucket, Tensor]] = {}
        for index, numbers in enumerate(bucket_indices):
            bucket = Bucket(index, [self._params[n] for n in numbers])
            self._buckets.append(bucket)
            self._views |= {n: (bucket, v) for n, v in zip(numbers, bucket.views, strict=True)}
        self._buckets[-1].last = True

    # -- what DistributedDataParallel calls
    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        self._expecting = True
        for bucket in self._buckets:
            bucket.pending = len(bucket.parameters())
        self._unused = self._not_reached(outputs) if outputs else set()

    def _rebuild_buckets(self) -> bool:
        if self._rebuilt or self._used is not None or len(self._order) < len(self._params):
            return False
        self._rebuilt = True
        order, gradients = self._order, [param.grad for param in self._params]
        indices, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
            [self._params[n] for n in order], self._caps, [self._sparse[n] for n in order], order
        )
        self._allocate(indices)
        if self._as_views:
            for number, gradient in enumerate(gradients):
                if gradient is not None:
                    self._params[number].grad = self._views[number][1]
        # The first rank tells the others the order, and how many are in each.
        device = self._params[0].device
        for length in (len(order) + 1, len(indices)):
            dist.broadcast(torch.empty(length, dtype=torch.int32, device=device), 0, self._group)
        return True

    def register_hook(self, state: Any, hook: Any) -> None:
        """Reduce buckets by a communication hook."""
        self._hook = state, hook

    def __getattr__(self, name: str) -> Any:
        if name in _OF_NO_CONSEQUENCE:
            return lambda *args: None
        raise Stopped(f"{name} of DistributedDataParallel's reducer has no dry run")

    # -- in the backward pass
    def ready(self, number: int) -> None:
        """The gradient of a parameter is there."""
        if not self._expecting:  # no_sync()
            return
        if len(self._order) < len(self._params):
            self._order.append(number)
        unused, self._unused = self._unused, set()
        for each in (*sorted(unused), number):
            self._put(each)

    def _put(self, number: int) -> None:
        param, (bucket, view) = self._params[number], self._views[number]
        if param.grad is None:
            view.zero_()
        elif self._sparse[number]:
            raise Stopped("a sparse gradient of DistributedDataParallel has no dry run")
        elif self._as_views:
            param.grad = view
        bucket.pending -= 1
        if bucket.pending == 0:
            self._reduce(bucket)
        if all(each.pending == 0 for each in self._buckets):
            self._expecting = False
            if self._used is not None:
                dist.all_reduce(self._used, group=self._group)

    def _reduce(self, bucket: Bucket) -> None:
        if self._hook is None:
            dist.all_reduce(bucket.buffer(), group=self._group)
            return
        state, hook = self._hook
        hook(state, bucket).wait()

    def _not_reached(self, outputs: list[Tensor]) -> set[int]:
        """The parameters that lead to none of the outputs."""
        nodes = [output.grad_fn for output in outputs]
        seen, reached = set[Any](), set[int]()
        while nodes:
            node: Any = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            reached.add(id(getattr(node, "variable", None)))
            nodes += [following for following, _ in node.next_functions]
        return {n for n, param in enumerate(self._params) if id(param) not in reached}


def _ready(reducer: Any, number: int, param: Tensor) -> None:
    found = reducer()
    if found is not None:
        found.ready(number)


_OF_NO_CONSEQUENCE = frozenset(
    (
        *("prepare_for_forward", "set_logger", "_set_static_graph", "_delay_all_reduce"),
        *("_push_all_rebuilt_params", "_set_ddp_runtime_logging_sample_rate"),
        *("_remove_autograd_hooks", "_check_reducer_finalized", "_set_optimizer_in_backward"),
        *("_install_post_backward_futures", "_reset_state", "_set_forward_pass_work_handle"),
    )
)


class DryLogger:
    """Stands for `torch.distributed.Logger`, which logs nothing here."""

    def __init__(self, reducer: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None
