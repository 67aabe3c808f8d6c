"""Run attention, normalization and recurrent networks, which CUDA has fused kernels for.

Attention, normalization and cells are decomposed. LSTM, GRU and RNN run by the CPU's own fused
operators, as cuDNN has one operator for all steps, whose gradient cannot be differentiated again. A
dry run's tensors without data get the same results' shapes and take the same memory. Tensors of
other classes or types, and those under vmap, take torch's decomposition into single operators,
which is 3 to 10 times slower.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp.decompositions import gru_cell_data, lstm_cell
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gpumagic.virtual.checks import mixed
from gpumagic.virtual.flip import adopt, flip_plain
from gpumagic.virtual.generic_kernel import CPU, KernelPlan, on_metadata
from gpumagic.virtual.virtual_gpus import VirtualGpu, gpu_of

C: Any = torch._C
aten: Any = torch.ops.aten
_choose = on_metadata(aten._fused_sdp_choice.default, CPU)
_FLASH = 1  # at::sdp::SDPBackend::flash_attention
_HALF = (torch.float16, torch.bfloat16)
_MOST_FLASH = 256  # numbers of a head, as of ATen/native/transformers/cuda/sdp_utils.cpp


def network_kernels(overload: Callable[[str], Any]) -> dict[str, Callable[..., Any]]:
    """Return kernels by operator; registered above autograd, and below it for inference mode."""
    kernels: dict[str, Callable[..., Any]] = {
        f"{cell}.{variant}": recurrent(overload(f"{cell}.{variant}"))
        for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for variant in ("input", "data")
    }
    kernels["_fused_rms_norm"] = _rms_norm
    kernels["scaled_dot_product_attention"] = _attention
    kernels["lstm_cell"] = _lstm_cell
    kernels["gru_cell"] = _gru_cell
    return kernels


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not query.device == key.device == value.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )
    inputs = (query, key, value)
    attn_mask = added(attn_mask, query.dtype)
    chosen = 0
    if torch.backends.cuda.math_sdp_enabled():
        # As the CPU's kernel chooses, which looks at no bytes: versions of torch differ in it.
        given = (*inputs, attn_mask, dropout_p, is_causal)
        chosen = _choose(*given, scale=scale, enable_gqa=enable_gqa)
    elif not _has_kernel(query, attn_mask):
        raise RuntimeError("No available kernel. Aborting execution.")
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if chosen == _FLASH:
        return _flash(inputs, attn_mask, options)
    math = aten._scaled_dot_product_attention_math
    result: Tensor = math(*inputs, attn_mask=attn_mask, enable_gqa=enable_gqa, **options)[0]
    return result


def _has_kernel(query: Tensor, mask: Tensor | None) -> bool:
    """Whether CUDA has one for this of those to which the code has limited it, and not math's."""
    allowed, half = torch.backends.cuda, query.dtype in _HALF
    if allowed.flash_sdp_enabled() and half and mask is None and query.shape[-1] <= _MOST_FLASH:
        return True
    if allowed.mem_efficient_sdp_enabled() and (half or query.dtype is torch.float32):
        return True
    return allowed.cudnn_sdp_enabled() and half


def added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as a term added to the weights, as C++ does before it chooses an algorithm."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)


