"""Choose what moves, and where to.

What is written to stays; data goes to a module's GPU; else all goes where most bytes are, a GPU
before the CPU. Where it is not certain, nothing is chosen.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from gpumagic.mismatch.fix.make_there import maker
from gpumagic.mismatch.read.messages import Message
from gpumagic.mismatch.read.operand import Part
from gpumagic.mismatch.read.operation import Conflict
from gpumagic.mismatch.read.syntax import statement
from gpumagic.usercode.values import own


@dataclass(frozen=True)
class Choice:
    """What moves to which device, and the bytes that the other way would move."""

    target: str
    odd: tuple[Part, ...]
    other_nbytes: int | None = None


def choose(found: Conflict, message: Message) -> Choice | None:
    """What moves, by three rules; None if not certain."""
    leaves = found.leaves
    spread = [part for part in leaves if len(part.devices) > 1]
    if spread:
        return _spread(spread, leaves)
    if message.kind == "index" and not _is_left_behind(leaves[0], found):
        # An index may be on the CPU, wherever its table is.
        target = found.operation.parts[0].device
        odd = tuple(p for p in leaves[1:] if p.device not in (target, "cpu"))
    else:
        target = _written_on(found) or _gpu_of_modules(found) or _most(leaves)
        odd = tuple(part for part in leaves if part.device != target)
    if target is None or not odd:
        return None
    return Choice(target, odd, _bytes(part for part in leaves if part not in odd))


def _is_left_behind(part: Part, found: Conflict) -> bool:
    """Whether it is a CPU tensor that a module keeps: that moves once, for good."""
    node = part.node
    owner = found.frame.scope.value(node.value) if isinstance(node, ast.Attribute) else None
    return part.device == "cpu" and issubclass(type(owner), nn.Module)


def _written_on(found: Conflict) -> str | None:
    """Where the tensor is that is written to, and so cannot be replaced by a moved one."""
    stmt, fixed = statement(found.operation.node), found.operation.fixed
    if isinstance(stmt, ast.AugAssign) and stmt is not found.operation.node:
        part = found.reader.part(stmt.target)
        fixed = part if part is not None and part.kind in ("tensor", "made") else fixed
    devices = {d for part in found.leaves for d in part.devices}
    if fixed is None or fixed.device not in devices or _is_left_behind(fixed, found):
        return None
    on_gpu = [d for d in devices if d != "cpu"]
    if fixed.device == "cpu" and len(on_gpu) == 1:
        node, others = found.operation.node, [p for p in found.leaves if p.key != fixed.key]
        alone = all(part.device != "cpu" for part in others)
        if alone and maker(fixed, found.frame, node, on_gpu[0], written=True):
            return None  # better made on the GPU than added to on the host
    return fixed.device


def _gpu_of_modules(found: Conflict) -> str | None:
    """The one GPU that has the modules or parameters of the expression."""
    weights = [p for p in found.leaves if p.kind == "module" or type(p.value) is nn.Parameter]
    devices = {d for part in weights for d in part.devices if d != "cpu"}
    return devices.pop() if len(devices) == 1 else None


def _most(leaves: tuple[Part, ...]) -> str | None:
    """The device with most bytes, a GPU before the CPU: that is where work is done."""
    devices = dict.fromkeys(d for part in leaves for d in part.devices)
    count = {d: _bytes(p for p in leaves if p.device == d) or 0 for d in devices}
    return max(devices, key=lambda d: (d != "cpu", count[d]), default=None)


def _bytes(parts: Iterable[Part]) -> int | None:
    total: dict[str, int] = {}
    for part in parts:
        if part.nbytes is None:
            return None
        total[part.key] = part.nbytes
    return sum(total.values())


def _spread(spread: list[Part], leaves: tuple[Part, ...]) -> Choice | None:
    """A module whose own tensors are on several devices goes where the data is."""
    data = {p.device for p in leaves if len(p.devices) == 1}
    if len(spread) > 1 or len(data) > 1 or spread[0].value is None:
        return None
    if own(spread[0].value).get("hf_device_map"):
        return None  # spread on purpose
    (part,) = spread
    device = next(iter(data)) if data and next(iter(data)) in part.devices else part.devices[0]
    return Choice(device, (part,)) if device else None
