"""Compute what a reduction takes beside its result on CUDA: partial results and semaphores.

Facts of ATen/native/cuda/Reduce.cuh (``setReduceConfig``). Where an output is too much work for one
block of threads, several blocks share it and meet in global memory. How many depends on the shape,
the strides and the card's multiprocessors.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any

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
    """The same of a contiguous tensor."""
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
    across = not kept or reduced[0][1] < kept[0][1]  # threads beside each other share an output
    width, height = (inputs, outputs) if across else (outputs, inputs)
    vector = 1 if across else _vector(offset, reduced, kept)
    if across and len(reduced) == reduced[0][1] == 1 and width > 128 and values >= _VECTOR:
        width //= _VECTOR
    width //= vector
    return _shared(across, vector, (width, height), inputs, outputs, size, card)


def _vector(offset: int, reduced: list[tuple[int, ...]], kept: list[tuple[int, ...]]) -> int:
    """How many outputs beside each other a thread has: as many as memory's alignment lets it."""
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
    """The buffers where blocks of threads share outputs; none where they do not."""
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
    """The dims by stride, those as one that lie in memory as one (sizes first, then strides)."""
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
