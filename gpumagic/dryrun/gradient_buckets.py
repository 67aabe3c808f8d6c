"""Reduce gradients in buckets, as DistributedDataParallel's part in C++ does.

That part asks the driver for times on a build for CUDA, which a forked child must not do. Here is
what of it holds memory and sends: buckets from the start, each reduced when its last gradient is
there, and anew in the order of the first backward pass.
"""

import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpumagic.dryrun.unknown import Stopped

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