def _flash(inputs: tuple[Tensor, ...], mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    flat = inputs[0].dim() == 3  # chosen so by some versions, but the operator wants a batch
    if flat:
        inputs = tuple(tensor.unsqueeze(0) for tensor in inputs)
        mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 3 else mask
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = flash(*inputs, attn_mask=mask, **options)[0]
    return result.squeeze(0) if flat else result


def _rms_norm(input: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Any:
    _check(aten._fused_rms_norm.default, input, shape, weight)
    return aten._fused_rms_norm.default.decompose(input, shape, weight, eps)


def _check(op: Any, *args: Any) -> None:
    """Raise CUDA's error for a decomposed operator whose arguments are on several devices."""
    found = [
        (a.name, x, x)
        for a, x in zip(op._schema.arguments, args, strict=False)
        if isinstance(x, Tensor)
    ]
    if len({tensor.device for _, tensor, _ in found}) > 1:
        mixed(KernelPlan(op, True), found, args)


def _check_cell(op: Any, input: Tensor, hidden: Tensor, *rest: Any) -> None:
    """Check a cell's devices as C++ does for a GPU: two products, then one fused operator."""
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


_FUSED = (torch.float32, torch.float64)
_PLAIN = {Tensor, nn.Parameter}
# Numbers kept for the backward pass, by step, row and hidden unit, as torch's own CUDA code keeps
# them without cuDNN (ATen/native/cuda/RNN.cu): gates, cell and output; cuDNN does not say its own.
_KEPT = {"lstm": 6, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(op: Any) -> Callable[..., Any]:
    """Return the kernel of an operator, with cuDNN's check of devices."""
    names = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any) -> Any:
        given = dict(zip(names, args))  # noqa: B905 (defaults may be left out)
        device = args[0].device
        hidden = [given["hx"]] if isinstance(given["hx"], Tensor) else given["hx"]
        for kind, tensors in (("hidden", hidden), ("parameter", given["params"])):
            for tensor in tensors:
                if tensor.device != device:
                    raise RuntimeError(
                        f"Input and {kind} tensors are not at the same device, found input tensor "
                        f"at {device} and {kind} tensor at {tensor.device}"
                    )
        if torch.is_autocast_enabled("cuda"):
            given = tree_map(_autocast, given)
        return _layers(op, given)

    return kernel


def _autocast(x: Any) -> Any:
    floats = isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.double
    return x.to(torch.get_autocast_dtype("cuda")) if floats else x


def _layers(op: Any, given: dict[str, Any]) -> Any:
    """Run layer by layer if there is dropout between: a virtual GPU draws its own numbers."""
    count, dropout = given["num_layers"], given["dropout"]
    if not (given["train"] and dropout):
        return _all_steps(op, given)
    first = next(iter(given))
    each = len(given["params"]) // count
    single = isinstance(given["hx"], Tensor)
    hidden = [given["hx"]] if single else given["hx"]
    finals = []
    for n in range(count):
        if n:
            given[first] = torch.dropout(given[first], dropout, True)
        parts = [h.chunk(count)[n] for h in hidden]
        given |= {"hx": parts[0] if single else parts, "num_layers": 1, "dropout": 0.0}
        layer = {**given, "params": given["params"][n * each : (n + 1) * each]}
        given[first], *final = _all_steps(op, layer)
        finals.append(final)
    return given[first], *(torch.cat(final) for final in zip(*finals, strict=True))


def _all_steps(op: Any, given: dict[str, Any]) -> Any:
    leaves, shape = tree_flatten(list(given.values()))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    supported = all(x.dtype in _FUSED or not x.is_cuda for x in tensors)
    # torch's types have no `apply`.
    fused: Any = _Fused
    shapes: Any = _Shapes
    if supported and any(isinstance(x, FakeTensor) for x in tensors):
        return shapes.apply(op._schema.name.partition("::")[2], given, shape, *leaves)
    plain = supported and all(type(x) in _PLAIN for x in tensors)
    if not plain or C._functorch.peek_interpreter_stack() or C._len_torch_dispatch_stack():
        return op.decompose(*given.values())
    return fused.apply(op, shape, *leaves)


class _Fused(torch.autograd.Function):
    """Run the CPU's operator on the same bytes; its graph is freed with the saved tensors."""

    @staticmethod
    def forward(ctx: Any, op: Any, shape: Any, *leaves: Any) -> Any:
        """Return the results, on the GPU of the first tensor."""
        gpu = gpu_of(leaves[0].device)
        low = [_lowered(x) for x in leaves]
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            found = op(*tree_unflatten(low, shape))
        if any(ctx.needs_input_grad):
            reserve = _reserve(op._schema.name.partition("::")[2], found[0], leaves[0].device)
            # With the inputs, so that torch sees if one of them was changed in place since.
            ctx.save_for_backward(reserve, *(x for x in leaves if isinstance(x, Tensor)))
            ctx.graph = {"low": low, "found": found}
            weakref.finalize(reserve, ctx.graph.clear).atexit = False
        return tuple(_raised([x.detach() for x in found], gpu))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of the inputs."""
        reserve, *_ = ctx.saved_tensors  # torch's own error in a second pass
        gpu = gpu_of(reserve.device)
        low, found = ctx.graph["low"], ctx.graph["found"]
        wanted = [x for x in low if isinstance(x, Tensor) and x.requires_grad]
        given = [flip_plain(x.detach()) for x in gradients]
        made = iter(torch.autograd.grad(found, wanted, given, retain_graph=True, allow_unused=True))
        results = [next(made) if isinstance(x, Tensor) and x.requires_grad else None for x in low]
        return None, None, *_raised(results, gpu)


class _Shapes(torch.autograd.Function):
    """Do the same for a dry run's tensors without data: what it allocates and keeps."""

    @staticmethod
    def forward(ctx: Any, name: str, given: dict[str, Any], shape: Any, *leaves: Any) -> Any:
        """Return tensors of the results' shapes."""
        x, hidden = leaves[0], given["hx"]
        hidden = [hidden] if isinstance(hidden, Tensor) else [*hidden]
        width = hidden[0].shape[-1] * (2 if given["bidirectional"] else 1)
        steps = (*x.shape[:-1], width)
        if given.get("batch_first"):
            output = x.new_empty((steps[1], steps[0], width)).transpose(0, 1)
        else:
            output = x.new_empty(steps)
        if any(ctx.needs_input_grad):
            tensors = (leaf if isinstance(leaf, Tensor) else None for leaf in leaves)
            ctx.save_for_backward(_reserve(name, output, x.device), *tensors)
        return output, *(torch.empty_like(h) for h in hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return tensors of the gradients' shapes."""
        _, *given = ctx.saved_tensors
        wanted = zip(given, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(torch.empty_like(x) if needs else None for x, needs in wanted)


def _reserve(name: str, output: Tensor, device: torch.device) -> Tensor:
    """Return the memory that is kept for the backward pass."""
    return torch.empty(_KEPT[name] * output.numel(), dtype=output.dtype, device=device)


def _lowered(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_cuda:
        return x
    return flip_plain(x.detach()).requires_grad_(x.requires_grad)


def _raised(found: list[Any], gpu: VirtualGpu) -> list[Any]:
    """Return the CPU's results on the GPU, each with own bytes: both biases get one gradient."""
    used, raised = set(), []
    for x in found:
        if x is not None:
            storage = x.untyped_storage()
            if storage.data_ptr() in used or storage.nbytes() != x.nbytes:
                x = x.clone(memory_format=torch.contiguous_format)
            used.add(x.untyped_storage().data_ptr())
        raised.append(x if x is None else adopt(x, gpu, 3))
    return raised
