"""Why it is where it is, where the cause is a typical one; nothing where it is not certain."""

import ast
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from gpumagic.tensors.explain.choice import Choice
from gpumagic.tensors.explain.frames import Place
from gpumagic.tensors.explain.intent import not_assigned
from gpumagic.tensors.explain.parts import Part, modules_of, tensors_of
from gpumagic.tensors.explain.values import MISSING, full, of_function, own


def reason(choice: Choice, places: list[tuple[Place, list[Part]]], kind: str) -> str | None:
    """One sentence, or None.

    Parameters
    ----------
    places : list
        What is odd, by its names in each of the frames that name it.
    """
    for place, odd in places:
        for part in odd:
            part = part.source or part
            told = (
                _not_assigned(part, place)
                or _no_buffer(part, place)
                or _plain_list(part, place)
                or _loss_weight(part)
                or _loaded(part, place)
                or _from_container(part)
                or _made_here(part, place)
                or _spread(part, choice)
            )
            if told:
                return told
    if kind == "index":
        return "an index must be on the CPU or on the same device as what it indexes"
    return None


def _not_assigned(part: Part, place: Place) -> str | None:
    if part.kind != "tensor" or not (node := not_assigned(part.key, place)):
        return None
    text = place.text(node)
    return (
        f"line {node.lineno}: {text} returns a new tensor and leaves {part.text} where it is; "
        f"write {part.text} = {text}"
    )


def _no_buffer(part: Part, place: Place) -> str | None:
    for node in ast.walk(part.node):
        if not isinstance(node, ast.Attribute):
            continue
        owner = place.scope.value(node.value)
        if issubclass(type(owner), nn.Module):
            held = own(owner).get(node.attr)
            if issubclass(type(held), torch.Tensor):
                name = ast.unparse(node.value)
                return (
                    f"{name}.{node.attr} is a plain attribute, and .to() moves parameters and "
                    f'buffers only; for good: {name}.register_buffer("{node.attr}", …) in __init__'
                )
    return None


def _plain_list(part: Part, place: Place) -> str | None:
    owner = place.scope.local.get("self", MISSING)
    if part.kind != "module" or part.value is None or not issubclass(type(owner), nn.Module):
        return None
    for name, held in own(owner).items():
        if name.startswith("_") and name in ("_modules", "_parameters", "_buffers"):
            continue
        items: Any = list(held.values()) if type(held) is dict else held
        if type(items) in (list, tuple) and any(item is part.value for item in items):
            better = "nn.ModuleDict" if type(held) is dict else "nn.ModuleList"
            return (
                f"self.{name} is a plain {type(held).__name__}, and .to() does not see the modules "
                f"in it; for good: self.{name} = {better}(…)"
            )
    return None


def _loss_weight(part: Part) -> str | None:
    if part.kind == "module" and isinstance(part.value, _Loss):
        names = [name for name, _ in tensors_of(part.value)]
        if names:
            return f"the loss holds a tensor of its own ({', '.join(names)}), which moves with it"
    return None


def _loaded(part: Part, place: Place) -> str | None:
    assigned = _assignment(part, place)
    if assigned is None or not isinstance(assigned.value, ast.Call):
        return None
    call = assigned.value
    function = place.scope.value(call.func)
    home = str(of_function(function, "__module__"))
    if of_function(function, "__name__") != "load" or not home.startswith("torch"):
        return None
    if any(keyword.arg == "map_location" for keyword in call.keywords) or len(call.args) > 1:
        return None
    return (
        f"line {assigned.lineno}: torch.load puts a tensor back on the device that it was saved "
        "from, unless told otherwise with map_location"
    )


def _assignment(part: Part, place: Place) -> ast.Assign | None:
    """The last statement of the same text that gives the name its value."""
    found = None
    for node in ast.walk(place.tree) if place.tree else ():
        if not isinstance(node, ast.Assign) or node.lineno >= place.line:
            continue
        if part.key in {ast.unparse(target) for target in node.targets}:
            found = node
    return found


def _from_container(part: Part) -> str | None:
    if part.kind != "tensor" or "[" not in part.text:
        return None
    if isinstance(part.node, ast.Subscript) and not isinstance(part.node.slice, ast.Constant):
        return None
    key = part.text[part.text.rindex("[") + 1 :]
    if key[:1] not in "\"'":
        return None
    return "a dict does not move with the model: each of its tensors does by itself"


def _made_here(part: Part, place: Place) -> str | None:
    if part.factory and part.device == "cpu":
        return "it is made without device=, and so on the CPU"
    if part.kind == "module" and part.value is None:
        return "a module is made on the CPU; make it once in __init__, and it moves with the rest"
    return None


def _spread(part: Part, choice: Choice) -> str | None:
    if part.kind != "module" or part.value is None or len(part.devices) < 2:
        return None
    for path, child in modules_of(part.value):
        for name, held in own(child).items():
            if issubclass(type(held), torch.Tensor) and full(held.device) != choice.target:
                where = f"{path}.{name}" if path else name
                return f"{where} is a plain attribute: .to() moves parameters and buffers only"
    return f"a part of {part.text} was made or replaced after .to()"
