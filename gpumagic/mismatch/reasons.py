"""Why it is where it is, where the cause is a typical one; nothing where it is not certain."""

import ast
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from gpumagic.mismatch.fix.choose import Choice
from gpumagic.mismatch.read.assignments import last_assignment, loaded, not_assigned
from gpumagic.mismatch.read.expressions import words
from gpumagic.mismatch.read.operand import Part, modules_of, tensors_of
from gpumagic.usercode.frames import Place
from gpumagic.usercode.values import MISSING, full, own

_INDEXING = words(
    "gather index_select index_add index_copy index_fill scatter scatter_add scatter_reduce "
    "take take_along_dim embedding"
)


def reason(
    choice: Choice,
    leaves: tuple[Part, ...],
    places: list[tuple[Place, list[Part]]],
    kind: str,
) -> str | None:
    """One sentence, or None.

    Parameters
    ----------
    leaves : tuple of Part
        The operands of the failing expression.
    places : list
        What is odd, by its names in each of the frames that name it.
    """
    for place, odd in places:
        for part in odd:
            part = part.source or part
            told = (
                _not_assigned(part, place)
                or _no_buffer(part.node, place)
                or _plain_list(part, place)
                or _loss_weight(part)
                or _put_there(part, place)
                or _loaded(part, place)
                or _from_container(part, choice, leaves, place)
                or _made_here(part, place)
                or _spread(part, choice)
            )
            if told:
                return told
    if kind == "index":
        return "an index must be on the CPU or on the same device as what it indexes"
    if any(_is_index(part, leaves, places[0][0]) for part in choice.odd):
        return "an index must be on the same device as what it indexes"
    return None


def _not_assigned(part: Part, place: Place) -> str | None:
    if part.kind != "tensor" or not (node := not_assigned(part.key, place)):
        return None
    text = place.text(node)
    return (
        f"line {node.lineno}: {text} returns a new tensor and leaves {part.text} where it is; "
        f"write {part.text} = {text}"
    )


def _no_buffer(expression: ast.AST, place: Place) -> str | None:
    for node in ast.walk(expression):
        if not isinstance(node, ast.Attribute):
            continue
        owner = place.scope.value(node.value)
        if issubclass(type(owner), nn.Module):
            held = place.scope.value(node)
            registered = {**own(owner).get("_buffers", {}), **own(owner).get("_parameters", {})}
            if issubclass(type(held), torch.Tensor) and node.attr not in registered:
                name = ast.unparse(node.value)
                kind = "plain" if node.attr in own(owner) else "class"
                return (
                    f"{name}.{node.attr} is a {kind} attribute, and .to() moves parameters and "
                    f'buffers only; for good: {name}.register_buffer("{node.attr}", …) in __init__'
                )
    return None


def _plain_list(part: Part, place: Place) -> str | None:
    owner = place.scope.local.get("self", MISSING)
    parameter = type(part.value) is nn.Parameter
    if part.value is None or not (parameter or part.kind == "module"):
        return None
    for name, held in own(owner).items() if issubclass(type(owner), nn.Module) else ():
        if name in ("_modules", "_parameters", "_buffers"):
            continue
        items: Any = list(held.values()) if type(held) is dict else held
        if type(items) in (list, tuple) and any(item is part.value for item in items):
            what = "Parameter" if parameter else "Module"
            better = f"nn.{what}{'Dict' if type(held) is dict else 'List'}"
            return (
                f"self.{name} is a plain {type(held).__name__}, and .to() does not see the "
                f"{what.lower()}s in it; for good: self.{name} = {better}(…)"
            )
    return None


def _loss_weight(part: Part) -> str | None:
    if part.kind == "module" and isinstance(part.value, _Loss):
        names = [name for name, _ in tensors_of(part.value)]
        if names:
            return f"the loss holds a tensor of its own ({', '.join(names)}), which moves with it"
    return None


def _put_there(part: Part, place: Place) -> str | None:
    """The user's own line that put it where it is, or made it from what no module moves."""
    assigned = _assignment(part, place)
    if assigned is None or part.kind != "tensor":
        return None
    made = assigned.value
    if part.device == "cpu" and any(_to_the_cpu(n) for n in _results(made)):
        return f"line {assigned.lineno} puts it on the CPU: {place.text(assigned)}"
    return _no_buffer(made, place) if _chain(made) and part.device == "cpu" else None


def _loaded(part: Part, place: Place) -> str | None:
    found = loaded(part, place) if part.kind == "tensor" else None
    if found is None or len(found[1].args) > 1:
        return None
    if any(keyword.arg in ("map_location", None) for keyword in found[1].keywords):
        return None
    return (
        f"line {found[0].lineno}: torch.load puts a tensor back on the device that it was "
        "saved from, unless told otherwise with map_location"
    )


def _is_index(part: Part, leaves: tuple[Part, ...], place: Place) -> bool:
    """Whether what is odd are the numbers of the rows that a table or a function takes."""
    nodes = place.nodes()
    call = nodes[0] if len(nodes) == 1 else None
    name = ast.unparse(call.func).split(".")[-1] if isinstance(call, ast.Call) else ""
    taking = name.rstrip("_") in _INDEXING
    taking = taking or any(isinstance(p.value, (nn.Embedding, nn.EmbeddingBag)) for p in leaves)
    return taking and (part.dtype or "").startswith("int")


def _chain(node: ast.expr) -> bool:
    """Whether it is an attribute with nothing but methods called on it."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
        if isinstance(node, ast.Attribute):
            return True
    return False


def _results(node: ast.expr) -> list[ast.expr]:
    """The expressions that an expression's values are made by."""
    if isinstance(node, ast.DictComp):
        return [node.value]
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        return [node.elt]
    return [node]


def _to_the_cpu(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    named = [k.value for k in node.keywords if k.arg in ("device", "map_location")]
    named += node.args[:1] if node.func.attr == "to" else []
    told = any(isinstance(n, ast.Constant) and n.value == "cpu" for n in named)
    return node.func.attr == "cpu" or told or _to_the_cpu(node.func.value)


def _assignment(part: Part, place: Place) -> ast.Assign | None:
    """The statement that surely gave the name, or what holds it, its value."""
    name = part.key
    found = last_assignment(name, place)
    while found is None and name.endswith("]"):
        name = name[: name.rindex("[")]
        found = last_assignment(name, place)
    return found


def _from_container(
    part: Part, choice: Choice, leaves: tuple[Part, ...], place: Place
) -> str | None:
    """An item of a dict that meets a module on a GPU, or what one made."""
    constant = not isinstance(part.node, ast.Subscript) or isinstance(part.node.slice, ast.Constant)
    if part.kind != "tensor" or not part.text.endswith('"]') or not constant:
        return None
    made = [p.node for p in leaves] + [
        a.value for p in leaves if (a := last_assignment(p.key, place)) is not None
    ]
    calls = [n.func for n in made if isinstance(n, ast.Call)]
    modules = [p.value for p in leaves] + [place.scope.value(n) for n in calls]
    if choice.target == "cpu" or not any(issubclass(type(m), nn.Module) for m in modules):
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
