"""Run any operator on a virtual GPU by the CPU's kernel.

It hands the CPU's kernel the CPU tensors that share the arguments' bytes, and takes the results
over onto the GPU. It stands at the dispatch key CUDA, so autograd, autocast, vmap and views, which
come before that key, work on their own and no mode has to be on.
"""

import contextlib
import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from gpumagic.virtual import events
from gpumagic.virtual.checks import INDEXING, Found, mixed, one_gpu
from gpumagic.virtual.flip import adopt, flip
from gpumagic.virtual.generators import belongs_to_cuda, cpu_draws_from
from gpumagic.virtual.parts import adopt_parts, flip_parts, in_parts, replace_sparse
from gpumagic.virtual.virtual_gpus import VirtualGpu, gpu_of
from gpumagic.virtual.wider import compute_wider, lacks_type, writes

C: Any = torch._C
CPU = C.DispatchKeySet(C.DispatchKey.CPU)
HOST = torch.device("cpu")

WAITS = frozenset(
    {
        "bincount",
        "equal",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "_unique2",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operators for which the host waits, because a value or a shape depends on the data."""
DRAWS = frozenset(
    ["native_dropout", "rrelu_with_noise", "_scaled_dot_product_flash_attention_for_cpu"]
)
"""Operators that draw random numbers and take no generator."""
NUMBER_AS_TENSOR = frozenset({"add", "sub", "mul", "div", "floor_divide"})
"""The only operators for which ``torch.ops`` takes a number where the schema says Tensor."""

_as_it_is = contextlib.nullcontext()


class KernelPlan:
    """What the kernel must know of an operator, read from its schema once."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.name: str = schema.name.split("::")[1]
        self.arguments: list[str] = [a.name for a in schema.arguments]
        self.outs = frozenset(a.name for a in schema.arguments if a.kwarg_only and writes(a))
        self.tensors = {
            a.name for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")
        }
        self.view = any(r.alias_info is not None and not writes(r) for r in schema.returns)
        self.results = len(schema.returns)
        self.generator_at = (
            self.arguments.index("generator") if "generator" in self.arguments else None
        )
        self.composite = not C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU")
        self.number_ok = self.name.rstrip("_") in NUMBER_AS_TENSOR
        self.draws = self.name in DRAWS
        self.waits = self.name in WAITS


_plans: dict[Any, KernelPlan] = {}


def kernel_of(op: Any) -> Callable[..., Any]:
    """`run` for one operator, as a function to register."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # CUDA's errors have no such frame, so IPython shall show none
        return run(op, *args, **kwargs)

    return kernel


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """`op` on the GPU that its tensors are on."""
    __tracebackhide__ = True
    plan = _plans.get(op) or _plans.setdefault(op, KernelPlan(op))
    if plan.view:  # metadata only: the CPU's kernel serves any device
        return op.redispatch(CPU, *args, **kwargs)
    found: Found = []
    above: list[str] = []  # arguments for which another key than CPU decides
    low = [
        _lower(plan, name, x, found, above)
        for name, x in zip(plan.arguments, args)  # noqa: B905 (defaults may be left out)
    ]
    low_kwargs = {name: _lower(plan, name, x, found, above) for name, x in kwargs.items()}
    gpu = one_gpu(found) if found else gpu_of(kwargs.get("device"))
    if gpu is None:
        if plan.composite:  # each operator within says itself what it thinks of the devices
            return op.redispatch(CPU, *args, **kwargs)
        gpu = mixed(op, plan.name, plan.outs, found)
    if "device" in kwargs:
        low_kwargs["device"] = HOST
    if plan.generator_at is not None:
        low = _with_generator(plan.generator_at, low, low_kwargs, gpu)
    if events.listeners and kwargs.get("output_size") is None:  # by which a shape is known
        _tell(plan, found, gpu)
    started = perf_counter_ns()
    with cpu_draws_from(gpu.generator) if plan.draws else _as_it_is:
        result = _compute(op, plan, low, low_kwargs, found, above)
    gpu.account.worked(started)
    if plan.results > 1 and type(result) is tuple:
        return tuple([_lift(plan, r, found, gpu) for r in result])
    return _lift(plan, result, found, gpu)


def _lower(plan: KernelPlan, name: str, x: Any, found: Found, above: list[str]) -> Any:
    """An argument as the CPU's kernel takes it."""
    if isinstance(x, Tensor):
        low = x
        if name in plan.outs and any(x is tensor for _, tensor, _ in found):
            low = next(other for _, tensor, other in found if x is tensor)
        elif x.is_cuda:
            if in_parts(x):
                low = flip_parts(x)
                above.append(name)
            elif name in plan.outs and not x.numel():
                low = torch.empty(0, dtype=x.dtype)
            else:
                low = flip(x)
        found.append((name, x, low))
        return low
    if isinstance(x, (list, tuple)):
        if x and not isinstance(x[0], int):
            return [_lower(plan, name, y, found, above) for y in x]
    elif name in plan.tensors and isinstance(x, (int, float, complex)):
        above.append(name)  # C++ hands a "wrapped number" tensor to Python as a number
    return x


def _with_generator(
    at: int, low: list[Any], low_kwargs: dict[str, Any], gpu: VirtualGpu
) -> list[Any]:
    given = low[at] if at < len(low) else low_kwargs.get("generator")
    if given is None:
        low_kwargs["generator"] = gpu.generator
        return low[:at]
    if not belongs_to_cuda(given):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    return low


def _tell(plan: KernelPlan, found: Found, gpu: VirtualGpu) -> None:
    mask = plan.name in INDEXING and any(
        name == "indices" and tensor.dtype is torch.bool for name, tensor, _ in found
    )
    if plan.waits or mask:
        events.emit("sync", plan.name, gpu.device, HOST, 8)


def _compute(
    op: Any,
    plan: KernelPlan,
    low: list[Any],
    low_kwargs: dict[str, Any],
    found: Found,
    above: list[str],
) -> Any:
    __tracebackhide__ = True
    call = op if above else functools.partial(op.redispatch, CPU)
    if above and not plan.number_ok:
        low = [
            torch.tensor(x, dtype=torch.result_type(found[0][1], x))
            if name in above and isinstance(x, (int, float, complex))
            else x
            for name, x in zip(plan.arguments, low)  # noqa: B905 (defaults may be left out)
        ]
    try:
        return call(*low, **low_kwargs)
    except RuntimeError as error:
        if lacks_type(error):
            return compute_wider(op, call, low, low_kwargs, error)
        if not plan.outs or "not resizable" not in str(error):
            raise
    # An out= that is too small for its result: the CPU computes into new bytes instead.
    for n, (name, tensor, _) in enumerate(found):
        if name in plan.outs:
            low_kwargs[name] = torch.empty(0, dtype=tensor.dtype)
            found[n] = (name, tensor, low_kwargs[name])
    return call(*low, **low_kwargs)


def _lift(plan: KernelPlan, result: Any, found: Found, gpu: VirtualGpu) -> Any:
    """A result of the CPU's kernel on `gpu`: the argument that it is, or a fresh tensor."""
    if isinstance(result, (list, tuple)):
        return type(result)([_lift(plan, r, found, gpu) for r in result])
    if not isinstance(result, Tensor):
        return result
    for name, tensor, low in found:
        if low is result:
            if result.layout is not torch.strided:
                return replace_sparse(tensor, adopt_parts(result.clone(), gpu))
            if name in plan.outs and low.shape != tensor.shape:
                _resize_out(tensor, low, gpu)
            return tensor
    if in_parts(result):
        return adopt_parts(result, gpu)
    pointer = result.data_ptr()
    for _, _, low in found:  # an out= may have the bytes of an argument before it
        if pointer and low.layout is torch.strided and low.data_ptr() == pointer:
            return adopt(result.clone(), gpu)  # an alias that the schema does not tell of
    return adopt(result, gpu)


def _resize_out(out: Tensor, low: Tensor, gpu: VirtualGpu) -> None:
    """The operator gave an ``out=`` its shape: within the bytes that it has, or in new ones."""
    if out.numel() and low.data_ptr() == out.data_ptr():
        out.set_(out.untyped_storage(), out.storage_offset(), low.shape, low.stride())
    else:
        new = adopt(low, gpu)
        out.set_(new.untyped_storage(), 0, low.shape, low.stride())
