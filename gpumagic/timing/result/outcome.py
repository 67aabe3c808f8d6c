"""Collect the numbers that code gave: in what it assigned, and in its last expression's value."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Results beyond this are not kept for the comparison.
_MOST = 2**30
_DEEPEST = 20
_NUMBERS = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A result that was not kept, and its size in bytes."""

    nbytes: int


def outcome(
    globals: dict[str, Any], assigned: Iterable[str], value: Any, most: int = _MOST
) -> dict[str, Any]:
    """Detached tensors on the CPU, numbers, and `Skipped` for what is beyond `most` bytes in all.

    By the names that a person would write: ``out[0]``; ``Out`` is the last expression's value.
    """
    found: dict[str, Any] = {}
    room = most
    values = {name: globals[name] for name in assigned if name in globals}
    seen: dict[int, Any] = {}
    for first, each in [*values.items(), ("Out", value)]:
        for name, item in _leaves(first, each, seen):
            if not isinstance(item, Tensor):
                found[name] = item
                continue
            try:
                # Of a sparse one what it takes when it is no longer sparse.
                nbytes = item.numel() * item.element_size()
                found[name] = _on_host(item) if nbytes <= room else Skipped(nbytes)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                continue  # it has no numbers to show, as a tensor on the meta device
            room -= 0 if nbytes > room else nbytes
    return found


def _leaves(
    name: str, value: Any, seen: dict[int, Any], depth: int = 0
) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind in _NUMBERS:
        yield name, value
        return
    if id(value) in seen or depth > _DEEPEST:
        return
    seen[id(value)] = value
    numpy: Any = sys.modules.get("numpy")
    if issubclass(kind, Tensor):
        yield name, value
    elif numpy is not None and issubclass(kind, (numpy.generic, numpy.ndarray)):
        if value.dtype.kind in "biufc":
            one = issubclass(kind, numpy.generic)
            yield name, value.item() if one else torch.from_numpy(numpy.array(value))
    else:
        try:
            parts = [(f"{name}{step}", item) for step, item in _parts(value, kind)]
        except Exception:  # noqa: BLE001  the user's own class, which is not to be shown
            return
        for path, item in parts:
            yield from _leaves(path, item, seen, depth + 1)


def _parts(value: Any, kind: type) -> Iterable[tuple[str, Any]]:
    if issubclass(kind, (list, tuple)):
        names = getattr(kind, "_fields", None)
        return [(f".{names[n]}" if names else f"[{n}]", v) for n, v in enumerate(value)]
    if issubclass(kind, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if issubclass(kind, nn.Module):
        return [(f".{key}", item) for key, item in value.state_dict(keep_vars=True).items()]
    if dataclasses.is_dataclass(kind):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(kind)]
    return ()


def _on_host(tensor: Tensor) -> Tensor:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().to("cpu", copy=True)
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.is_quantized:
            plain = plain.dequantize()
        return plain.resolve_conj().resolve_neg()
