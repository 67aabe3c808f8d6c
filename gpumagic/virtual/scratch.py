"""Compute the temporary memory that CUDA's operators take: partial sums, sorted copies.

A function gets the card, the operator's arguments and its result, and returns the bytes that are
allocated at the same moment and freed again. Facts are from torch's CUDA sources, for reductions
from ATen/native/cuda/Reduce.cuh (``setReduceConfig``): several thread blocks share a large output
and meet in global memory. torch's real allocator is compared in ``tests/cuda``.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from gpumagic import faults
from gpumagic.virtual.virtual_gpus import gpu_of

_THREADS, _WARP, _VECTOR = 512, 32, 4
_FEW, _MANY = 16, 256
"""Values for each thread, at least and at most: between them blocks are added or left out."""
LEAST = 2**15
"""Elements below which no reduction needs more than one block for an output."""


def of_tensor(x: Any, dims: Iterable[int], size: int, card: Any, values: int = 4) -> list[int]:
    """The bytes of each buffer for reducing `x` over `dims`, with partial results of `size` bytes.

    No dims are all of them. `values`: how many each thread loads at once.
    """
    if x.numel() < LEAST:
        return []
    dims = tuple(sorted(dim % max(x.dim(), 1) for dim in dims)) or tuple(range(x.dim()))
    layout = tuple(x.shape), x.stride(), x.storage_offset()
    return _buffers(*layout, dims, size, values, _processors(card))


def of_shape(shape: Sequence[int], dims: Sequence[int], size: int, card: Any) -> list[int]:
    """Return the bytes of each buffer for reducing a contiguous tensor."""
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return _buffers(tuple(shape), strides, 0, tuple(dims), size, 4, _processors(card))


def _processors(card: Any) -> tuple[int, int]:
    return card.multi_processor_count, card.max_threads_per_multi_processor


@lru_cache(maxsize=1000)
def _buffers(
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dims: Sequence[int],
    size: int,
    values: int,
    card: tuple[int, int],
) -> list[int]:
    every, of_output, outputs, inputs = range(len(shape)), {}, 1, 1
    for dim in reversed(every):
        if dim in dims:
            inputs *= shape[dim]
        else:
            of_output[dim] = outputs
            outputs *= shape[dim]
    reduced = _merged([(shape[dim], strides[dim]) for dim in dims])
    kept = _merged([(shape[d], strides[d], of_output[d]) for d in every if d not in dims])
    if not reduced:
        return []
    across = not kept or reduced[0][1] < kept[0][1]  # neighboring threads share an output
    width, height = (inputs, outputs) if across else (outputs, inputs)
    vector = 1 if across else _vector(offset, reduced, kept)
    if across and len(reduced) == reduced[0][1] == 1 and width > 128 and values >= _VECTOR:
        width //= _VECTOR
    width //= vector
    return _shared(across, vector, (width, height), inputs, outputs, size, card)


def _vector(offset: int, reduced: list[tuple[int, ...]], kept: list[tuple[int, ...]]) -> int:
    """Return how many adjacent outputs a thread computes: as many as the alignment allows."""
    if kept[0][1] != 1:
        return 1
    return gcd(_VECTOR, offset, kept[0][0], *(dim[1] for dim in reduced + kept[1:]))


def _shared(
    across: bool,
    vector: int,
    sides: tuple[int, int],
    inputs: int,
    outputs: int,
    size: int,
    card: tuple[int, int],
) -> list[int]:
    """Return the buffers for blocks of threads that share outputs; empty if none do."""
    most = _THREADS // vector
    wide, high = min(_power(sides[0]), most), min(_power(sides[1]), most)
    block_x = min(wide, _WARP)
    block_y = min(high, most // block_x)
    block_x = min(wide, most // block_y)
    each = -(-inputs // block_x) if across else inputs
    if each < min(block_y * _FEW, _MANY):
        return []  # each row of threads has outputs of its own
    each = -(-inputs // (block_y * (block_x if across else 1)))
    grid = -(-(outputs // vector) // (1 if across else block_x))
    fill = card[0] * (card[1] // (block_x * block_y))
    if each < _MANY or grid > fill:
        return []
    blocks = max(min(-(-fill // grid), -(-each // _FEW)), -(-each // _MANY))
    if blocks <= 1:
        return []
    return [size * outputs * blocks * (1 if across else block_x * vector), 4 * grid]


def _merged(dims: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the dims by stride (sizes first, then strides); contiguous ones are merged."""
    found: list[tuple[int, ...]] = []
    for size, *steps in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if found and [found[-1][0] * step for step in found[-1][1:]] == steps:
            found[-1] = (found[-1][0] * size, *found[-1][1:])
        else:
            found.append((size, *steps))
    return found


def _power(n: int) -> int:
    """The largest power of two that is not above `n`."""
    return 1 << max(n, 1).bit_length() - 1


