"""Explain JAX's error between devices in the user's own names, with each value's device and a fix.

Where what the frames show does not agree with what the error says, there is no explanation.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from gpumagic.frameworks.jax_copies import changes, is_data, own
from gpumagic.mismatch.explanation import Edit, Explanation, Fix, Operand, expression, total
from gpumagic.usercode.frames import FailedFrame, errors, failed_frames, statement
from gpumagic.usercode.values import MISSING

_SAID = "Received incompatible devices for jitted computation"
_DEVICES = re.compile(r"with device ids \[([\d, ]+)\] on platform (\w+)")
_REASON = (
    "both are committed to their device, by jax.device_put or by a cell that brought them, and so "
    "JAX moves neither by itself"
)
_LITERALS = (ast.List, ast.Tuple, ast.Dict)
_OWN_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class _Part:
    """Record an operand's text and committed arrays; arrays are empty if the value has gone."""

    node: ast.expr
    text: str
    arrays: list[Any]
    device: str
    stays: bool = False  # no copy by device_put could replace it

    @property
    def nbytes(self) -> int | None:
        return sum(array.nbytes for array in self.arrays) if self.arrays else None


def explain_jax(
    framework: Any, error: BaseException, namespace: Mapping[str, Any]
) -> Explanation | None:
    """Explain an error between JAX's devices; None for any other."""
    for each in errors(error):
        if type(each) is ValueError and str(each).startswith(_SAID):
            frames = failed_frames(each.__traceback__)
            said = _said(str(each), framework)
            if not frames or len(said) < 2:
                return None
            frames[0].scope.outer = {**namespace, **frames[0].scope.outer}
            return _explain(frames[0], said, framework)
    return None


def _said(message: str, framework: Any) -> list[str]:
    """Return the devices that the message names, each by gpumagic's name."""
    found = []
    for numbers, platform in _DEVICES.findall(message):
        devices = {device.id: device for device in jax.devices(platform.lower())}
        named = [framework.name_of(devices[int(n)]) for n in numbers.split(",")]
        found.append(" + ".join(named))
    return found


def _explain(frame: FailedFrame, said: list[str], framework: Any) -> Explanation | None:
    node = frame.failed
    if node is None:
        return None
    parts = _with_gone(node, frame, [*_parts(node, frame, framework)], said)
    if not {*said} <= {part.device for part in parts}:
        return None
    target = _target(node, parts)
    odd = [part for part in parts if part.device != target]
    rows = {part.text: _row(part, part in odd) for part in parts}
    fix = _fix(frame, node, parts, odd, target)
    return Explanation(*expression(frame, node), tuple(rows.values()), fix, _REASON)


def _parts(node: ast.AST, frame: FailedFrame, framework: Any) -> Iterator[_Part]:
    """Yield the largest expressions in a node whose values are, or hold, committed arrays."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _OWN_SCOPES):
            yield from _captured(child, frame, framework)
            continue
        # Of several that stand in a list each is an operand.
        whole = isinstance(child, ast.expr) and not isinstance(child, _LITERALS)
        value = frame.scope.value(child) if whole else MISSING
        if value is MISSING:
            inner = [*_parts(child, frame, framework)]
            nodes = [part.node for part in inner]
            if isinstance(child, ast.Subscript) and nodes == [child.value]:
                # What it gave has gone, and is less to move than the whole.
                inner = [_Part(child, frame.text(child), [], inner[0].device)]
            yield from inner
            continue
        held: dict[str, list[tuple[str, Any]]] = {}
        stays = changes(value)
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            leaf = _concrete(leaf)
            stays |= not is_data(leaf)
            if framework.is_array(leaf) and leaf.committed:
                place = jax.tree_util.keystr(path), leaf
                held.setdefault(framework.where(leaf), []).append(place)
        for device, places in held.items():
            text = frame.text(child)
            if len(held) > 1:  # told apart
                more = f" and {len(places) - 1} more" if len(places) > 1 else ""
                text += f"{places[0][0]}{more}"
            arrays = [leaf for _, leaf in places]
            yield _Part(child, text, arrays, device, stays)  # type: ignore[arg-type]


def _captured(node: ast.expr, frame: FailedFrame, framework: Any) -> Iterator[_Part]:
    """Yield the variables that a lambda captures; they stay, since its arguments can move."""
    if isinstance(node, ast.Lambda):
        own_names = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        for name in ast.walk(node.body):
            if isinstance(name, ast.Name) and name.id not in own_names:
                for part in _parts(ast.Expr(name), frame, framework):
                    yield replace(part, stays=True)


def _concrete(leaf: Any) -> Any:
    """Return the array behind a tracer of `jax.grad` or `jax.vmap`; `jax.jit`'s have none."""
    while isinstance(leaf, jax.core.Tracer):
        leaf = getattr(leaf, "primal", getattr(leaf, "val", None))
    return leaf


