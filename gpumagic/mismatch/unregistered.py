"""Find what a module holds and `.to()` does not move; write the line that registers it."""

import ast
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gpumagic.mismatch.explanation import Fix, around
from gpumagic.mismatch.fixes import assigns
from gpumagic.mismatch.operand import Part
from gpumagic.usercode.frames import FailedFrame, function_of, uses
from gpumagic.usercode.values import MISSING, contents, own

# What `.to()` moves, and the statement that makes it of a module, a name and a value. Not
# persistent: checkpoints stay as they are.
_BUFFER = '{}.register_buffer("{}", {}, persistent=False)'
_REGISTERED = "{}.{} = nn.%s({})"


@dataclass(frozen=True)
class Unregistered:
    """An attribute of a module, as code of its class names it."""

    owner: str
    cls: type
    name: str
    kind: type
    registered: str

    @property
    def reason(self) -> str:
        """Say why it stays behind, and what to write."""
        plain = ("attribute", "moves parameters and buffers only")
        if not issubclass(self.kind, Tensor):
            plain = (self.kind.__name__, "does not see into it")
        code = self.registered.format(self.owner, self.name, "…")
        return (
            f"{self.owner}.{self.name} is a plain {plain[0]}, and .to() {plain[1]}; for good: "
            f"{code} in __init__, then make the module again"
        )

    def edit(self, frame: FailedFrame) -> tuple[ast.AST, str] | None:
        """Return the one statement of `__init__` that makes it, and that as it should be."""
        nodes = ast.walk(frame.tree) if frame.tree is not None else ()
        cls, text = self.cls.__name__, f"self.{self.name}"
        classes = [n for n in nodes if isinstance(n, ast.ClassDef) and n.name == cls]
        inner: list[Any] = [node for each in classes for node in ast.walk(each)]
        made = [node for node in inner if assigns(node, text) and not uses(node.value, text)]
        where = [getattr(function_of(stmt), "name", "") for stmt in made]
        # `None`, until other code makes it
        if where != ["__init__"] or isinstance(made[0].value, ast.Constant):
            return None
        value = ast.get_source_segment(frame.source, made[0].value)
        return made[0], self.registered.format("self", self.name, value)


def unregistered(part: Part, frame: FailedFrame) -> Unregistered | None:
    """Return the attribute that is an operand, or a list or dict that holds it; None if none is."""
    nodes = [node for node in ast.walk(part.node) if isinstance(node, ast.Attribute)]
    odd = {id(frame.scope.value(node)) for node in nodes} | {id(part.value)}
    owners = {ast.unparse(node.value): frame.scope.value(node.value) for node in nodes}
    owners["self"] = frame.scope.local.get("self", MISSING)
    for owner, module in owners.items():
        attributes = own(module) if issubclass(type(module), nn.Module) else {}
        for name, held in attributes.items():
            better = None if name.startswith("_") else _registered(held, odd)
            if better:
                return Unregistered(owner, type(module), name, type(held), better)
    return None


def _registered(held: Any, odd: set[int]) -> str | None:
    """Return the statement to write for an attribute that is odd or holds what is."""
    if issubclass(type(held), Tensor):
        better = _REGISTERED % "Parameter" if held.requires_grad else _BUFFER
        return better if id(held) in odd else None
    items = contents(held)
    if not any(id(item) in odd for _, item in items):
        return None
    # A dot may not be in a module's name.
    named = type(held) is not dict or all(str(key).isidentifier() for key, _ in items)
    for kind in (nn.Module, nn.Parameter):
        if named and all(issubclass(type(item), kind) for _, item in items):
            return _REGISTERED % f"{kind.__name__}{'Dict' if type(held) is dict else 'List'}"
    return None


def register(parts: list[Part], frame: FailedFrame) -> Fix | None:
    """Return the edit that registers all of these operands; None if no one edit does."""
    found = [unregistered(part, frame) for part in parts]
    edits = [each.edit(frame) if each else None for each in found]
    done = [edit for edit in edits if edit is not None]
    edit = around(frame, done) if done and len(done) == len(edits) else None
    return edit.fix(0) if edit else None