Rule = Callable[[Any, tuple[Any, ...], Any], list[int]]
IN_PARTS = frozenset(
    [
        *("isinf", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "_safe_softmax"),
        *("masked_scatter_backward", "binary_cross_entropy_with_logits", "linalg_pinv"),
        "_trilinear",
    ]
)
"""Composite operators whose parts hold memory: CUDA runs them one by one."""
_HALVES = (torch.float16, torch.bfloat16)
_SORTED_IN_A_BLOCK = 4096
"""Elements of a row that one block of threads sorts without more memory."""


def rule_of(name: str) -> Rule | None:
    """Return the rule of an operator, by its name without overload; None if it takes nothing."""
    return _RULES.get(name)


def temporary_bytes(rule: Rule, device: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Return the bytes that a rule gives for a GPU; empty if it fails, which the doctor shows."""
    try:
        return rule(gpu_of(device).properties, args, result)
    except Exception as error:  # noqa: BLE001  of ours: the user's operator has succeeded
        faults.keep("counting the temporary memory of an operator", error)
        return []


def _over(args: tuple[Any, ...], at: int) -> tuple[int, ...]:
    """Return the dims that an argument names; empty if it names all."""
    dims = args[at] if len(args) > at else None
    if dims is None or isinstance(dims, (bool, torch.dtype)):
        return ()
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _sum(at: int = 1) -> Rule:
    """Rule of a sum, in at least single precision; other types take a copy."""

    def rule(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
        x, out = args[0], result.dtype
        halves = x.dtype in _HALVES and out in (x.dtype, torch.float32)
        taken = []
        if x.dtype is not out and not halves:
            taken = [x.numel() * out.itemsize]
        size = 4 if out in _HALVES else out.itemsize
        return taken + of_tensor(x, _over(args, at), size, card)

    return rule


def _partial(size: int | None = None, values: int = 4) -> Rule:
    """Rule of a reduction with partial results of this many bytes, by default one element's."""

    def rule(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
        x = args[0]
        each = size or x.element_size()
        if values < 4 and x.dtype is torch.float64:
            each *= 2
        return of_tensor(x, _over(args, 1), each, card, values)

    return rule


def _logical(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    x = args[0]
    if x.numel() == 1:
        return [1] if x.dtype is not torch.bool else []
    return of_tensor(x, _over(args, 1), 1, card)


def _loss(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Return the losses of all elements, and the partial sums of their mean."""
    x, target = args[0], args[1]
    if result.numel() == x.numel() > 1 or (result.dim() and x.dim()):
        return []
    count, size = prod(torch.broadcast_shapes(x.shape, target.shape)), x.element_size()
    return [count * size, *of_shape((count,), (0,), max(size, 4), card)]


def _scan(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    x = args[0]
    copy = [x.numel() * result.element_size()] if x.dtype is not result.dtype else []
    if not x.dim() or x.numel() != x.shape[args[1]] or not x.numel():
        return copy
    return [*copy, _scanned(x.numel(), result.element_size())]


def _scanned(count: int, size: int) -> int:
    """Return the bytes of cub's scan of elements of `size` bytes: the state of each tile."""
    tiles = 32 + -(-count // (128 * (7 if size == 8 else 15)))
    return _aligned(2 * size * tiles) + 511


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def radix_sort(count: int, key: int, value: int, bits: int = 0) -> int:
    """Return the bytes of cub's sort of keys and values, given their number and sizes."""
    if count <= _SORTED_IN_A_BLOCK:
        return 1
    tile, passes = 384 * (12 if key == 8 else 14), -(-(bits or 8 * key) // 8)
    tiles = -(-count // tile)
    return _aligned(key * count) + _aligned(value * count) + 1024 * tiles + 2048 * passes + 511


def _sort(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    x = args[0]
    numbers = [each for each in args[1:] if isinstance(each, int) and not isinstance(each, bool)]
    dim = numbers[0] if numbers else -1
    count, size, length = x.numel(), x.element_size(), x.shape[dim] if x.dim() else 1
    if count <= 1:
        return []
    if length <= _SORTED_IN_A_BLOCK:
        return [8 * length]
    copies = [] if dim % x.dim() == x.dim() - 1 else [size * count, size * count, 8 * count]
    if count == length:
        return [8 * count, radix_sort(count, size, 8)]
    both = radix_sort(count, size, 8)
    return [*copies, 8 * count, 8 * count, size * count, both]


def _indices(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Return the positions that each mask among the indices picks, 64 bits for each of its dims."""
    x, dims, plain, masks = args[0], 0, [], []
    for index in args[1]:
        of_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        if index is None:
            plain.append(x.shape[dims])
        elif of_mask:
            masks.append(index.dim())
        dims += index.dim() if of_mask else 1
    values = args[2] if len(args) > 2 else result  # of `index_put`
    found = values.numel() // max(prod(plain) * prod(x.shape[dims:]), 1)
    if values is not result and values.numel() == 1 and masks:
        return []  # it is a masked_fill
    sorts = len(args) > 3 and args[3]
    return [8 * found * n for n in masks] + (_accumulated(found, x.numel()) if sorts else [])


def _accumulated(count: int, numel: int) -> list[int]:
    if not count:
        return []
    bits = max(numel, 1).bit_length()
    return [*[8 * count] * 4, radix_sort(count, 8, 8, bits)]


def _masked_scatter(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    x, mask = args[0], args[1]
    expanded = [] if mask.shape == x.shape else [x.numel()]
    return [*expanded, 8 * x.numel(), _scanned(x.numel(), 8)]


def _multinomial(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    x, wanted = args[0], args[1]
    if len(args) > 2 and args[2]:
        scan = [] if x.dim() > 1 else [_scanned(x.shape[-1], x.element_size())]
        return [x.nbytes] * 3 + scan
    return [x.nbytes, 4, 4, 1, 1, *([8] if wanted > 1 else [])]


def _group_norm_backward(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    batch, channels, groups = args[5], args[6], args[8]
    size = max(args[1].element_size(), 4)
    whole, part = size * batch * channels, size * batch * groups
    return [whole, whole, part, part, *([whole] if args[4] is not None else [])]


def _rows(x: Tensor) -> tuple[int, int]:
    """Return how many blocks of threads share a channel if channels are last, and the channels."""
    channels = x.shape[1]
    rows = x.numel() // max(channels, 1)
    wide = 1 << min(channels, 32).bit_length() - 1
    high = min(1 << max(-(-rows // 16), 1).bit_length() - 1, 512 // wide)
    blocks = min(-(-rows // (high * 16)), 128)
    return (blocks if blocks >= 8 else 0), channels


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 2 or (not x.is_contiguous() and x.stride(1) == 1)


def _batch_norm(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    if not (_channels_last(args[0]) and args[5]):
        return []
    blocks, channels = _rows(args[0])
    return [16 * blocks * channels, 4] if blocks else []


def _batch_norm_backward(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    if not (_channels_last(args[1]) and args[7]):
        return []
    return [4 * args[1].shape[1]] * 2


def _layer_norm_backward(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    x, width = args[1], prod(args[2])
    rows = x.numel() // max(width, 1)
    if rows <= 2**16 or width // 32 >= card.multi_processor_count // 2 or not args[7][1]:
        return []
    parts = -(-rows // 32), width
    size = max(x.element_size(), 4)
    both = [size * prod(parts)] * 2
    return [*both, size * width, *of_shape(parts, (0,), size, card)]


# Rules of one formula get the operator's arguments and its result.
_FORMULAS: dict[str, Callable[..., list[int]]] = {
    "soft_margin_loss_backward": lambda args, result: [result.nbytes] * 2,
    "masked_select": lambda args, result: [8 * result.numel() * max(1, *(a.dim() for a in args))],
    "_softmax_backward_data": lambda args, result: [args[0].nbytes],
    "native_group_norm": lambda args, result: (
        [
            max(args[0].element_size(), 4) * args[3] * args[4],
        ]
        * 2
    ),
    "_foreach_norm": lambda args, result: [
        4 * len(args[0]) * max((-(-x.numel() // 65536) for x in args[0]), default=0)
    ],
    "_cdist_backward": lambda args, result: [
        args[4].numel() * args[1].shape[-1] * args[1].element_size()
    ],
    "_pdist_backward": lambda args, result: [max(args[1].shape[0] - 1, 0) * args[1].nbytes],
    "equal": lambda args, result: (
        [args[0].numel(), 1] if args[0] is not args[1] and args[0].shape == args[1].shape else []
    ),
    "bincount": lambda args, result: [8] * (3 if len(args) > 1 and args[1] is not None else 2),
    "nonzero": lambda args, result: [] if result.numel() else [4],
    "histc": lambda args, result: [1, 1] if len(args) < 3 or args[2] == args[3] else [],
    "count_nonzero": lambda args, result: [args[0].numel(), 8 * args[0].numel()],
    "unfold_backward": lambda args, result: [8 * result.shape[args[2]]] if result.dim() else [],
    "_chunk_cat": lambda args, result: [1],
    "roll": lambda args, result: [result.nbytes] if len(_over(args, 1)) > 1 else [],
}


def _ignoring_the_card(formula: Callable[..., list[int]]) -> Rule:
    return lambda card, args, result: formula(args, result)


_RULES: dict[str, Rule] = {
    **{name: _ignoring_the_card(formula) for name, formula in _FORMULAS.items()},
    **dict.fromkeys(("sum", "mean", "prod", "nansum"), _sum()),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _sum(2)),
    **dict.fromkeys(("amax", "amin", "max", "min"), _partial()),
    **dict.fromkeys(("argmax", "argmin"), _partial(16)),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _partial(16, 2)),
    **dict.fromkeys(("all", "any"), _logical),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _loss),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), _scan),
    "sort": _sort,
    "argsort": lambda card, args, result: [args[0].nbytes, *_sort(card, args, result)],
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "index_put_"), _indices),
    **dict.fromkeys(("_index_put_impl_", "_unsafe_index_put"), _indices),
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), _masked_scatter),
    "multinomial": _multinomial,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(("native_batch_norm", "_batch_norm_with_update"), _batch_norm),
    **dict.fromkeys(("native_batch_norm_backward", "batch_norm_backward"), _batch_norm_backward),
    "native_layer_norm_backward": _layer_norm_backward,
}
