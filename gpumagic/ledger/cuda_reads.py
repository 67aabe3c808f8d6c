"""List the bytes that torch's CUDA code copies and reads within an operator.

A real GPU shows most of this by the operators that such code calls. A virtual GPU runs the operator
as a whole, and `tests/cuda` compares both with the CUDA runtime's own log.
"""

from typing import Any

import torch

from gpumagic.ledger.attribute import HOST

COUNT = 4
"""Bytes of a number of elements that an operator's own code reads."""
WAITS = (
    *("_unique2", "bincount", "equal", "histc", "masked_select", "nonzero", "repeat_interleave"),
    *("unique_consecutive", "unique_dim"),
)
"""Operators for which the host may wait, because a value or a shape depends on the data."""
INDEXING = (
    *("index", "_unsafe_index", "index_put_", "index_put", "_index_put_impl_"),
    "_unsafe_index_put",
)
_MASKS = (torch.bool, torch.uint8)


def crossing(target: Any, source: Any, non_blocking: bool) -> int:
    """Bytes that `target.copy_(source)` sends from one device to another."""
    nbytes: int = target.nbytes
    if target.dtype is source.dtype:
        return nbytes
    # The host converts for blocking copies, a GPU for others, and for copies from GPU to GPU.
    here, there = source.get_device() == HOST, target.get_device() == HOST
    if (here or there) and here is bool(non_blocking):
        nbytes = target.numel() * source.element_size()
    return nbytes


def reads(operator: str, self: Any, *args: Any, output_size: Any = None, **_: Any) -> list[int]:
    """The bytes of each read for which the host waits; empty if it does not wait."""
    if operator in INDEXING:
        return _reads_of_masks(operator, *args)
    if operator == "equal":
        return [] if _known_equal(self, args[0]) else [1]
    if operator == "repeat_interleave":  # the last of the sums, and whether one is negative
        return [8, 1] if output_size is None else []
    if operator == "histc":
        low, high = (*args[1:], 0, 0)[:2]
        return [self.element_size()] * 2 if low == high else []
    if operator == "bincount":  # the smallest and the largest
        return [self.element_size()] * 2 if self.numel() else []
    return [COUNT] if self.numel() or operator == "nonzero" else []


def brought(operator: str, indices: Any, *values: Any) -> list[tuple[Any, str, int, bool]]:
    """What an indexed GPU is sent: the tensor, the operator, the bytes, whether the host waits."""
    # Composite operators leave what is on several devices to one within, which sends it.
    if operator not in ("index", "_unsafe_index", "_index_put_impl_"):
        return []
    found = []
    for index in indices:
        if index is not None and index.get_device() == HOST:
            mask = index.dtype in _MASKS
            nbytes = 8 * index.dim() * int(index.count_nonzero()) if mask else index.nbytes
            found.append((index, "index", nbytes, not mask))
    if values and values[0].get_device() == HOST and not _fills(indices, *values):
        found.append((values[0], "copy_", values[0].nbytes, True))
    return found


def _reads_of_masks(operator: str, indices: Any, *values: Any) -> list[int]:
    if operator.startswith("index_put") and any(
        tensor is not None and tensor.get_device() == HOST for tensor in (*indices, values[0])
    ):
        return []
    masks = [i for i in indices if i is not None and i.dtype in _MASKS and i.get_device() != HOST]
    return [] if _fills(indices, *values) else [COUNT] * len(masks)


def _fills(indices: Any, value: Any = None, accumulate: bool = False, *_: Any) -> bool:
    """Whether it is one number for one mask: `masked_fill_`, which reads nothing."""
    given = [index for index in indices if index is not None]
    if value is None or accumulate or value.numel() != 1 or value.get_device() != HOST:
        return False
    return len(given) == 1 and given[0].dtype in _MASKS and given[0].get_device() != HOST


def _known_equal(self: Any, other: Any) -> bool:
    """Whether `torch.equal` need not look at the numbers."""
    if self.shape != other.shape or not self.numel():
        return True
    return bool(self.data_ptr() == other.data_ptr() and self.stride() == other.stride())
