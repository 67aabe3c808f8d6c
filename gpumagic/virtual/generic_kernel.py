"""Run any operator on a virtual GPU by the CPU's kernel.

It gives the CPU's kernel CPU tensors that share the arguments' bytes, and takes the results over
onto the GPU. What it must know of an operator is read from its schema. It is registered at the
dispatch key CUDA; autograd, autocast, vmap and views come before that key and work as ever.
"""

import functools
import re
from collections.abc import Callable
from itertools import repeat
from math import prod
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from gpumagic.ledger.copy_kernels import INDEXING, WAITS, reads
from gpumagic.usercode.files import leave_out_ours
from gpumagic.virtual import asserts, checks
from gpumagic.virtual.checks import Found, mixed, one_gpu
from gpumagic.virtual.flip import (
    adopt,
    adopt_parts,
    flip,
    flip_parts,
    flip_plain,
    in_parts,
    lacks_type,
    replace_sparse,
    writes,
)
from gpumagic.virtual.scratch import rule_of, temporary_bytes
from gpumagic.virtual.streams import belongs_to_cuda, cpu_draws_from
from gpumagic.virtual.virtual_gpus import GPUS, SMALL, VirtualGpu, gpu_of, refuse_as_cuda

C: Any = torch._C
CPU = C.DispatchKeySet(C.DispatchKey.CPU)
META = C.DispatchKeySet(C.DispatchKey.Meta)
_LARGEST_NUMBER = 16  # bytes
ONE, MANY = "Tensor", "Tensors"
LAZY = ("Conjugate", "Negative")
"""The dispatch keys of views that C++ turns into plain tensors before any kernel sees them."""

DRAWS = frozenset(["native_dropout", "rrelu_with_noise"])
"""Operators that draw random numbers and take no generator."""
SHARING = frozenset(
    [
        *("_embedding_bag", "_embedding_bag_forward_only", "lu_unpack", "channel_shuffle"),
        *("native_channel_shuffle", "_slow_conv2d_forward", "slow_conv3d_forward", "lift"),
    ]
)
"""Operators that may give what was there, as torchgen's gen_variable_type.py has them, and what
these call: torch's debug builds hold that every other, unless composite, gives new tensors."""
# Those whose results may be in parts.
_APART = re.compile("sparse|nested|mkldnn|quantize|_embedding_bag_backward")
PRODUCTS = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), -1),
    **dict.fromkeys(("_cdist_forward", "_euclidean_dist"), -2),
}
"""Products, with the dim of the last tensor that becomes the last dim of the result."""
NUMBER_AS_TENSOR = frozenset({"add", "sub", "mul", "div", "floor_divide"})
"""The only operators for which ``torch.ops`` takes a number where the schema says Tensor."""


class KernelPlan:
    """Keep what the kernel needs of an operator's schema, read when it is first called."""

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
        self.fresh = self.plain and _makes_all_new(self.op)
        self.kinds = [_kind(a) for a in arguments if not a.kwarg_only]
        several = self.kinds.count(ONE) > 1
        self.grows = self.fresh and several and torch.Tag.pointwise in self.op.tags
        self.grows |= self.name in PRODUCTS
        self.usual = self.plain and not self.special and not self.waits
        self.usual &= self.name not in INDEXING and "device" not in self.arguments
        self.usual &= not any("List[Optional[T" in str(a.type) for a in arguments)
        self.in_place = bool(self.written) and arguments[0].name in self.written
        self.scratch = rule_of(self.name)
        return object.__getattribute__(self, missing)


def _makes_all_new(op: Any) -> bool:
    """Whether the CPU's kernel always returns new dense tensors, never an argument or its bytes."""
    name, returns = op._schema.name.removeprefix("aten::"), op._schema.returns
    if C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return False
    if name in SHARING or _APART.search(name) or "::" in name:
        return False
    kind = "List[Tensor]" if name.startswith("_foreach_") else "Tensor"
    return bool(returns) and all(str(r.type) == kind and r.alias_info is None for r in returns)


def _kind(argument: Any) -> str | None:
    """Whether an argument is a tensor, several, or neither."""
    kind = str(argument.type)
    return None if "Tensor" not in kind else MANY if "List" in kind else ONE


def on_metadata(op: Any, keys: Any) -> Callable[..., Any]:
    """Return the kernel at `keys` unchanged, for operators that do not touch bytes."""
    return functools.partial(op._handle.redispatch_boxed, keys)


_get_device = Tensor.get_device
HOST = torch.device("cpu")
_OVERLAP = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
    "single memory location. Please clone() the tensor before performing the operation."
)


