"""Who is the odd one out: what moves, and where to."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.data import Dataset

from gpumagic.mismatch.fix.edits import statement
from gpumagic.mismatch.fix.fix_factories import maker
from gpumagic.mismatch.read.assignments import loaded, not_assigned
from gpumagic.mismatch.read.messages import Message
from gpumagic.mismatch.read.operand import Part, modules_of
from gpumagic.mismatch.read.operation import Conflict, bound_again
from gpumagic.usercode.values import MISSING, full, own

# What moves in the 0.1 ms that a transfer and the work on a slower device are apart anyway.
_NO_TIME = 2**20


@dataclass(frozen=True)
class Choice:
    """What moves to which device, and the bytes that the other way would move.

    `open`: the other way is right too, if dearer. `spare`: the bytes that it must save to take work
    to the CPU; an index is no work.
    """

    target: str
    odd: tuple[Part, ...]
    other_nbytes: int | None = None
    open: bool = False
    spare: int = _NO_TIME


def choose(found: Conflict, message: Message) -> Choice | None:
    """Weights stay, and data moves to the GPU unless that costs more. None if not certain."""
    leaves, fixed = found.leaves, found.operation.fixed
    devices = {d for part in leaves for d in part.devices}
    spread = [part for part in leaves if len(part.devices) > 1]
    if spread:
        return _spread(spread, leaves)
    left = tuple(p for p in leaves if _belongs(p, found))
    if left and len(devices) == 2 and all(p in left for p in leaves if p.device == "cpu"):
        # What a module keeps goes where its data is, and stays there.
        (gpu,) = devices - {"cpu"}
        return _choice(gpu, left, leaves, either=fixed in left)
    if message.kind == "index":
        base = found.operation.parts[0].device
        odd = tuple(p for p in leaves[1:] if p.device not in (base, "cpu"))
        if not base:
            return None
        towards = _choice(base, odd, leaves, either=not _is_written(found))
        return replace(towards, spare=0) if towards is not None else None
    meant = [p for p in leaves if p.kind == "tensor" and not_assigned(p.key, found.place)]
    rest = {p.device for p in leaves if p not in meant}
    if meant and len(rest) == 1 and None not in rest:
        return _choice(rest.pop(), tuple(meant), leaves)
    kept_there = tuple(p for p in leaves if p is not fixed and _is_stored(p, found))
    rest = {d for p in leaves if p not in kept_there for d in p.devices}
    near = (_bytes(kept_there) or 0) < _NO_TIME
    if kept_there and near and "cpu" not in devices and len(rest) == 1:
        # Which GPU it is on was chosen once, elsewhere; the work is where what is computed is.
        return _choice(rest.pop(), kept_there, leaves)
    for device in sorted(devices, key=_gpus_first):
        others = [part for part in leaves if part.device != device]
        if others and all(part.factory or maker(part, found.place) for part in others):
            other = _bytes(p for p in leaves if p.device == device)
            return Choice(device, tuple(others), other, open=fixed in others)
    kept = _assigned_to(found)
    if kept in devices and (fixed is None or fixed.device == kept):
        return _choice(kept, _away(leaves, kept), leaves)
    if fixed is not None and fixed.device in devices and not bound_again(fixed, found.place.scope):
        return _choice(fixed.device, _away(leaves, fixed.device), leaves)
    if "cpu" in devices and issubclass(type(found.place.scope.name("self")), Dataset):
        # What loads data works on the CPU: the loader's workers can use no GPU.
        return _choice("cpu", _away(leaves, "cpu"), leaves)
    weights = {d for part in leaves if part.kind == "module" for d in part.devices}
    weights |= {d for p in leaves if type(p.value) is nn.Parameter for d in p.devices if d != "cpu"}
    home = _home(found) or ""
    if len(weights) == 1:
        (device,) = weights
        data = sorted(devices - {device}, key=_gpus_first)
        if device == "cpu" and len(data) == 1 and data[0] != "cpu":
            # Left behind: moved once, where the data would have to come each time.
            device = data[0]
        return _choice(device, _away(leaves, device), leaves)
    if home in devices:
        return _choice(home, _away(leaves, home), leaves, either=home == "cpu")
    cost = {d: _bytes(p for p in leaves if p.device != d) for d in devices}
    if None in cost.values():
        # A result has gone, and its size with it: whatever it is, a GPU is where work is done.
        order = sorted(devices, key=lambda d: (d == "cpu", d != leaves[0].device))
        return _choice(order[0], _away(leaves, order[0]), leaves, either=True)
    worth = {d: (count or 0) + _NO_TIME * (d == "cpu") for d, count in cost.items()}
    best = min(devices, key=lambda d: (worth[d], d == "cpu", d != leaves[0].device, d))
    return _choice(best, _away(leaves, best), leaves, either=True)


def other_way(choice: Choice, found: Conflict) -> Choice | None:
    """The same between the CPU and a GPU, towards the other of the two."""
    if not choice.open:
        return None
    others = {d for p in found.leaves for d in p.devices} - {choice.target}
    if len(others) != 1 or (choice.target != "cpu" and others != {"cpu"}):
        return None
    target = others.pop()
    return _choice(target, _away(found.leaves, target), found.leaves)


def _is_written(found: Conflict) -> bool:
    """Whether it is an assignment to `table[i]`, and not a look at it."""
    node = found.operation.node
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _assigned_to(found: Conflict) -> str | None:
    """Where the target of an augmented assignment is that the result goes into."""
    stmt = statement(found.operation.node)
    if not isinstance(stmt, ast.AugAssign) or stmt is found.operation.node:
        return None
    part = found.reader.part(stmt.target)
    return part.device if part is not None and part.kind in ("tensor", "made") else None


def _belongs(part: Part, found: Conflict) -> bool:
    """Whether it is a CPU tensor that a module keeps: a parameter, a buffer, an attribute."""
    if part.device != "cpu" or part.kind not in ("tensor", "made"):
        return False
    part = part.source or part
    node = part.node
    if type(part.value) is nn.Parameter:
        return True
    if not isinstance(node, ast.Attribute):
        return False
    return issubclass(type(found.place.scope.value(node.value)), nn.Module)


def _is_stored(part: Part, found: Conflict) -> bool:
    """Whether it is a constant: loaded from a file, or a plain attribute of a module."""
    part = part.source or part
    node = part.node
    if part.kind != "tensor" or type(part.value) is nn.Parameter:
        return False
    owner = found.place.scope.value(node.value) if isinstance(node, ast.Attribute) else None
    if isinstance(node, ast.Attribute) and issubclass(type(owner), nn.Module):
        return node.attr not in own(owner).get("_buffers", {})
    return loaded(part, found.place) is not None


def gains(choice: Choice, nbytes: int | None) -> bool:
    """Whether to bring work from a GPU to the CPU saves more than it takes there."""
    if choice.target != "cpu" or not choice.open:
        return True
    known = nbytes is not None and choice.other_nbytes is not None
    return known and (nbytes or 0) + choice.spare <= (choice.other_nbytes or 0)


def _gpus_first(device: str) -> tuple[bool, str]:
    return device == "cpu", device


def _away(leaves: tuple[Part, ...], device: str) -> tuple[Part, ...]:
    return tuple(part for part in leaves if part.device != device)


def _choice(
    target: str | None, odd: tuple[Part, ...], leaves: tuple[Part, ...], *, either: bool = False
) -> Choice | None:
    if target is None or not odd:
        return None
    stays = [part for part in leaves if part not in odd]
    return Choice(target, odd, _bytes(stays), either)


def _bytes(parts: Iterable[Part]) -> int | None:
    total: dict[str, int] = {}
    for part in parts:
        # Of an attribute's slice, the attribute is what moves.
        kept = part.source if part.source and isinstance(part.source.node, ast.Attribute) else part
        if kept.nbytes is None:
            return None
        total[kept.key] = kept.nbytes
    return sum(total.values())


def _spread(spread: list[Part], leaves: tuple[Part, ...]) -> Choice | None:
    data = {p.device for p in leaves if len(p.devices) == 1}
    if len(spread) > 1 or len(data) > 1 or spread[0].value is None:
        return None
    if own(spread[0].value).get("hf_device_map"):
        return None  # spread on purpose
    (part,) = spread
    device = next(iter(data)) if data and next(iter(data)) in part.devices else part.devices[0]
    return Choice(device, (part,)) if device else None


def _home(found: Conflict) -> str | None:
    """Where the module is whose method this is."""
    owner = found.place.scope.local.get("self", MISSING)
    if not issubclass(type(owner), nn.Module):
        return None
    devices = {full(t.device) for t in registered(owner)}
    return devices.pop() if len(devices) == 1 else None


def registered(module: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module: what `.to()` moves."""
    return [
        tensor
        for _, child in modules_of(module)
        for kind in ("_parameters", "_buffers")
        for tensor in own(child).get(kind, {}).values()
        if tensor is not None
    ]
