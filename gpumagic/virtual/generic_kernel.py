"""Run any operator on a virtual GPU with the CPU's kernel.

The CPU's kernel gets CPU tensors that share the arguments' bytes. Its results become GPU tensors.
Kernels run at the dispatch key CUDA, so autograd, autocast and vmap run before them as usual.
"""

import functools
import re
from collections.abc import Callable
from itertools import chain, filterfalse, zip_longest
from math import prod
from operator import attrgetter
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves, tree_map_only

from gpumagic.usercode.files import leave_out_ours
from gpumagic.virtual.checks import Found, mixed
from gpumagic.virtual.cuda_api import belongs_to_cuda, cpu_draws_from
from gpumagic.virtual.flip import adopt, adopt_parts, flip, flip_parts, flip_plain, in_parts, writes
from gpumagic.virtual.memory_account import SMALL, refuse_as_cuda
from gpumagic.virtual.scratch import RULES, temporary_bytes
from gpumagic.virtual.virtual_gpus import GPUS, VirtualGpu, gpu_of

C: Any = torch._C
CPU = C.DispatchKeySet(C.DispatchKey.CPU)
_SPARSE = C.DispatchKeySet(C.DispatchKey.SparseCPU)
_LARGEST_NUMBER = 8  # assumed bytes per element; complex128 has 16, but is rare
LAZY = ("Conjugate", "Negative")  # dispatch keys of conjugate and negative views
DRAWS = frozenset(["native_dropout", "rrelu_with_noise"])
"""Operators that draw random numbers and take no generator."""
SHARING = {"_embedding_bag", "_embedding_bag_forward_only", "lu_unpack", "channel_shuffle", "lift"}
SHARING |= {"native_channel_shuffle", "_slow_conv2d_forward", "slow_conv3d_forward"}
"""Operators that may return an existing tensor. The list follows torchgen's gen_variable_type.py.
torch's debug builds assert that all other non-composite operators return new tensors."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_cdist_forward", "_euclidean_dist"})
_UNCOUNTED = {"aten::_foreach_zero_", "aten::_foreach_lerp_.Scalar"}
"""In-place operators on lists of tensors. Their CUDA kernels do not increment version counters."""
_GROWS = {(n, "List[int]") for n in ("repeats", "pad", "output_size", "size", "kernel_size")}
"""Names and types of arguments that can make a result many times as large as the input."""
# Operators that may return a sparse, nested or quantized tensor.
_APART = re.compile("sparse|nested|mkldnn|quantize|_embedding_bag_backward")
_LACKS_TYPE = re.compile(r"not implemented for '|support tensors of type|on CPU does not support")
NUMBER_AS_TENSOR = frozenset({"add", "sub", "mul", "div", "floor_divide"})
"""The only operators of ``torch.ops`` that accept a number where the schema says Tensor."""


class KernelPlan:
    """The facts that the generic kernel needs about one operator. `read` finds most of them."""

    def __init__(self, op: Any, dense: bool) -> None:
        self.op = op
        self.dense = dense
        self.name: str = op._schema.name.split("::")[1]
        self.cpu = on_metadata(op, CPU)
        self.known = False

    def read(self) -> "KernelPlan":
        """Read the operator's schema. Reading all operators' schemas at once would be slow."""
        arguments, name_of = self.op._schema.arguments, attrgetter("name")
        has_kernel = functools.partial(C._dispatch_has_kernel_for_dispatch_key, self.op.name())
        self.arguments = [*map(name_of, arguments)]
        self.lowers = ["Tensor" in str(a.type) for a in arguments if not a.kwarg_only]
        written = [*filter(writes, arguments)]
        self.tensors = {a.name for a in arguments if str(a.type) in ("Tensor", "Optional[Tensor]")}
        self.written = {*map(name_of, written)}
        self.outs = {a.name for a in written if a.kwarg_only}
        self.draws = self.name in DRAWS or "generator" in self.arguments
        self.composite = not has_kernel("CPU")
        self.number_ok = self.name.rstrip("_") in NUMBER_AS_TENSOR
        # torch resolves conjugate and negative views if the operator has no kernel at a LAZY key.
        self.flip: Callable[..., Tensor] = flip if any(map(has_kernel, LAZY)) else flip_plain
        self.plain = self.dense and not self.outs  # whether `self.flip` can convert each tensor
        self.fresh = self.plain and _makes_all_new(self.op)
        self.pointwise = torch.Tag.pointwise in self.op.tags
        self.grows = [n for n, a in enumerate(arguments) if (a.name, str(a.type)) in _GROWS]
        foreach = self.name.startswith("_foreach_")
        self.counts = all((foreach, self.name[-1] == "_", self.op.name() not in _UNCOUNTED))
        checked = all((self.fresh, not self.draws, not foreach))
        # If the product of this factor and all tensors' numel exceeds SMALL, check the free memory.
        self.factor = checked * max(1, len(self.grows) * (SMALL + 1))
        self.scratch = RULES.get(self.name)
        self.known = True  # set last, so that other threads never use an incomplete plan
        return self


def _makes_all_new(op: Any) -> bool:
    """Whether the CPU's kernel always returns new dense tensors that share no bytes with inputs."""
    name, returns = op._schema.name.removeprefix("aten::"), op._schema.returns
    composite = C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    if composite or name in SHARING or _APART.search(name) or "::" in name:
        return False
    kind = "List[Tensor]" if name.startswith("_foreach_") else "Tensor"
    return bool(returns) and all(str(r.type) == kind and r.alias_info is None for r in returns)