@functools.cache
def kernel_of(op: Any, dense: bool = True) -> Callable[..., Any]:
    """Return a kernel that runs `op` on the GPU of its tensors; `dense`: none is in parts."""
    if any(r.alias_info is not None and not writes(r) for r in op._schema.returns):
        return on_metadata(op, CPU)  # of a view: the CPU's kernel serves any device
    return functools.partial(_run, KernelPlan(op, dense))


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `op` on the GPU that its tensors are on."""
    __tracebackhide__ = True
    return kernel_of(op)(*args, **kwargs)


def _run(plan: KernelPlan, /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True  # CUDA's errors have no such frame, so nobody shall see one
    try:
        if asserts.dead:
            asserts.wait()
        # First what most calls are. The kernels between fill the processor's caches, so that an
        # operator costs what it touches: as little as can be, here and in `adopt`.
        usual = plan.usual and not (kwargs and any(isinstance(x, Tensor) for x in kwargs.values()))
        at, low = _flip_all(plan, args) if usual else (-1, [])
        if at < 0:
            return _run_any(plan, args, kwargs)
        gpu = GPUS[at]
        if plan.grows:
            _require_room(plan, args, gpu)
        call = plan.op if plan.number_ok and not isinstance(low[-1], Tensor) else plan.cpu
        started = perf_counter_ns()
        try:
            result = call(*low, **kwargs)
        except RuntimeError as error:
            found = _pairs(plan, args, low)
            result = _call_again(plan, call, low, kwargs, found, gpu, error)
            return _lift(plan, result, found, gpu)
        gpu.account.worked(started)
        if plan.scratch is not None:
            return _with_scratch(plan, args, _lift(plan, result, _pairs(plan, args, low), gpu), gpu)
        if plan.fresh:
            return _adopt_new(result, gpu)
        if plan.in_place and result is low[0] and result.shape == args[0].shape:
            return args[0]
        return _lift(plan, result, _pairs(plan, args, low), gpu)
    except BaseException as error:
        if asserts.enabled and asserts.is_assert(error):
            return asserts.run_on(plan, _run, args, kwargs)
        leave_out_ours(error)
        raise


def _require_room(plan: KernelPlan, args: Any, gpu: VirtualGpu) -> None:
    """Raise ``torch.OutOfMemoryError`` before a result is computed that has no room."""
    __tracebackhide__ = True
    tensors = [x for x in args if isinstance(x, Tensor)]
    if (dim := PRODUCTS.get(plan.name)) is not None:
        one, other = tensors[-2:]
        if one.shape[-1] == other.shape[-3 - dim]:
            size = one.numel() // max(one.shape[-1], 1), other.shape[dim]
            if prod(size) * _LARGEST_NUMBER > gpu.account.room:
                gpu.account.require(size, one.dtype)
        return
    most = _LARGEST_NUMBER
    for x in tensors:
        most *= x.numel()
    if most <= gpu.account.room or len({x.shape for x in tensors}) == 1:
        return
    metas = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, Tensor)
        else x
        for x in args
    ]
    try:
        result = plan.op._handle.redispatch_boxed(META, *metas)
    except Exception:  # noqa: BLE001  the CPU's kernel says it in its own words
        return
    gpu.account.require(result.shape, result.dtype)


def _flip_all(plan: KernelPlan, args: Any) -> tuple[int, list[Any]]:
    """Return the GPU of all tensors in usual arguments, or -1, and the CPU kernel's arguments."""
    low: list[Any] = []
    at = -1
    flip_ = plan.flip
    for kind, x in zip(plan.kinds, args):  # noqa: B905 (defaults may be left out)
        if kind is None or x is None:
            low.append(x)
            continue
        if kind is MANY:
            places = {*map(_get_device, x)}
            where = places.pop() if len(places) == 1 else -1
            low.append([*map(flip_, x)])
        elif isinstance(x, Tensor):
            where = x.get_device()
            low.append(flip_(x))
        elif plan.number_ok:
            low.append(x)
            continue
        else:
            return -1, low
        if where < 0 or (where != at and at >= 0):
            return -1, low
        at = where
    return at, low


def _with_scratch(plan: Any, args: Any, result: Any, gpu: VirtualGpu) -> Any:
    """Return the result, once the temporary memory of CUDA's kernel was charged and freed."""
    gpu.account.pass_through(temporary_bytes(plan.scratch, gpu.index, args, result))
    return result


def _adopt_new(result: Any, gpu: VirtualGpu) -> Any:
    """Return the results of a kernel that always makes new tensors, on the GPU."""
    if isinstance(result, Tensor):
        return adopt(result, gpu, 3)
    new = [r if r is None else adopt(r, gpu, 3) for r in result]
    return new if isinstance(result, list) else tuple(new)


