"""Decompose attention, normalization and recurrent cells, which CUDA has fused kernels for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import gru_cell_data, lstm_cell
from torch.nn.functional import linear

from gpumagic.virtual.checks import mixed
from gpumagic.virtual.generic_kernel import CPU, KernelPlan, on_metadata
from gpumagic.virtual.recurrent import recurrent

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
