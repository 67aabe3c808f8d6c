"""Find what the failed operation needed memory for, and test by dry runs what would fit."""

import ast
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint_sequential

from gpumagic.display.units import size
from gpumagic.memory.causes import Cause
from gpumagic.memory.out_of_memory import Remedy
from gpumagic.memory.shortage import DryPeaks, Situation, largest_that_fits
from gpumagic.mismatch.syntax import RestOfCode, in_own_scope, stored
from gpumagic.moving.find_tensors import nbytes_held
from gpumagic.usercode.values import MISSING
from gpumagic.usercode.variables import names_read

_JOINS = {"cat", "concat", "concatenate", "hstack", "vstack", "stack", "append", "pad"}
_MOVES = {"to", "cuda", "pin_memory"}


def step(s: Situation) -> Cause | None:
    """An optimizer's step: its state, made at the first one, or the lists that foreach makes."""
    for module, frame in s.beyond:
        optimizer = frame.f_locals.get("self") if module.startswith("torch.optim") else None
        if not isinstance(optimizer, Optimizer):
            continue
        names = {each.f_code.co_name for _, each in s.beyond}
        if any(name.startswith("_multi_tensor") for name in names):
            return _foreach(s, optimizer)
        return _state(s, optimizer)
    return None


def _on_gpu(s: Situation, optimizer: Optimizer) -> list[Tensor]:
    groups = (group["params"] for group in optimizer.param_groups)
    return [p for params in groups for p in params if str(p.device) == s.name]


def _foreach(s: Situation, optimizer: Optimizer) -> Cause:
    sizes = [parameter.nbytes for parameter in _on_gpu(s, optimizer)]
    name = type(optimizer).__name__
    why = (
        f"{name} updates all parameters at once (foreach), with lists of {size(sum(sizes))} between"
    )
    do = f"`{name}(…, foreach=False)`: a parameter at a time saves"
    return Cause("foreach", why, (Remedy(do, sum(sizes) - max(sizes, default=0)),))


def _state(s: Situation, optimizer: Optimizer) -> Cause | None:
    parameters = _on_gpu(s, optimizer)
    with_gradients = [p for p in parameters if p.grad is not None]
    each = _kept_for_one(optimizer)
    if not each or not with_gradients:
        return None
    needs = each * sum(p.nbytes for p in with_gradients)
    name = type(optimizer).__name__
    values = "a value" if each == 1 else f"{each} values"
    why = f"{name} makes {values} for each parameter at its first step: {size(needs)} in all"
    remedies = [Remedy("`torch.optim.SGD(…)` without momentum keeps none, which saves", needs)]
    if all(p.dtype == torch.float32 for p in with_gradients):
        whole = needs + sum(p.nbytes + p.grad.nbytes for p in with_gradients if p.grad is not None)
        do = "the parameters in 16 bits (`.bfloat16()`), with gradients and state, save"
        remedies.append(Remedy(do, whole // 2))
    return Cause("optimizer", why, tuple(remedies))


def _kept_for_one(optimizer: Optimizer) -> int:
    """How many values of a parameter's own shape it keeps: seen on one of two numbers."""
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return 0
    tiny = nn.Parameter(torch.zeros(2, device="cpu"))
    tiny.grad = torch.zeros(2, device="cpu")
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    group |= {"fused": None, "foreach": None, "capturable": False}
    made = kind([{**{k: v for k, v in group.items() if k in optimizer.defaults}, "params": [tiny]}])
    with torch.no_grad():
        made.step(lambda: 0.0)  # which LBFGS cannot do without
    return sum(getattr(v, "shape", None) == tiny.shape for v in made.state[tiny].values())


def grown(s: Situation) -> Cause | None:
    """A tensor is made longer by a copy of it: both are there meanwhile."""
    rest = s.rests[0]
    called = _called(s)
    if called is None or _name(called.func) not in _JOINS:
        return None
    names = {node.id for node in ast.walk(called) if isinstance(node, ast.Name)}
    for name in sorted(names & (rest.made_now | stored(rest.failed or called))):
        value = rest.frame.scope.name(name)
        held = _nbytes(s, value)
        if held and 2 * held >= s.wanted:  # else it is what comes to it
            why = (
                f"`{name}`, {size(held)}, is made longer by a copy: the old one and the new one, "
                f"{size(s.wanted)}, are there at once"
            )
            do = f"`{name}` made once in its final size, and written into, saves"
            return Cause("grown", why, (Remedy(do, held),))
    return None


def copied(s: Situation) -> Cause | None:
    """A whole model is copied where it is."""
    called = _called(s)
    if called is None or s.frames[0].scope.value(called.func) is not copy.deepcopy:
        return None
    held = _nbytes(s, s.frames[0].scope.value(called.args[0])) if called.args else 0
    if not held:
        return None
    text = s.frames[0].text(called.args[0])
    why = f"a copy of `{text}` takes {size(held)} more on {s.name}"
    do = f"a copy on the CPU (`copy.deepcopy({text}.cpu())`, then `{text}.cuda()`) saves"
    return Cause("copy", why, (Remedy(do, held),))


def loaded(s: Situation) -> Cause | None:
    """A file is loaded onto the GPU beside what it is to fill."""
    frame = next((f for module, f in s.beyond if module == "torch.serialization"), None)
    path = frame.f_locals.get("f") if frame is not None else None
    if frame is None:
        return None
    held = _nbytes_of_file(path)
    what = f"{size(held)} " if held else ""
    why = f"torch.load puts {what}onto {s.name}, beside what is there already"
    do = '`map_location="cpu"`, and `load_state_dict` then copies into what is there'
    do += ": saves" if held else ""
    return Cause("load", why, (Remedy(do, held or None),))


def _nbytes_of_file(path: Any) -> int:
    """The bytes of the tensors that a file holds, of which none is read."""
    if not isinstance(path, (str, PurePath)):
        return 0
    try:
        found = torch.load(path, map_location="meta", weights_only=True)
    except Exception:  # noqa: BLE001  another format, or the user's own classes: it stays unknown
        return 0
    return nbytes_held([("", found)])


def moved(s: Situation) -> Cause | None:
    """Something is brought to the GPU as a whole."""
    called = _called(s)
    if called is None or _name(called.func) not in _MOVES or any(r.loops for r in s.rests):
        return None
    owner = called.func.value if isinstance(called.func, ast.Attribute) else None
    value = s.frames[0].scope.value(owner) if owner is not None else MISSING
    held = nbytes_held([("", value)])
    if not held or owner is None:
        return None
    text = s.frames[0].text(owner)
    room = size(max(s.capacity - (s.device.allocated or 0), 0))
    why = f"`{text}` is brought to {s.name} as a whole, {size(held)}; {room} were left for it"
    if issubclass(type(value), nn.Module):
        wide = all(p.dtype == torch.float32 for p in nn.Module.parameters(value))
        do = f"`{text}.bfloat16()` before: 16 bits a number save"
        return Cause("move", why, (Remedy(do, held // 2),) if wide else ())
    do = f"a batch of `{text}` at a time, brought in the loop, saves up to"
    return Cause("move", why, (Remedy(do, held),))


def _called(s: Situation) -> ast.Call | None:
    """The call that failed in the user's innermost frame, where it is certain."""
    node = s.frames[0].failed
    return node if isinstance(node, ast.Call) else None


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _nbytes(s: Situation, value: Any) -> int:
    """The bytes that a value has on the GPU."""
    return nbytes_held([("", value)], s.name)


DOING: tuple[Callable[[Situation], Cause | None], ...] = (
    step,
    grown,
    copied,
    loaded,
    moved,
)


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