def _pairs(plan: KernelPlan, args: Any, low: list[Any]) -> Found:
    """Return the tensors of usual arguments, in the form that `_lower` returns."""
    found: Found = []
    for kind, name, x, y in zip(plan.kinds, plan.arguments, args, low):  # noqa: B905 (as above)
        if kind is MANY:
            found += zip(repeat(name), x, y)
        elif kind is ONE and x is not None:
            found.append((name, x, y))
    return found


def _run_any(plan: KernelPlan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator with any arguments."""
    __tracebackhide__ = True
    low: list[Any] = []
    found: Found = []
    above: list[str] = []  # arguments for which another key than CPU decides
    for name, x in zip(plan.arguments, args):  # noqa: B905 (as above)
        low.append(_lower(plan, name, x, found, above))
    low_kwargs = {}
    for name in kwargs:
        low_kwargs[name] = _lower(plan, name, kwargs[name], found, above)
    gpu = one_gpu(found) if found else _gpu_with_room(plan, args, kwargs)
    if gpu is None:
        if plan.composite:  # each operator within says itself what it thinks of the devices
            return plan.cpu(*args, **kwargs)
        gpu = mixed(plan, found, args)
    call = plan.cpu
    if above or kwargs or plan.special:
        call = _prepare(plan, low, low_kwargs, found, above, gpu)
    if checks.listeners and (plan.waits or plan.name in INDEXING):
        name = plan.name if plan.waits else "nonzero"
        for nbytes in reads(plan.name, *args, **kwargs):
            checks.emit("sync", name, gpu.device, HOST, nbytes)
    started = perf_counter_ns()
    try:
        result = call(*low, **low_kwargs)
    except RuntimeError as error:
        result = _call_again(plan, call, low, low_kwargs, found, gpu, error)
    gpu.account.worked(started)
    result = _adopt_new(result, gpu) if plan.fresh else _lift(plan, result, found, gpu)
    return result if plan.scratch is None else _with_scratch(plan, args, result, gpu)


def _gpu_with_room(plan: KernelPlan, args: Any, kwargs: dict[str, Any]) -> VirtualGpu:
    """Return the GPU for an operator that takes no tensor, once its result is known to fit."""
    __tracebackhide__ = True
    gpu = gpu_of(kwargs.get("device"))
    size = next((x for x in args if isinstance(x, (list, tuple))), None)
    if size and prod(size) > SMALL:
        gpu.account.require(size, kwargs.get("dtype"))
    return gpu


def _lower(plan: KernelPlan, name: str, x: Any, found: Found, above: list[str]) -> Any:
    """Return an argument as the CPU's kernel takes it."""
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
    """Lower a tensor that is an ``out=``, or may be sparse or nested."""
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
    """Return the function to call with `low` and `low_kwargs`, which are changed for it."""
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


def _call_again(
    plan: KernelPlan,
    call: Callable[..., Any],
    low: list[Any],
    low_kwargs: dict[str, Any],
    found: Found,
    gpu: VirtualGpu,
    error: RuntimeError,
) -> Any:
    """Call again into a larger output after `error`; raise any other in plain words."""
    __tracebackhide__ = True
    refuse_as_cuda(error, gpu.account)
    if lacks_type(error):
        raise NotImplementedError(
            f"virtual GPUs compute as the CPU does, and its {plan.op.name()} says: {error}"
        ) from None
    if "not resizable" not in str(error):
        # The one text of the CPU's that differs among those which are often met.
        error.args = (str(error).replace("expected m1 and m2 to", "expected mat1 and mat2 to"),)
        raise error
    read = {id(old) for name, _, old in found if name not in plan.written}
    replaced = {}
    for n, (name, tensor, old) in enumerate(found):
        if name in plan.written and id(old) in read:
            raise RuntimeError(_OVERLAP)  # to be read, it has too few bytes too
        if name in plan.written:
            # `old` has its new shape already, and too few bytes for it.
            new = torch.empty(0, dtype=old.dtype) if name in plan.outs else flip(tensor).clone()
            found[n], replaced[id(old)] = (name, tensor, new), new
    low = [replaced.get(id(x), x) for x in low]
    return call(*low, **{name: replaced.get(id(x), x) for name, x in low_kwargs.items()})


def _lift(plan: KernelPlan, result: Any, found: Found, gpu: VirtualGpu, depth: int = 3) -> Any:
    """Return a result of the CPU's kernel on `gpu`: an argument, or a new tensor."""
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
    """Resize a written tensor as the operator did: within its bytes, or with new ones."""
    if written.numel() and low.data_ptr() == written.data_ptr():
        written.set_(written.untyped_storage(), written.storage_offset(), low.shape, low.stride())
    else:
        new = adopt(low, gpu)
        written.set_(new.untyped_storage(), 0, low.shape, low.stride())
