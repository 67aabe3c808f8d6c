"""Tell what the operation that failed needs memory for: a step, a copy, a batch, a longer cache."""

import ast
import copy
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpumagic.display.units import size
from gpumagic.memory.causes import Cause
from gpumagic.memory.out_of_memory import Remedy
from gpumagic.memory.shortage import Situation
from gpumagic.mismatch.read.syntax import stored
from gpumagic.moving.find_tensors import nbytes_held
from gpumagic.usercode.values import MISSING

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
