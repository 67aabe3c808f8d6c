"""Say what operators of tensors without data give and hold, where torch does not know it.

torch's own answer is the shape of the result. Here are results that keep more memory than their
shape says, sparse ones, algorithms and orders of channels that a device chooses.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._meta_registrations
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gpumagic.dryrun.fakes import suspended

aten: Any = torch.ops.aten


def own_shapes(func: Any, name: str, args: Any) -> Callable[..., Any] | None:
    """What runs in place of `func`, or None for what torch knows."""
    make = _OWN.get(name)
    if name == "clone" and args[0].layout is torch.sparse_coo:
        make = _clone_of_sparse
    elif name == "_embedding_bag_backward" and args[9]:  # its gradient is sparse
        make = _rows_of_bags
    if make is not None:
        return lambda *args, **kwargs: make(**_bound(func, args, kwargs))
    if name in ("convolution", "convolution_backward") and _on_host(args[0]):
        return lambda *args, **kwargs: _as_of_the_host(func, args, kwargs)
    if name == "_fused_sdp_choice":
        return lambda *args, **kwargs: _chosen(func, args, kwargs)
    # Fused optimizers write into what they are given and return nothing.
    fused = name.startswith("_fused_") and not func._schema.returns
    return (lambda *args, **kwargs: None) if fused else None


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    names = (a.name for a in func._schema.arguments)
    return given | dict(zip(names, args, strict=False)) | kwargs


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


def _col2im(**given: Any) -> Tensor:
    """It keeps the memory that it made for as much as it sums up."""
    out: Tensor = aten.col2im.default(**given)
    kept = out.new_empty(max(out.numel(), given["self"].numel()))
    return kept.as_strided(out.shape, out.stride())


# Of sparse tensors without data, torch's own have no elements.
def _clone_of_sparse(self: Tensor, **_: Any) -> Tensor:
    if getattr(self, "of_bags", False):  # nobody else has its parts: they are taken over
        return _sparse(self._indices(), self._values(), self.shape)
    return _sparse(self._indices().clone(), self._values().clone(), self.shape)


def _rows_of_bags(grad: Tensor, indices: Tensor, num_weights: int, **_: Any) -> Tensor:
    width = grad.shape[1]
    values = grad.new_empty(indices.numel(), width)
    made = _sparse(indices.reshape(1, -1).clone(), values, (num_weights, width))
    made.of_bags = True  # type: ignore[attr-defined]
    return made


def _sparse(indices: Tensor, values: Tensor, shape: Any) -> Tensor:
    make = aten._sparse_coo_tensor_with_dims_and_tensors
    like = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device}
    made: Tensor = make(len(indices), values.dim() - 1, shape, indices, values, **like)
    return made


def _on_host(tensor: Tensor) -> bool:
    """Whether the CPU's kernels run, as they do on virtual GPUs."""
    return bool(torch._meta_registrations.device_hint(tensor) == "cpu")


def _as_of_the_host(func: Any, args: Any, kwargs: Any) -> Any:
    """What the CPU's kernel gives: it may choose another order of channels than CUDA's."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
    device = given[0].fake_device
    for tensor in given:
        tensor.fake_device = torch.device("cpu")
    made = []
    try:
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, FakeTensor)]
    finally:
        for tensor in (*given, *made):
            tensor.fake_device = device
    return out


def _log_sigmoid(self: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(self), torch.empty_like(self) if _on_host(self) else self.new_empty(0)


def _group_norm(input: Tensor, **given: Any) -> tuple[Tensor, ...]:
    """The CPU's keeps its input's order of channels, and CUDA's does not."""
    out, *rest = aten.native_group_norm.default(input, **given)
    if _on_host(input):
        out = torch.empty_like(input, memory_format=suggest_memory_format(input))
    return out, *rest


_OWN: dict[str, Callable[..., Any]] = {
    "_transformer_encoder_layer_fwd": lambda src, **_: torch.empty_like(src),
    "_native_multi_head_attention": _attention,
    **dict.fromkeys(("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"), lambda **_: False),
    **dict.fromkeys(
        ("binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss"), _loss
    ),
    "col2im": _col2im,
    "record_stream": lambda **_: None,
    "log_sigmoid_forward": _log_sigmoid,
    "native_group_norm": _group_norm,
    **dict.fromkeys(
        ("multi_margin_loss_backward", "multilabel_margin_loss_backward"),
        lambda self, **_: torch.empty_like(self),
    ),
}
