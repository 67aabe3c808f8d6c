"""What to copy where: new bytes for old tensors, made in full before the first tensor changes."""

import torch
from torch import Tensor, nn

from gpumagic.moving.find_tensors import Found, Left


class Plan:
    """New bytes for old tensors: made in full before the first tensor is changed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.assignments: list[tuple[Tensor, Tensor]] = []
        self.nbytes: dict[str, int] = {}
        self.sources: dict[str, dict[str, None]] = {}
        self.left: list[Left] = []

    def add(self, found: Found, new: Tensor, nbytes: int) -> None:
        self.assignments.append((found.tensor, new))
        self.nbytes[found.root] = self.nbytes.get(found.root, 0) + nbytes
        self.sources.setdefault(found.root, {}).setdefault(str(found.tensor.device))

    def copy_alone(self, found: Found) -> None:
        """Plan a tensor by its own `to`: the way of subclasses and of layouts without strides."""
        try:
            new = found.tensor.data.to(found.home or self.device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            self.left.append(Left(found.path, str(error).strip().splitlines()[0]))
        else:
            if torch._has_compatible_shallow_copy_type(found.tensor, new):
                self.add(found, new, bytes_of(found.tensor))
            else:
                self.left.append(Left(found.path, "it cannot be moved in place; use .to()"))

    def copy_family(self, family: list[Found]) -> None:
        """Plan tensors that overlap in memory, so that they overlap there too."""
        storage = family[0].tensor.untyped_storage()
        start = min(_span(f.tensor)[0] for f in family) // _ALIGNMENT * _ALIGNMENT
        end = max(_span(f.tensor)[1] for f in family)
        copies: dict[torch.device, torch.UntypedStorage] = {}
        for found in family:
            old, home = found.tensor, found.home or self.device
            copied = 0
            if home not in copies:
                flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
                flat.set_(storage, start, (end - start,), (1,))
                copies[home] = flat.to(home).untyped_storage()
                copied = end - start
            new = torch.empty(0, dtype=old.dtype, device=home)
            offset = old.storage_offset() - start // old.element_size()
            new.set_(copies[home], offset if old.numel() else 0, old.size(), old.stride())
            self.add(found, new, copied)

    def carry_out(self) -> None:
        before = [(tensor, tensor.data) for tensor, _ in self.assignments]
        try:
            for tensor, new in self.assignments:
                tensor.data = new
        except BaseException:  # an interrupt between two tensors: all or none
            for tensor, old in before:
                tensor.data = old
            raise


# A multiple of every element size: offsets stay whole when a copy begins in the middle.
_ALIGNMENT = 64


def must_move(found: Found, device: torch.device) -> bool:
    return found.tensor.device != (found.home or device)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and the one after its last."""
    size, first = tensor.element_size(), tensor.storage_offset()
    if not tensor.numel():
        return int(first * size), int(first * size)
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return int(first * size), int((first + last + 1) * size)


def families(group: list[Found]) -> list[list[Found]]:
    """Tensors of one storage, by whether they overlap: two apart need not move together."""
    families: list[list[Found]] = []
    end = -1
    for found in sorted(group, key=lambda f: _span(f.tensor)):
        start, stop = _span(found.tensor)
        if start >= end:
            families.append([])
        families[-1].append(found)
        end = max(end, stop)
    return families


def shares_with(tensor: Tensor, shared: dict[int, list[Found]]) -> str:
    """The name of a tensor that moves and overlaps with this one, or nothing."""
    if not shared or not has_plain_storage(tensor):
        return ""
    start, stop = _span(tensor)
    for found in shared.get(tensor.untyped_storage()._cdata, ()):
        first, last = _span(found.tensor)
        if first < stop and start < last:
            return found.path
    return ""


def immovable(tensor: Tensor) -> str:
    if tensor.grad_fn is not None:
        # Its graph expects a gradient on the device where it was computed.
        return "autograd tracks how it was computed; x = x.detach() in a cell before frees it"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data"
    return ""


def has_plain_storage(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
    )


def bytes_of(tensor: Tensor) -> int:
    try:
        return tensor.nbytes
    except (RuntimeError, NotImplementedError, ValueError):  # no shape yet, or no strides
        return 0
