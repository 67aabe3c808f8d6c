"""Compute the temporary memory that CUDA's operators allocate, such as for partial sums.

A rule is a function that returns the bytes of each temporary buffer. The buffers exist at the same
time. Rules follow torch's CUDA sources, such as ``setReduceConfig`` in Reduce.cuh for sums.
``tests/cuda`` compares the results with the numbers of torch's allocator on a real GPU.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd, prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gpumagic import faults
from gpumagic.virtual.virtual_gpus import gpu_of

Ints = Sequence[int]
Rule = Callable[[Any, tuple[Any, ...], Any], list[int]]
IN_PARTS = {"_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "_safe_softmax", "isinf"}
IN_PARTS |= {"masked_scatter_backward", "binary_cross_entropy_with_logits", "linalg_pinv"}
IN_PARTS.add("_trilinear")
"""Composite operators to decompose, so that their inner operators' memory is counted."""


def temporary_bytes(rule: Rule, device: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Return a rule's buffer sizes; [] if the rule fails. `%gpus --doctor` reports the error."""
    try:
        return rule(gpu_of(device).properties, args, result)
    except Exception as error:  # noqa: BLE001  a rule's bug must not stop the user's operator
        faults.keep("counting the temporary memory of an operator", error)
        return []


_THREADS, _WARP, _VECTOR = 512, 32, 4
_FEW, _MANY = 16, 256  # minimum and maximum number of values that one thread adds
_LEAST = 2**15  # a sum of fewer elements than this needs only one block of threads per output
_HALVES = (torch.float16, torch.bfloat16)


def _sum(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Return the bytes of the input's converted copy, if there is one, and of the partial sums."""
    x, out = args[0], result.dtype
    halves = x.dtype in _HALVES and out in (x.dtype, torch.float32)
    copy = [] if x.dtype is out or halves else [x.numel() * out.itemsize]
    if x.numel() < _LEAST:
        return copy
    dims = [dim % max(x.dim(), 1) for dim in _over(args)] or range(x.dim())
    layout = tuple(x.shape), x.stride(), x.storage_offset(), tuple(sorted(dims))
    return copy + _partial_sums(*layout, 4 if out in _HALVES else out.itemsize, card)


def _over(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the dims in an operator's second argument; empty if the argument has none."""
    dims = args[1] if len(args) > 1 else None
    if dims is None or isinstance(dims, (bool, torch.dtype)):
        return ()
    return (dims,) if isinstance(dims, int) else tuple(dims)


@lru_cache(maxsize=1000)
def _partial_sums(
    shape: Ints, strides: Ints, offset: int, dims: Ints, size: int, card: Any
) -> list[int]:
    """Return the bytes of the buffers for partial sums; one partial sum has `size` bytes."""
    others = sorted({*range(len(shape))}.difference(dims))
    of_output = {dim: prod(shape[d] for d in others if d > dim) for dim in others}
    reduced = _merged([(shape[dim], strides[dim]) for dim in dims])
    kept = _merged([(shape[dim], strides[dim], of_output[dim]) for dim in others])
    if not reduced:
        return []
    inputs, outputs = prod(map(itemgetter(0), reduced)), prod(map(itemgetter(0), kept))
    if not kept or reduced[0][1] < kept[0][1]:  # neighboring threads compute the same output
        adjacent = len(reduced) == reduced[0][1] == 1 and inputs > 128
        width = inputs // _VECTOR if adjacent else inputs
        return _shared((width, outputs), inputs, outputs, size, card, across=1)
    # A thread computes as many adjacent outputs as the alignment allows.
    steps = (dim[1] for dim in reduced + kept[1:])
    vector = gcd(_VECTOR, offset, kept[0][0], *steps) if kept[0][1] == 1 else 1
    return _shared((outputs // vector, inputs), inputs, outputs, size, card, vector)


def _shared(
    sides: Ints, inputs: int, outputs: int, size: int, card: Any, vector: int = 1, across: int = 0
) -> list[int]:
    """Return the buffers' bytes if several thread blocks compute one output together, else [].
    `sides` is the work along x and y. With `across`, the threads along x compute one output."""
    most = _THREADS // vector
    # Round each side down to a power of two, at most `most`.
    wide, high = (min(1 << max(side, 1).bit_length() - 1, most) for side in sides)
    block_y = min(high, most // min(wide, _WARP))
    block_x = min(wide, most // block_y)
    in_row, per_block = (block_x, 1) if across else (1, block_x)
    if -(-inputs // in_row) < min(block_y * _FEW, _MANY):
        return []  # each row of threads computes its own outputs
    each = -(-inputs // (block_y * in_row))
    grid = -(-(outputs // vector) // per_block)
    resident = card.max_threads_per_multi_processor // (block_x * block_y)
    fill = card.multi_processor_count * resident
    if each < _MANY or grid > fill:
        return []
    blocks = max(min(-(-fill // grid), -(-each // _FEW)), -(-each // _MANY))
    return [size * outputs * blocks * per_block * vector, 4 * grid] if blocks > 1 else []


def _merged(dims: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Sort dims by their first stride, and merge contiguous dims. A dim is (size, *strides)."""
    found: list[tuple[int, ...]] = []
    for size, *steps in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if found and [found[-1][0] * step for step in found[-1][1:]] == steps:
            found[-1] = (found[-1][0] * size, *found[-1][1:])
        else:
            found.append((size, *steps))
    return found


_SORTED_IN_A_BLOCK = 4096  # a row of at most this many elements is sorted by one block of threads


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def _radix_sort(count: int, key: int, bits: int = 0) -> int:
    """Return the bytes for sorting `count` keys of `key` bytes, with values of 8 bytes."""
    if count <= _SORTED_IN_A_BLOCK:
        return 1
    tile, passes = 384 * (12 if key == 8 else 14), -(-(bits or 8 * key) // 8)
    tiles = -(-count // tile)
    return _aligned(key * count) + _aligned(8 * count) + 1024 * tiles + 2048 * passes + 511


def _sort(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    x = args[0]
    dim = next((n for n in args[1:] if isinstance(n, int) and not isinstance(n, bool)), -1)
    count, size, length = x.numel(), x.element_size(), x.shape[dim] if x.dim() else 1
    if count <= 1:
        return []
    if length <= _SORTED_IN_A_BLOCK:
        return [8 * length]
    if count == length:
        return [8 * count, _radix_sort(count, size)]
    copies = [] if dim % x.dim() == x.dim() - 1 else [size * count, size * count, 8 * count]
    return [*copies, 8 * count, 8 * count, size * count, _radix_sort(count, size)]


def _indices(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Return the bytes of the masks' True positions, and of the buffers for sorting indices."""
    x, dims, plain, masks = args[0], 0, [], []
    for index in args[1]:
        of_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        if index is None:
            plain.append(x.shape[dims])
        elif of_mask:
            masks.append(index.dim())
        dims += index.dim() if of_mask else 1
    values = args[2] if len(args) > 2 else result  # only `index_put` gets values
    count = values.numel() // max(prod(plain) * prod(x.shape[dims:]), 1)
    if values is not result and values.numel() == 1 and masks:
        return []  # torch runs this call as a masked_fill
    taken = [8 * count * n for n in masks]
    if any(args[3:4]) and count:  # to accumulate, CUDA sorts the indices
        taken += [*[8 * count] * 4, _radix_sort(count, 8, max(x.numel(), 1).bit_length())]
    return taken


def _masked_scatter(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    x, mask = args[0], args[1]
    expanded = [] if mask.shape == x.shape else [x.numel()]
    tiles = 32 + -(-x.numel() // (128 * 7))  # tiles of CUDA's prefix sum
    return [*expanded, 8 * x.numel(), _aligned(2 * 8 * tiles) + 511]


def _loss(card: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Return the bytes of the elements' losses and of the partial sums; [] without a reduction."""
    x, target = args[0], args[1]
    if result.numel() == x.numel() > 1 or (result.dim() and x.dim()):
        return []
    count, size = prod(torch.broadcast_shapes(x.shape, target.shape)), x.element_size()
    return [count * size, *_partial_sums((count,), (1,), 0, (0,), max(size, 4), card)]


RULES: dict[str, Rule] = {
    "soft_margin_loss_backward": lambda _, args, out: [out.nbytes] * 2,
    "masked_select": lambda _, args, out: [8 * out.numel() * max(1, *(a.dim() for a in args))],
    "_softmax_backward_data": lambda _, args, out: [args[0].nbytes],
    "_cdist_backward": lambda _, args, out: [
        args[4].numel() * args[1].shape[-1] * args[1].element_size()
    ],
    "_pdist_backward": lambda _, args, out: [max(args[1].shape[0] - 1, 0) * args[1].nbytes],
    "equal": lambda _, args, out: (
        [args[0].numel(), 1] if args[0] is not args[1] and args[0].shape == args[1].shape else []
    ),
    **dict.fromkeys(
        ("all", "any"),
        lambda _, args, out: [args[0].numel() == 1 and args[0].dtype is not torch.bool],
    ),
    "bincount": lambda _, args, out: [8] * (2 + any(isinstance(x, Tensor) for x in args[1:])),
    "nonzero": lambda _, args, out: [] if out.numel() else [4],
    "count_nonzero": lambda _, args, out: [args[0].numel(), 8 * args[0].numel()],
    "unfold_backward": lambda _, args, out: [8 * out.shape[args[2]]] if out.dim() else [],
    "_chunk_cat": lambda _, args, out: [1],
    "roll": lambda _, args, out: [out.nbytes] if len(_over(args)) > 1 else [],
    **dict.fromkeys(("sum", "mean", "prod", "nansum"), _sum),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _loss),
    "sort": _sort,
    "argsort": lambda card, args, out: [args[0].nbytes, *_sort(card, args, out)],
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "index_put_"), _indices),
    **dict.fromkeys(("_index_put_impl_", "_unsafe_index_put"), _indices),
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), _masked_scatter),
}
"""Rules by operator name, without overload. For other operators, no temporary memory is counted."""
