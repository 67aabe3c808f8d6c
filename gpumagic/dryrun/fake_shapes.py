"""Give the results of operators for which torch has no shapes, or others than they have.

Of a fused operator only the results are allocated here, not its workspace.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._meta_registrations
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gpumagic.dryrun.fakes import suspended


def own_shapes(func: Any, name: str) -> Callable[..., Any] | None:
    """What runs in place of `func`, or None for what torch knows."""
    make = _OWN.get(name)
    if make is not None:
        return lambda *args, **kwargs: make(**_bound(func, args, kwargs))
    if name == "_fused_sdp_choice":
        return lambda *args, **kwargs: _chosen(func, args, kwargs)
    # Fused optimizers write into what they are given and return nothing.
    return _nothing if name.startswith("_fused_") and not func._schema.returns else None


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    names = (a.name for a in func._schema.arguments)
    return given | dict(zip(names, args, strict=False)) | kwargs


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _chosen(func: Any, args: Any, kwargs: Any) -> Any:
    """The algorithm of attention; of tensors without data torch says that there is but the slow."""
    if args[0].device.type != "cpu":
        return func(*args, **kwargs)
    with suspended():
        return func(*tree_map_only(Tensor, _empty, args), **tree_map_only(Tensor, _empty, kwargs))


def _empty(tensor: Tensor) -> Tensor:
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return new.requires_grad_() if tensor.requires_grad else new


def _attention(
    query: Tensor,
    key: Tensor,
    num_head: int,
    need_weights: bool,
    average_attn_weights: bool,
    **_: Any,
) -> Any:
    batch, length, _width = query.shape
    heads = () if average_attn_weights else (num_head,)
    shape = (batch, *heads, length, key.shape[1])
    return torch.empty_like(query), query.new_empty(shape if need_weights else 0)


def _loss(self: Tensor, target: Tensor, reduction: int = 1, **_: Any) -> Tensor:
    """A reduced one keeps the memory of all the losses."""
    losses = torch.empty(
        torch.broadcast_shapes(self.shape, target.shape),
        dtype=torch.result_type(self, target),
        device=self.device,
    )
    return losses.as_strided((), ()) if reduction else losses


def _log_sigmoid(self: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    on_host = torch._meta_registrations.device_hint(self) == "cpu"
    return torch.empty_like(self), torch.empty_like(self) if on_host else self.new_empty(0)


def _like_self(self: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(self)


_OWN: dict[str, Callable[..., Any]] = {
    "_transformer_encoder_layer_fwd": lambda src, **_: torch.empty_like(src),
    "_native_multi_head_attention": _attention,
    **dict.fromkeys(("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"), lambda **_: False),
    **dict.fromkeys(("binary_cross_entropy", "mse_loss", "smooth_l1_loss"), _loss),
    "log_sigmoid_forward": _log_sigmoid,
    "multi_margin_loss_backward": _like_self,
    "multilabel_margin_loss_backward": _like_self,
}