def returns_view(op: Any) -> bool:
    """Whether a result may alias an argument that the operator does not write."""
    return any(r.alias_info is not None and not writes(r) for r in op._schema.returns)


def on_metadata(op: Any, keys: Any) -> Callable[..., Any]:
    """Return a function that calls the operator's kernel at the dispatch keys `keys`."""
    return functools.partial(op._handle.redispatch_boxed, keys)


HOST = torch.device("cpu")
NOT_PINNED = "Only dense CPU tensors can be pinned"


@functools.cache
def kernel_of(op: Any, dense: bool = True) -> Callable[..., Any]:
    """Return a kernel that runs `op` on GPU tensors, which are all dense if `dense` is true."""
    if returns_view(op):
        return on_metadata(op, CPU)  # the CPU's kernels for views also accept GPU tensors
    return functools.partial(_run, KernelPlan(op, dense))


def _run(plan: KernelPlan, /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True  # a traceback on a real GPU has no such frame, so hide this one
    try:
        if not plan.known:
            plan.read()
        return _run_on_cpu(plan, args, kwargs)
    except BaseException as error:
        leave_out_ours(error)
        raise


def _run_on_cpu(plan: KernelPlan, args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    # A kernel evicts Python's data from the caches, so access little memory here and in `adopt`.
    found: Found = []
    above: list[str] = []  # arguments for which torch must dispatch the operator again
    at, count, low, low_kwargs = _lower_all(plan, args, kwargs, found, above)
    gpu = _gpu_for(plan, found, args, kwargs) if at < 0 else GPUS[at]
    if gpu is None:  # the composite operator's inner operators will check the devices
        return plan.cpu(*args, **kwargs)
    call = plan.cpu
    if above or kwargs or plan.draws:
        call = _prepare(plan, low, low_kwargs, found, above, gpu)
    if count > SMALL:
        _check_room(plan, low, low_kwargs, found, gpu)
    result = _compute(plan, call, low, low_kwargs, gpu)
    if plan.counts:  # like CUDA's kernel, so that autograd detects the change
        increment_version([*filterfalse(Tensor.is_inference, args[0])])
    if plan.fresh and isinstance(result, Tensor):
        result = adopt(result, gpu, 4)  # same as `_lift`, but faster
    else:
        result = _lift(plan, result, found, gpu)
    if plan.scratch:
        given = (*args, kwargs["dim"]) if "dim" in kwargs else args  # sort.stable has kwarg `dim`
        gpu.account.pass_through(temporary_bytes(plan.scratch, gpu.index, given, result))
    return result


def _compute(plan: KernelPlan, call: Any, low: list[Any], kwargs: Any, gpu: VirtualGpu) -> Any:
    __tracebackhide__ = True
    started = perf_counter_ns()
    try:
        result = call(*low, **kwargs)
    except RuntimeError as error:
        refuse_as_cuda(error, gpu.account)
        if _LACKS_TYPE.search(str(error)):
            raise NotImplementedError(
                f"virtual GPUs use the CPU's kernels; {plan.op.name()} on the CPU failed: {error}"
            ) from None
        # Use CUDA's text. All other common errors have the same text on CUDA and on the CPU.
        error.args = (str(error).replace("expected m1 and m2 to", "expected mat1 and mat2 to"),)
        raise
    gpu.account.worked(started)
    return result


def _lower_all(
    plan: KernelPlan, args: Any, kwargs: dict[str, Any], found: Found, above: list[str]
) -> tuple[int, int, list[Any], dict[str, Any]]:
    """Return the GPU's ordinal (negative if unknown), a count, and the CPU kernel's arguments.
    If the count exceeds SMALL, the free memory must be checked."""
    low: list[Any] = []
    flip_, plain, at, count = plan.flip, plan.plain, -2, plan.factor
    for lowers, name, x in zip(plan.lowers, plan.arguments, args):  # noqa: B905 (defaults left out)
        if not lowers or x is None:
            low.append(x)
        elif plain and isinstance(x, Tensor) and (where := x.get_device()) >= 0:
            y = flip_(x)
            found.append((name, x, y))
            low.append(y)
            at = where if at in (-2, where) else -1
            count *= x.numel()
        else:
            low.append(_lower(plan, name, x, found, above))
            at, count = -1, count * (SMALL + 1)
    low_kwargs = {name: _lower(plan, name, x, found, above) for name, x in kwargs.items()}
    return -1 if kwargs else at, count, low, low_kwargs


def _gpu_for(plan: KernelPlan, found: Found, args: Any, kwargs: Any) -> VirtualGpu | None:
    """Return the GPU to run on; None if a composite operator must run its inner operators."""
    __tracebackhide__ = True
    if found:
        first, *others = {tensor.get_device() for _, tensor, _ in found}
        if first >= 0 and not others:
            return GPUS[first]
        return None if plan.composite else mixed(plan, found)
    gpu = gpu_of(kwargs.get("device"))
    if (size := next((x for x in args if isinstance(x, (list, tuple))), None)) is not None:
        gpu.account.require(size, kwargs.get("dtype"))
    elif any(isinstance(x, (int, float)) and x > 4096 for x in args):  # arange, eye, linspace
        _require_results(plan, args, kwargs, gpu)
    return gpu


def _check_room(plan: KernelPlan, args: Any, kwargs: Any, found: Found, gpu: VirtualGpu) -> None:
    """Before the CPU computes, raise an out-of-memory error if the results would not fit."""
    __tracebackhide__ = True
    tensors, room = [x for _, x, _ in found], gpu.account.room // _LARGEST_NUMBER
    large = plan.grows or prod(map(Tensor.numel, tensors)) > room
    if tensors and large and _at_most(plan, tensors, args) > room:
        _require_results(plan, args, kwargs, gpu)


def _at_most(plan: KernelPlan, tensors: list[Tensor], args: Any) -> int:
    """Quickly estimate the number of elements in the results. The estimate is seldom too low."""
    first, *others = tensors
    if plan.name in PRODUCTS:
        x, other = tensors[-2:]
        most = x.numel() * other.numel() // max((1, *x.shape[-1:]))
    elif plan.name == "convolution":
        most = first.numel() * max((1, *tensors[1].shape[:2]))
    elif plan.pointwise:
        most = prod(map(max, zip_longest(*(x.shape[::-1] for x in tensors), fillvalue=1)))
    else:
        most = sum(map(Tensor.numel, tensors))
        if any(x.shape != first.shape for x in others):  # `others` may be indices of rows
            rows = max(map(Tensor.numel, others))
            most = max(most, first.numel() * rows // max((1, *first.shape[:1])))
    numbers = chain.from_iterable(args[at] or () for at in plan.grows if at < len(args))
    return int(most * prod(1 + abs(n) for n in numbers))


def _require_results(plan: KernelPlan, args: Any, kwargs: Any, gpu: VirtualGpu) -> None:
    """Raise an out-of-memory error if results would not fit. Finding their sizes may take 1 ms."""
    __tracebackhide__ = True
    given = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
    try:
        args, given = tree_map_only(Tensor, lambda x: x.to("meta"), (args, given))
        results = tree_leaves(plan.op(*args, **given))
    except Exception:  # noqa: BLE001  the CPU's kernel will raise its own error
        return
    for result in results:
        if isinstance(result, Tensor):
            gpu.account.require(result.shape, result.dtype)


def _lower(plan: KernelPlan, name: str, x: Any, found: Found, above: list[str]) -> Any:
    """Return an argument for the CPU's kernel, with CPU tensors in place of GPU tensors."""
    if isinstance(x, Tensor):
        low = _lower_tensor(plan, name, x, found, above) if x.get_device() >= 0 else x
        found.append((name, x, low))
        return low
    if isinstance(x, (list, tuple)):
        if x and not isinstance(x[0], int):
            return [_lower(plan, name, y, found, above) for y in x]
    elif name in plan.tensors and isinstance(x, (int, float, complex)):
        above.append(name)  # C++ passes a "wrapped number" tensor to Python as a number
    return x


def _lower_tensor(plan: KernelPlan, name: str, x: Tensor, found: Found, above: list[str]) -> Tensor:
    is_out = name in plan.outs
    if plan.dense and not is_out:
        return plan.flip(x)
    if in_parts(x):
        above.append(name)
        return flip_parts(x)
    if is_out and (same := [low for _, tensor, low in found if tensor is x]):
        return same[0]
    # The kernel may resize `out`, so pass an empty tensor. `_lift_argument` then updates `out`.
    return torch.empty(0, dtype=x.dtype) if is_out else flip(x)


def _prepare(
    plan: KernelPlan, low: list[Any], kwargs: Any, found: Found, above: list[str], gpu: VirtualGpu
) -> Callable[..., Any]:
    """Change `low` and `kwargs` in place, and return the function to call with them."""
    if "device" in kwargs:
        if kwargs.get("pin_memory"):
            raise RuntimeError(NOT_PINNED)
        kwargs["device"] = HOST
    if "generator" in plan.arguments:
        _set_generator(plan.arguments.index("generator"), low, kwargs, gpu)
    if above and not plan.number_ok:
        for n, (name, x) in enumerate(zip(plan.arguments, low)):  # noqa: B905 (defaults left out)
            if name in above and isinstance(x, (int, float, complex)):
                low[n] = torch.tensor(x, dtype=torch.result_type(found[0][1], x))
    call = plan.op if above else plan.cpu
    return cpu_draws_from(gpu.generator)(call) if plan.name in DRAWS else call


def _set_generator(at: int, low: list[Any], kwargs: Any, gpu: VirtualGpu) -> None:
    """Pass the GPU's generator if the caller gave none at index `at`; refuse a CPU generator."""
    generator = low[at] if at < len(low) else kwargs.get("generator")
    if generator is None:
        kwargs["generator"] = gpu.generator
        del low[at:]
    elif not belongs_to_cuda(generator):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")


def _lift(plan: KernelPlan, result: Any, found: Found, gpu: VirtualGpu) -> Any:
    """Return the GPU tensor for a CPU kernel's result: the written argument, or a new tensor."""
    if isinstance(result, (list, tuple)):
        return type(result)([_lift(plan, each, found, gpu) for each in result])
    if not isinstance(result, Tensor):
        return result
    for _, tensor, low in found:
        if low is result:
            usual = plan.plain and low.shape == tensor.shape
            return tensor if usual else _lift_argument(plan, tensor, low, gpu)
    if in_parts(result):
        return adopt_parts(result, gpu)
    # Clone a result that shares an argument's bytes; the schema does not always show this.
    strided = (low for _, _, low in found if plan.dense or low.layout is torch.strided)
    shares = result.data_ptr() in {*map(Tensor.data_ptr, strided)} - {0}
    return adopt(result.clone() if shares else result, gpu)


def _lift_argument(plan: KernelPlan, tensor: Tensor, low: Tensor, gpu: VirtualGpu) -> Tensor:
    """Give the written argument `tensor` the shape and bytes of `low`, and return `tensor`."""
    if not plan.dense and low.layout is not torch.strided:
        if tensor.layout is not torch.sparse_coo:
            what = f"write into a {tensor.layout} tensor in place"
            raise NotImplementedError(f"virtual GPUs cannot {what}")
        copy: Any = torch.ops.aten.copy_sparse_to_sparse_.default
        replaced: Tensor = copy.redispatch(_SPARSE, tensor, adopt_parts(low.clone(), gpu))
        return replaced._coalesced_(low.is_coalesced())
    if not plan.dense and low.is_nested:
        return tensor
    if low.shape != tensor.shape:
        return tensor.set_(adopt(low, gpu).untyped_storage(), 0, low.shape, low.stride())
    if low.data_ptr() != tensor.data_ptr():
        flip(tensor).copy_(low)
    return tensor
