"""Choose the algorithm of attention as CUDA does, without asking it.

torch's own C++ asks the driver in between, which a forked child must not do, and on a build for the
CPU it takes the one that holds the matrix of all weights.
"""

from typing import Any

import torch
from torch import Tensor

from gpumagic.virtual.networks import added

aten: Any = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)


def install() -> torch.library.Library:
    """Use it from now on, for as long as what this gives lives."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):  # inference mode goes past the first
        library.impl("scaled_dot_product_attention", _attention, key, allow_override=True)
    return library


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
    mask = added(attn_mask, query.dtype)
    if _can_flash(query, key, value, mask):
        flash = aten._scaled_dot_product_flash_attention
        flashed: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return flashed
    groups = enable_gqa and query.shape[-3] != key.shape[-3]
    if _can_be_efficient(query, key, value) and not groups:
        if mask is not None:
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        efficient = aten._scaled_dot_product_efficient_attention
        given = (query, key, value, mask, learns, dropout_p, is_causal)
        cheap: Tensor = efficient(*given, scale=scale)[0]
        return cheap
    math = aten._scaled_dot_product_attention_math
    result: Tensor = math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _can_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """The rules of sdp_utils.cpp that depend on what is given, and not on the driver."""
    if mask is not None or query.dtype not in _HALVES or not _alike(query, key, value):
        return False
    width = query.shape[-1]
    capable = torch.cuda.get_device_capability(query.device) >= _AMPERE
    return capable and torch.backends.cuda.flash_sdp_enabled() and width == value.shape[-1] <= 256


def _can_be_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    known = (*_HALVES, torch.float32)
    enabled = torch.backends.cuda.mem_efficient_sdp_enabled()
    return enabled and query.dtype in known and _alike(query, key, value)


def _alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.dim() == 4 and query.dtype == key.dtype == value.dtype