def _with_gone(
    node: ast.AST, frame: FailedFrame, parts: list[_Part], said: list[str]
) -> list[_Part]:
    """Add the lost result of a call on that device, if only one call can have made it."""
    known = {part.device for part in parts}
    where = [device for device in said if device not in known]
    if isinstance(node, ast.BinOp):
        sides = [node.left, node.right]
    else:
        sides = node.args if isinstance(node, ast.Call) else []
    if any(isinstance(side, ast.Lambda) or callable(frame.scope.value(side)) for side in sides):
        return parts  # what a function reads may be it as well
    made = [side for side in sides if isinstance(side, ast.Call)]
    if len(where) != 1 or len(made) != 1:
        return parts
    within = {*ast.walk(made[0])}
    gone = _Part(made[0], frame.text(made[0]), [], where[0])
    return [*(part for part in parts if part.node not in within), gone]


def _target(node: ast.AST, parts: list[_Part]) -> str:
    """Return the device for all operands: of one that is assigned to, stays or is spread; else the
    device with most bytes."""
    nbytes: dict[str, int] = {}
    for part in parts:
        target = isinstance(node, ast.AugAssign) and part.node is node.target
        if target or part.stays or "+" in part.device:
            return part.device
        nbytes[part.device] = nbytes.get(part.device, 0) + (part.nbytes or 0)
    return max(nbytes, key=lambda device: nbytes[device], default="")


def _row(part: _Part, odd: bool) -> Operand:
    about = f"{len(part.arrays)} arrays" if part.arrays else "made here"
    if len(part.arrays) == 1:
        (array,) = part.arrays
        about = f"{array.dtype}[{', '.join(map(str, array.shape))}]"
    return Operand(part.text, (part.device,), part.nbytes, about, odd)


def _fix(
    frame: FailedFrame, node: ast.AST, parts: list[_Part], odd: list[_Part], target: str
) -> Fix | None:
    stmt = statement(node)
    if stmt is None or not odd or not target:
        return None
    if any(part.stays for part in odd):
        return None
    names = (ast.Name, ast.Attribute, ast.Subscript)
    alike = (p for p in parts if p not in odd and len(p.arrays) == 1 and isinstance(p.node, names))
    neighbor = next((p for p in alike if p.arrays[0] is frame.scope.value(p.node)), None)
    where = own(target) if neighbor is None else f"{neighbor.text}.device"
    if "+" in target:  # a copy of the others on each
        if neighbor is None or not isinstance(neighbor.arrays[0].sharding, NamedSharding):
            return None
        where = f"jax.sharding.NamedSharding({neighbor.text}.sharding.mesh, "
        where += "jax.sharding.PartitionSpec())"
    edit = Edit(frame, stmt)
    if frame.scope.name("jax") is not jax:
        edit.before.append("import jax")
    nodes = dict.fromkeys(part.node for part in odd)
    edit.replaced += [(node, f"jax.device_put({frame.text(node)}, {where})") for node in nodes]
    return edit.fix(total({part.text: part.nbytes for part in odd}.values()))
