"""Run any operator on a virtual GPU by the CPU's kernel.

It hands the CPU's kernel the CPU tensors that share the arguments' bytes, and takes the results
over onto the GPU. It stands at the dispatch key CUDA, so autograd, autocast, vmap and views, which
come before that key, work on their own and no mode has to be on.
"""

import functools
from collections.abc import Callable
from itertools import repeat
from math import prod
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from gpumagic.usercode.unseen import leave_out_ours
from gpumagic.virtual import events
from gpumagic.virtual.checks import INDEXING, Found, mixed, one_gpu
from gpumagic.virtual.flip import adopt, flip, flip_plain
from gpumagic.virtual.generators import belongs_to_cuda, cpu_draws_from
from gpumagic.virtual.memory_account import SMALL, refuse_as_cuda
from gpumagic.virtual.parts import adopt_parts, flip_parts, in_parts, replace_sparse
from gpumagic.virtual.virtual_gpus import VirtualGpu, gpu_of
from gpumagic.virtual.wider import compute_wider, lacks_type, writes

C: Any = torch._C
CPU = C.DispatchKeySet(C.DispatchKey.CPU)
HOST = torch.device("cpu")
LAZY = ("Conjugate", "Negative")
"""The dispatch keys of views that C++ turns into plain tensors before any kernel sees them."""

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


class KernelPlan:
    """What the kernel must know of an operator, read from its schema when it is first called."""

    def __init__(self, op: Any, dense: bool) -> None:
        self.op = op
        self.dense = dense
        self.name: str = op._schema.name.split("::")[1]
        self.cpu = on_metadata(op, CPU)

    def __getattr__(self, missing: str) -> Any:
        arguments, full = self.op._schema.arguments, self.op.name()
        self.arguments = [a.name for a in arguments]
        self.written = frozenset(a.name for a in arguments if writes(a))
        self.outs = frozenset(a.name for a in arguments if a.kwarg_only and writes(a))
        tensors = ("Tensor", "Optional[Tensor]")
        self.tensors = frozenset(a.name for a in arguments if str(a.type) in tensors)
        generator = "generator" in self.arguments
        self.generator_at = self.arguments.index("generator") if generator else None
        self.composite = not C._dispatch_has_kernel_for_dispatch_key(full, "CPU")
        self.number_ok = self.name.rstrip("_") in NUMBER_AS_TENSOR
        self.draws = self.name in DRAWS
        self.waits = self.name in WAITS
        self.special = self.draws or generator
        # For every other operator C++ has made plain tensors of conjugate and negative views.
        lazy = any(C._dispatch_has_kernel_for_dispatch_key(full, key) for key in LAZY)
        self.flip = flip if lazy else flip_plain
        self.plain = self.dense and not self.outs  # each of its tensors is flipped as it is
        self.fresh = self.plain and _makes_one_tensor(self.op)
        return object.__getattribute__(self, missing)


def _makes_one_tensor(op: Any) -> bool:
    """Whether the CPU's kernel gives a new tensor always: never an argument, nor its bytes."""
    returns, by_element = op._schema.returns, torch.Tag.pointwise in op.tags
    own = C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU")
    one = len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None
    return bool(by_element and own and one)


def on_metadata(op: Any, keys: Any) -> Callable[..., Any]:
    """The kernel at `keys` as it is, for operators that do not touch bytes."""
    return functools.partial(op._handle.redispatch_boxed, keys)


@functools.cache
def kernel_of(op: Any, dense: bool = True) -> Callable[..., Any]:
    """A function to register that runs `op` on the GPU of its tensors; `dense`: none in parts."""
    if any(r.alias_info is not None and not writes(r) for r in op._schema.returns):
        return on_metadata(op, CPU)  # of a view: the CPU's kernel serves any device
    return functools.partial(_run, KernelPlan(op, dense))


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """`op` on the GPU that its tensors are on."""
    __tracebackhide__ = True
    return kernel_of(op)(*args, **kwargs)


