"""Tell by dry runs whether a smaller batch, or another way to compute it, would fit."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from gpumagic.display.units import size
from gpumagic.memory.causes import Cause
from gpumagic.memory.dry_peaks import DryPeaks, largest_that_fits
from gpumagic.memory.out_of_memory import Remedy
from gpumagic.memory.shortage import Situation
from gpumagic.mismatch.read.rest_of_code import RestOfCode
from gpumagic.mismatch.read.syntax import in_own_scope
from gpumagic.usercode.variables import names_read

# What saves less of what is needed than this is not worth a line.
_WORTH = 0.05
_CUTS = {"split", "chunk", "narrow", "select", "index_select", "unbind"}
# A pass may keep so much of what is needed: a value of its loss.
_GROWS = 0.01
# A part of a Sequential that is computed again is as long as those that are kept are many.
_LEAST_LAYERS = 4


class _Batch:
    """The code in whose frame a batch stands, and what it needs."""

    def __init__(self, s: Situation) -> None:
        self.s = s
        self.backward = any(rest.backward for rest in s.rests)
        self.peaks, self.names, numbers = _frame_with_batch(s)
        self.size = next((t.shape[0] for t in self.names.values()), 0)
        self.needs = self.peaks.needed() if self.peaks and self.size > 1 else None
        self.room = self.peaks.room_to_spare() if self.peaks else 0
        if self.too_large and numbers and self.needed(self.size // 2) is None:
            self.names |= numbers  # `torch.zeros(batch_size)` for each batch

    @property
    def too_large(self) -> bool:
        """Whether the dry run fails where the cell did."""
        return self.needs is not None and self.needs > self.room

    def needed(self, batch: int) -> int | None:
        """What it needs with so many of the batch."""
        assert self.peaks is not None
        cut = {n: v[:batch] if type(v) is Tensor else batch for n, v in self.names.items()}
        return self.peaks.needed(cut)

    def saves(self, do: str, within: Any) -> Iterator[Remedy]:
        """Another way to compute the same, if that needs less."""
        assert self.peaks is not None
        assert self.needs is not None
        needs = self.peaks.needed(within=within)
        if needs is not None and self.needs - needs >= _WORTH * self.needs:
            yield Remedy(do, self.needs - needs, self.fits(needs))

    @cached_property
    def grows(self) -> int | None:
        """What each pass of the innermost loop keeps; None where that is not known."""
        return self.peaks.grows() if self.peaks is not None else None

    @cached_property
    def settled(self) -> bool:
        """Whether no pass of any loop around keeps more than the one before."""
        frame = self.peaks.frame if self.peaks is not None else None
        at = next((n for n, rest in enumerate(self.s.rests) if rest.frame is frame), None)
        return at is not None and all(map(self._keeps_nothing, self.s.rests[at:]))

    def _keeps_nothing(self, rest: RestOfCode) -> bool:
        if len(rest.loops) > 1 or any(map(in_own_scope, rest.frame.candidates)):
            return False  # what is followed is the innermost loop
        if self.peaks is not None and rest.frame is self.peaks.frame:
            return self.grows == 0
        outer = DryPeaks(self.s, rest) if rest.loops else None
        return outer is None or (outer.possible and outer.grows() == 0)

    def fits(self, needs: int) -> bool | None:
        """Whether the cell then runs to its end; None where that is not shown for all passes."""
        if needs > self.room:
            return None if self.grows else False
        return self.settled or None


def _frame_with_batch(s: Situation) -> tuple[DryPeaks | None, dict[str, Any], dict[str, Any]]:
    """The innermost frame that can be followed and sees a whole step, its batch, and the numbers
    that are as large."""
    for rest in s.rests:
        peaks = DryPeaks(s, rest)
        if not peaks.possible or not (rest.frame.at_top or peaks.loops or rest.backward):
            continue
        read = set(names_read(ast.Module(peaks.code, [])))
        named = {name: value for name, value in peaks.names.items() if name in read}
        tensors = {n: v for n, v in named.items() if type(v) is Tensor and v.dim()}
        largest = max(tensors.values(), key=lambda t: t.nbytes, default=None)
        if largest is not None and not _is_cut(peaks.code, tensors, largest):
            count = largest.shape[0]
            numbers = {n: v for n, v in named.items() if type(v) is int and v == count}
            return peaks, {n: t for n, t in tensors.items() if t.shape[0] == count}, numbers
    return None, {}, {}


def _is_cut(code: list[ast.stmt], tensors: dict[str, Tensor], largest: Tensor) -> bool:
    """Whether code reads a part of a tensor, of which the whole says nothing."""
    nodes = [node for stmt in code for node in ast.walk(stmt)]
    parts = [n.value for n in nodes if isinstance(n, ast.Subscript)]
    parts += [n.value for n in nodes if isinstance(n, ast.Attribute) and n.attr in _CUTS]
    parts += [n.iter for n in nodes if isinstance(n, (ast.For, ast.comprehension))]
    return any(tensors.get(getattr(part, "id", "")) is largest for part in parts)


def tried(s: Situation, cause: Cause) -> Cause:
    """The cause, its first remedy told to let the cell fit or not, where a dry run can tell."""
    peaks = DryPeaks(s, s.rests[-1]) if cause.gone is not None else None
    if peaks is None or peaks.loops or not peaks.possible or cause.gone is None:
        return cause
    first, *rest = cause.remedies
    needs = peaks.needed(gone=cause.gone)
    if needs is None:
        return cause
    first = replace(first, fits=needs <= peaks.room(first.gives or 0))
    return replace(cause, remedies=(first, *rest))


def by_dry_run(s: Situation) -> Cause | None:
    """A batch that is too large, or a forward pass that keeps what no backward pass needs."""
    batch = _Batch(s)
    if not batch.too_large or batch.needs is None or batch.grows is None:
        return None
    if batch.grows > _GROWS * batch.needs:
        why = f"each pass of the loop needs {size(batch.grows)} more than the one before"
        return Cause("loop", why)
    remedies = [*_smaller(batch)]
    if not batch.backward and torch.is_grad_enabled():
        found = [*batch.saves("`with torch.no_grad():` around it saves", torch.no_grad)]
        if found:
            why = f"the forward pass keeps {size(found[0].gives)} for a backward pass; none follows"
            return Cause("no backward", why, (*found, *remedies))
    remedies += _in_other_ways(batch)
    why = (
        f"a batch of {batch.size:,} ({', '.join(batch.names)}) needs {size(batch.needs)} beside "
        f"what is held, and {size(batch.room)} are left for it"
    )
    return Cause("batch", why, tuple(remedies))


def _smaller(batch: _Batch) -> Iterator[Remedy]:
    """The largest batch that fits."""
    assert batch.needs is not None
    values = range(1, batch.size + 1)
    found = largest_that_fits(values, batch.needed, batch.needs, batch.room)
    if found is None:
        return
    fits, needs = found
    steps = -(-batch.size // fits)
    added = f" (the gradients of {steps} added up)" if batch.backward else ""
    do = f"a batch of {fits:,} instead of {batch.size:,}{added} saves"
    yield Remedy(do, batch.needs - needs, batch.settled or None)


def _in_other_ways(batch: _Batch) -> Iterator[Remedy]:
    def narrow() -> Any:
        return torch.autocast("cuda", dtype=torch.bfloat16)

    yield from batch.saves('`with torch.autocast("cuda", torch.bfloat16):` saves', narrow)
    assert batch.peaks is not None
    for name, value in batch.peaks.names.items():
        if type(value) is nn.Sequential and len(value) >= _LEAST_LAYERS:
            parts = max(int(len(value) ** 0.5), 2)
            do = (
                f"`checkpoint_sequential({name}, {parts}, …)`, which computes what lies between "
                "again, saves"
            )
            yield from batch.saves(do, partial(_checkpointed, value, parts))


@contextmanager
def _checkpointed(module: nn.Sequential, parts: int) -> Iterator[None]:
    """In the process of a dry run, where nothing needs to be put back."""

    def forward(x: Any) -> Any:
        return checkpoint_sequential([*module], parts, x, use_reentrant=False)

    module.forward = forward  # type: ignore[method-assign]
    yield
