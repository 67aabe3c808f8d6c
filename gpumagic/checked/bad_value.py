"""Describe a value out of its bounds: the variable, the value and its place, the likely cause."""

import math
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from gpumagic.checked.bounds import Bounded, Find
from gpumagic.checked.failed_call import FailedCall
from gpumagic.ledger.attribute import uncounted


class CheckedIndexError(IndexError):
    """An index or a label is out of its bounds: found by `gpumagic.check`."""


class CheckedValueError(ValueError):
    """A probability is out of its bounds: found by `gpumagic.check`."""


def find_bad_value(finds: list[Find], args: Any, kwargs: Any) -> Exception | None:
    """Return the error for the first value that is out of its bounds in a call, or None.

    May fail for arguments that torch refuses.
    """
    with uncounted(), torch._C.DisableTorchFunction():
        for find in finds:
            for bounded in find(args, kwargs):
                if text := _described(bounded, args, kwargs):
                    is_float = bounded.values.is_floating_point()
                    return CheckedValueError(text) if is_float else CheckedIndexError(text)
    return None


def _described(bounded: Bounded, args: Any, kwargs: Any) -> str:
    """Return the first value that is out of its bounds, in words; empty if none is."""
    values, low, high = bounded.values, bounded.low, bounded.high
    if not readable(values) or values.dtype == torch.bool or values.is_complex():
        return ""
    both = torch.aminmax(values.detach())  # both are NaN if a value is
    # One wait on a GPU; on the CPU two reads are faster.
    ends = torch.stack(both).tolist() if values.is_cuda else [each.item() for each in both]
    if low <= ends[0] and ends[1] <= high:
        return ""
    values = values.detach().cpu()
    bad = ~((values >= low) & (values <= high)) & (values != bounded.ignored)
    if not bad.any():
        return ""
    place, wrong, value = first(values, bad)
    call = FailedCall(args, kwargs)
    owner = call.name(bounded.of) if bounded.of else None
    has = "" if owner is None else f"{owner} has " if owner else "there are "
    text = f"{call.expression}{call.name(bounded.at) or 'the index'}{place} = {value:.6g}, "
    text += f"but {has}{bounded.bound}"
    if wrong > 1:
        text += f"; {wrong} of {values.numel()} are out of range"
    same = bool((values[bad] == value).all())
    return f"{text}. {_cause(bounded, value, *ends, same=same)}".removesuffix(". ")


def _cause(bounded: Bounded, value: float, least: float, largest: float, *, same: bool) -> str:
    """Return the likely cause, if the data shows it; `same`: all bad values are this one."""
    index, rows = not bounded.values.is_floating_point(), " rows: " in bounded.bound
    causes = {
        "--check nan finds where NaN is made": math.isnan(value),
        "These look like logits: use sigmoid or softmax first, or a loss with logits": not index
        and least < 0 < largest,
        f"{value} often marks no class: ignore_index={value} leaves it out": same
        and bounded.ignored is not None
        and value in (-1, 255),
        f"They run from 1 to {value}: subtract 1": same
        and value == bounded.high + 1
        and least == 1,
        f"Only {value} is beyond: a token (padding?) that was added later": same
        and value > bounded.high
        and rows,
        f"{value} does not count from the end here": index and same and value < 0 == bounded.low,
    }
    return next((text for text, is_it in causes.items() if is_it), "")


def readable(value: Any) -> bool:
    """Whether a value is a tensor with data: no subclass, not fake, not in `vmap`, not captured."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
        return False
    if value.is_meta or is_functorch_wrapped_tensor(value) or not value.numel():
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())


def first(values: Tensor, wrong: Tensor) -> tuple[str, int, Any]:
    """Return the place of the first wrong value, ``"[3, 7]"``, how many there are, the value."""
    places = wrong.nonzero()
    place = places[0].tolist()
    return str(place) if place else "", len(places), values[tuple(place)].item()
