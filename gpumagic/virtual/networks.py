"""Implement operators that are fused on CUDA: attention, normalization and recurrent networks.

A call of an LSTM, GRU or RNN runs one CPU operator. As with cuDNN, there is no second derivative.
With fake tensors, nothing is computed. Under vmap, for tensor subclasses, and for dtypes other than
float32 and float64, the call is decomposed into many operators, which is 3 to 10 times slower.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp.decompositions import gru_cell_data, lstm_cell
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from gpumagic.virtual.checks import mixed
from gpumagic.virtual.cuda_api import cpu_draws_from
from gpumagic.virtual.flip import adopt, flip_plain
from gpumagic.virtual.generic_kernel import CPU, KernelPlan, on_metadata
from gpumagic.virtual.virtual_gpus import VirtualGpu, gpu_of

C: Any = torch._C
aten: Any = torch.ops.aten
_choose = on_metadata(aten._fused_sdp_choice.default, CPU)


def network_kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels for the dispatch keys AutogradCUDA and CUDA, by operator name."""
    kernels: dict[str, Callable[..., Any]] = {
        f"{kind}.{variant}": recurrent(getattr(getattr(aten, kind), variant))
        for kind in _SAVED
        for variant in ("input", "data")
    }
    kernels |= {"_fused_rms_norm": _rms_norm, "scaled_dot_product_attention": _attention}
    return kernels | {"lstm_cell": _lstm_cell, "gru_cell": _gru_cell}


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *rest: Any, **options: Any
) -> Any:
    if not query.device == key.device == value.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )
    mask = added(mask, query.dtype)
    given, chosen = (query, key, value, mask, *rest), 0  # `rest` has dropout_p and is_causal
    if query.dim() == 4 and torch.backends.cuda.math_sdp_enabled():
        # Let torch choose, because the rules differ by version. `_choose` reads no tensor data.
        chosen = _choose(*given, **options)
    if chosen == 1:  # at::sdp::SDPBackend::flash_attention
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, *rest, attn_mask=mask, scale=options.get("scale"))[0]
    return aten._scaled_dot_product_attention_math(*given, **options)[0]


def added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a boolean mask to numbers that are added to the attention scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)


