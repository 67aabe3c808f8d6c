"""Say why it is where it is, where the cause is a typical one; nothing where it is not certain."""

import ast
from typing import Any

import torch
from torch import nn

from gpumagic.mismatch.read.operand import Part
from gpumagic.moving.move import origin_of
from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.values import MISSING, own


def reason(
    leaves: tuple[Part, ...],
    frames: list[tuple[FailedFrame, list[Part]]],
    kind: str,
) -> str | None:
    """One sentence, or None; `frames` has what is odd, by its names in each that names it."""
    if told := _brought(leaves):
        return told
    for frame, odd in frames:
        for part in odd:
            told = _no_buffer(part.node, frame) or _plain_list(part, frame) or _made_here(part)
            if told:
                return told
    meets_module = any(part.kind == "module" for part in leaves)
    if meets_module and any(part.text.endswith('"]') for _, odd in frames for part in odd):
        return "a dict does not move with the model: each of its tensors does by itself"
    if kind == "index":
        return "an index must be on the CPU or on the same device as what it indexes"
    return None


def _brought(leaves: tuple[Part, ...]) -> str | None:
    """That an earlier cell brought one of them to a device: at home, it would meet the others."""
    for part in leaves:
        parameters = part.value.parameters() if issubclass(type(part.value), nn.Module) else ()
        origin = origin_of(next(iter(parameters), part.value))
        others = {device for other in leaves if other is not part for device in other.devices}
        if origin and others == {str(origin.device)} and part.device:
            return (
                f"{origin.cell or 'a cell'} brought {part.text} to {part.device} for good; "
                "%ongpu home undoes that, and --back in that cell avoids it"
            )
    return None


def _no_buffer(expression: ast.AST, frame: FailedFrame) -> str | None:
    for node in ast.walk(expression):
        owner = frame.scope.value(node.value) if isinstance(node, ast.Attribute) else None
        if not isinstance(node, ast.Attribute) or not issubclass(type(owner), nn.Module):
            continue
        held = frame.scope.value(node)
        registered = {**own(owner).get("_buffers", {}), **own(owner).get("_parameters", {})}
        if issubclass(type(held), torch.Tensor) and node.attr not in registered:
            name = ast.unparse(node.value)
            kind = "plain" if node.attr in own(owner) else "class"
            return (
                f"{name}.{node.attr} is a {kind} attribute, and .to() moves parameters and "
                f'buffers only; for good: {name}.register_buffer("{node.attr}", …) in __init__'
            )
    return None


def _plain_list(part: Part, frame: FailedFrame) -> str | None:
    owner = frame.scope.local.get("self", MISSING)
    parameter = type(part.value) is nn.Parameter
    if part.value is None or not (parameter or part.kind == "module"):
        return None
    for name, held in own(owner).items() if issubclass(type(owner), nn.Module) else ():
        items: Any = list(held.values()) if type(held) is dict else held
        plain = type(items) in (list, tuple) and not name.startswith("_")
        if plain and any(item is part.value for item in items):
            what = "Parameter" if parameter else "Module"
            better = f"nn.{what}{'Dict' if type(held) is dict else 'List'}"
            return (
                f"self.{name} is a plain {type(held).__name__}, and .to() does not see the "
                f"{what.lower()}s in it; for good: self.{name} = {better}(…)"
            )
    return None


def _made_here(part: Part) -> str | None:
    if part.factory and part.device == "cpu":
        return "it is made without device=, and so on the CPU"
    if part.kind == "module" and part.value is None:
        return "a module is made on the CPU; make it once in __init__, and it moves with the rest"
    return None