def _run(plan: KernelPlan, /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True  # CUDA's errors have no such frame, so nobody shall see one
    try:
        low: list[Any] = []
        found: Found = []
        above: list[str] = []  # arguments for which another key than CPU decides
        plain = plan.plain
        for name, x in zip(plan.arguments, args):  # noqa: B905 (defaults may be left out)
            if plain and isinstance(x, Tensor) and x.is_cuda:  # as `_lower` does, without a call
                found.append((name, x, flipped := plan.flip(x)))
                low.append(flipped)
            else:
                low.append(_lower(plan, name, x, found, above))
        low_kwargs = {}
        for name in kwargs:
            low_kwargs[name] = _lower(plan, name, kwargs[name], found, above)
        gpu = one_gpu(found) if found else _gpu_with_room(plan, args, kwargs)
        if gpu is None:
            if plan.composite:  # each operator within says itself what it thinks of the devices
                return plan.cpu(*args, **kwargs)
            gpu = mixed(plan.op, plan.name, plan.outs, found)
        call = plan.cpu
        if above or kwargs or plan.special:
            call = _prepare(plan, low, low_kwargs, found, above, gpu)
        if events.listeners and kwargs.get("output_size") is None:  # by which a shape is known
            _tell(plan, found, gpu)
        started = perf_counter_ns()
        try:
            result = call(*low, **low_kwargs)
        except RuntimeError as error:
            refuse_as_cuda(error, gpu.account)
            result = _call_again(plan, call, low, low_kwargs, found, error)
        gpu.account.worked(started)
        return adopt(result, gpu) if plan.fresh else _lift(plan, result, found, gpu)
    except BaseException as error:
        leave_out_ours(error)
        raise


def _gpu_with_room(plan: KernelPlan, args: Any, kwargs: dict[str, Any]) -> VirtualGpu:
    """The GPU on which an operator makes a tensor of none, once that is known to fit there."""
    __tracebackhide__ = True
    gpu = gpu_of(kwargs.get("device"))
    size = next((x for x in args if isinstance(x, (list, tuple))), None)
    if size and prod(size) > SMALL:
        gpu.account.require(size, kwargs.get("dtype"))
    return gpu


def _lower(plan: KernelPlan, name: str, x: Any, found: Found, above: list[str]) -> Any:
    """An argument as the CPU's kernel takes it."""
    if isinstance(x, Tensor):
        low = x
        if x.is_cuda:
            plain = plan.plain or (plan.dense and name not in plan.outs)
            low = plan.flip(x) if plain else _lower_apart(plan, name, x, found, above)
        found.append((name, x, low))
        return low
    if isinstance(x, (list, tuple)):
        if x and not isinstance(x[0], int):
            return [_lower(plan, name, y, found, above) for y in x]
    elif name in plan.tensors and isinstance(x, (int, float, complex)):
        above.append(name)  # C++ hands a "wrapped number" tensor to Python as a number
    return x


def _lower_apart(plan: KernelPlan, name: str, x: Tensor, found: Found, above: list[str]) -> Tensor:
    """A tensor that is an ``out=``, or may be sparse or nested."""
    if name in plan.outs:
        for _, tensor, low in found:
            if x is tensor:
                return low
    if in_parts(x):
        above.append(name)
        return flip_parts(x)
    if name in plan.outs and not x.numel():
        return torch.empty(0, dtype=x.dtype)
    return flip(x)


def _prepare(
    plan: KernelPlan,
    low: list[Any],
    low_kwargs: dict[str, Any],
    found: Found,
    above: list[str],
    gpu: VirtualGpu,
) -> Callable[..., Any]:
    """What is to be called with `low` and `low_kwargs`, which are changed for it."""
    if "device" in low_kwargs:
        low_kwargs["device"] = HOST
    if plan.generator_at is not None:
        rest = low[plan.generator_at :] or [low_kwargs.get("generator")]
        if rest[0] is None:
            low_kwargs["generator"] = gpu.generator
            del low[plan.generator_at :]
        elif not belongs_to_cuda(rest[0]):
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if above and not plan.number_ok:
        for n, (name, x) in enumerate(zip(plan.arguments, low)):  # noqa: B905 (as above)
            if name in above and isinstance(x, (int, float, complex)):
                low[n] = torch.tensor(x, dtype=torch.result_type(found[0][1], x))
    call = plan.op if above else plan.cpu
    return cpu_draws_from(gpu.generator)(call) if plan.draws else call


def _tell(plan: KernelPlan, found: Found, gpu: VirtualGpu) -> None:
    mask = plan.name in INDEXING and any(
        name == "indices" and tensor.dtype is torch.bool for name, tensor, _ in found
    )
    if plan.waits or mask:
        events.emit("sync", plan.name, gpu.device, HOST, 8)


def _call_again(
    plan: KernelPlan,
    call: Callable[..., Any],
    low: list[Any],
    low_kwargs: dict[str, Any],
    found: Found,
    error: RuntimeError,
) -> Any:
    """After `error`: in a wider type, or into new bytes where those written to are too few."""
    __tracebackhide__ = True
    if lacks_type(error):
        return compute_wider(plan.op, call, low, low_kwargs, error)
    if "not resizable" not in str(error):
        raise error
    anew = {}
    for n, (name, tensor, old) in enumerate(found):
        if name in plan.written:
            # `old` has its new shape already, and too few bytes for it.
            new = torch.empty(0, dtype=old.dtype) if name in plan.outs else flip(tensor).clone()
            found[n], anew[id(old)] = (name, tensor, new), new
    low = [anew.get(id(x), x) for x in low]
    return call(*low, **{name: anew.get(id(x), x) for name, x in low_kwargs.items()})


def _lift(plan: KernelPlan, result: Any, found: Found, gpu: VirtualGpu, depth: int = 3) -> Any:
    """A result of the CPU's kernel on `gpu`: the argument that it is, or a fresh tensor."""
    if not isinstance(result, Tensor):
        if isinstance(result, (list, tuple)):
            # No comprehension: in some versions of Python that is one call more.
            same = map(repeat, (found, gpu, depth + 1))
            return type(result)([*map(_lift, repeat(plan), result, *same)])
        return result
    for _, tensor, low in found:
        if low is result:
            if not plan.dense and result.layout is not torch.strided:
                return replace_sparse(tensor, adopt_parts(result.clone(), gpu))
            if (plan.dense or not result.is_nested) and low.shape != tensor.shape:
                _resize(tensor, low, gpu)
            return tensor
    if in_parts(result):
        return adopt_parts(result, gpu)
    pointer = result.data_ptr()
    for _, _, low in found:  # an out= may have the bytes of an argument before it
        if (plan.dense or low.layout is torch.strided) and low.data_ptr() == pointer and pointer:
            return adopt(result.clone(), gpu, depth)  # an alias that the schema does not tell of
    return adopt(result, gpu, depth)


def _resize(written: Tensor, low: Tensor, gpu: VirtualGpu) -> None:
    """The operator gave its shape to what it wrote: within the bytes there, or in new ones."""
    if written.numel() and low.data_ptr() == written.data_ptr():
        written.set_(written.untyped_storage(), written.storage_offset(), low.shape, low.stride())
    else:
        new = adopt(low, gpu)
        written.set_(new.untyped_storage(), 0, low.shape, low.stride())