def _rms_norm(input: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Any:
    _check(aten._fused_rms_norm.default, input, shape, weight)
    return aten._fused_rms_norm.default.decompose(input, shape, weight, eps)


def _check(op: Any, *args: Any) -> None:
    """Raise CUDA's error if the tensors in `args` are on several devices."""
    given = zip(op._schema.arguments, args, strict=False)
    found = [(a.name, x, x) for a, x in given if isinstance(x, Tensor)]
    if len({tensor.device for _, tensor, _ in found}) > 1:
        mixed(KernelPlan(op, True).read(), found)


def _check_cell(op: Any, input: Tensor, hidden: Tensor, *rest: Any) -> None:
    """Check devices as CUDA does, first for two matrix products, then for the fused operator."""
    w_ih, w_hh, *biases = rest[-4:]
    if input.is_cuda:
        _check(aten.mm.default, input, w_ih)
        _check(aten.mm.default, hidden, w_hh)
        _check(op, input, hidden, *(rest[:-4] or [hidden]), *biases)


def _lstm_cell(
    input: Tensor, hx: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Any:
    _check_cell(aten._thnn_fused_lstm_cell.default, input, *hx, w_ih, w_hh, b_ih, b_hh)
    return lstm_cell(linear(input, w_ih, b_ih), hx[0], hx[1], w_hh, b_hh, None, 1)


def _gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Any:
    _check_cell(aten._thnn_fused_gru_cell.default, input, hx, w_ih, w_hh, b_ih, b_hh)
    return gru_cell_data(input, hx, w_ih, b_ih, w_hh, b_hh)


_FUSED = {torch.float32, torch.float64}
# Elements that CUDA saves per element of the output, without cuDNN (ATen/native/cuda/RNN.cu).
_SAVED = {"lstm": 6, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(op: Any) -> Callable[..., Any]:
    """Return the kernel for an LSTM, GRU or RNN operator."""
    names = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any) -> Any:
        given = dict(zip(names, args))  # noqa: B905 (defaults may be left out)
        if torch.is_autocast_enabled("cuda"):
            given = tree_map(_autocast, given)
        if len({x.device for x in tree_leaves((args[0], given["hx"], given["params"]))}) > 1:
            return op._op_dk(C.DispatchKey.CompositeImplicitAutograd, *args)  # raises torch's error
        leaves, shape = tree_flatten(list(given.values()))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        fake = any(isinstance(x, FakeTensor) for x in tensors)
        if not (fake or _are_plain(tensors)) or {x.dtype for x in tensors if x.is_cuda} - _FUSED:
            return op.decompose(*given.values())
        fused: Any = _Fused  # torch's type stubs lack `apply`
        grad = torch.is_grad_enabled()  # within `apply`, this is always False
        return fused.apply(op, given if fake else None, shape, grad, *leaves)

    return kernel


def _are_plain(tensors: list[Tensor]) -> bool:
    """Whether no tensor is of a subclass, and neither vmap nor a dispatch mode is active."""
    modes = C._functorch.peek_interpreter_stack() or C._len_torch_dispatch_stack()
    return not modes and {*map(type, tensors)} <= {Tensor, nn.Parameter}


def _autocast(x: Any) -> Any:
    floats = isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.double
    return x.to(torch.get_autocast_dtype("cuda")) if floats else x


class _Fused(torch.autograd.Function):
    """Run the CPU's operator on the GPU tensors' bytes; for fake tensors, compute nothing."""

    @staticmethod
    def forward(ctx: Any, op: Any, shapes_of: Any, tree: Any, grad: bool, *leaves: Any) -> Any:
        """Return the results on the GPU of the first input."""
        needed, device = [grad and need for need in ctx.needs_input_grad[4:]], leaves[0].device
        ctx.graph, ctx.run = {}, None
        if shapes_of:
            found = _shapes(**shapes_of)
        else:
            gpu = gpu_of(device)
            ctx.run, ctx.drawn = partial(_run, op, tree, needed), gpu.generator.clone_state()
            ctx.graph = ctx.run(gpu.generator, leaves)
            found = ctx.graph["found"]
        if any(needed):
            # Allocate as much memory as CUDA's operator saves for the backward pass.
            numbers = _SAVED[op._schema.name.partition("::")[2]] * found[0].numel()
            reserve = torch.empty(numbers, dtype=found[0].dtype, device=device)
            # Saving the inputs lets torch detect in-place changes to them.
            tensors = [x if isinstance(x, Tensor) else None for x in leaves]
            ctx.save_for_backward(reserve, *tensors)
            ctx.others = [x if t is None else None for x, t in zip(leaves, tensors, strict=True)]
            weakref.finalize(reserve, ctx.graph.clear).atexit = False  # graph dies with `reserve`
        return found if shapes_of else tuple(_lifted(found, gpu))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reserve, *given = ctx.saved_tensors  # a second backward pass raises torch's own error
        needed, graph = ctx.needs_input_grad[4:], ctx.graph
        if ctx.run and not graph:  # a hook freed `reserve`, which cleared the graph; run again
            leaves = [y if x is None else x for x, y in zip(given, ctx.others, strict=True)]
            graph = ctx.run(ctx.drawn.clone_state(), leaves)
        wanted = [x for x, need in zip(graph.get("low", given), needed, strict=True) if need]
        if graph:
            outer = [flip_plain(x.detach()) for x in gradients]
            options = {"retain_graph": True, "allow_unused": True}
            inner = torch.autograd.grad(graph["found"], wanted, outer, **options)
            results = iter(_lifted(inner, gpu_of(reserve.device)))
        else:
            results = map(torch.empty_like, wanted)
        return None, None, None, None, *(next(results) if need else None for need in needed)


def _run(op: Any, tree: Any, needed: list[bool], generator: Any, leaves: Iterable[Any]) -> Any:
    """Run the CPU's operator. Return the CPU inputs as "low" and the results as "found"."""
    low = [
        flip_plain(x.detach()).requires_grad_(need) if isinstance(x, Tensor) and x.is_cuda else x
        for x, need in zip(leaves, needed, strict=True)
    ]
    with torch.set_grad_enabled(any(needed)), cpu_draws_from(generator):
        return {"low": low, "found": op(*tree_unflatten(low, tree))}


def _shapes(hx: Any, bidirectional: bool, batch_first: bool = False, **given: Any) -> Any:
    x = next(iter(given.values()))
    hidden = [hx] if isinstance(hx, Tensor) else hx
    shape = (*x.shape[:-1], hidden[0].shape[-1] * (2 if bidirectional else 1))
    if batch_first:
        output = x.new_empty((shape[1], shape[0], shape[2])).transpose(0, 1)
    else:
        output = x.new_empty(shape)
    return output, *(torch.empty_like(h) for h in hidden)


def _lifted(found: Iterable[Any], gpu: VirtualGpu) -> list[Any]:
    """Return GPU copies of results. Without copies, two biases' gradients may be one tensor."""
    return [x if x is None else adopt(x.detach().clone(), gpu) for x in found]
