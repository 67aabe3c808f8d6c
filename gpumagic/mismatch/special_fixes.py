"""Explain generators, values that the host must read, optimizers, torch.load, and loaders' workers.

A generator is state: made again in a loop, it would draw the same numbers each time. So it is made
where it was made before, or once before the outermost loop; else no fix is offered.
"""

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gpumagic.display.units import some
from gpumagic.mismatch.explanation import (
    Edit,
    Explanation,
    Fix,
    Operand,
    bracketed,
    expression,
    total,
)
from gpumagic.mismatch.moves import Site, can_precede, climb
from gpumagic.mismatch.operand import (
    Part,
    Reader,
    arguments,
    bytes_of,
    flat,
    full,
    held_by,
    is_torch,
)
from gpumagic.mismatch.operation import Message, agree, named, operation, row
from gpumagic.moving.move import origin_of
from gpumagic.usercode.files import label, source_of
from gpumagic.usercode.frames import (
    FailedFrame,
    function_of,
    in_own_scope,
    loops_around,
    root,
    statement,
    stored,
)

_NUMPY = "NumPy works in the host's memory only, so the values must be copied there"
_HOST = "it is read on the host, before the work starts"
_COUNTERS = "an optimizer keeps its step counters on the CPU"
_STATE = (
    "the optimizer took its state on before the model moved; move the model first, then make "
    "the optimizer or load its state"
)
_FILE = "the file holds tensors of a GPU that is not here; load them to the CPU, then move"


def for_host(frame: FailedFrame, outer: list[FailedFrame], message: Message) -> Explanation | None:
    """Explain a tensor that must be copied to the host, in the outermost frame that has it."""
    node = frame.failed
    odd = _on_a_gpu(frame, node) if node is not None else []
    devices = frozenset(device for part in odd for device in part.devices)
    if node is None or not odd or not agree(message.devices - {"cpu"}, devices):
        return None
    if message.kind == "host" and isinstance(node, ast.Call) and "pack" in ast.unparse(node.func):
        named_so = [word.value for word in node.keywords if word.arg == "lengths"]
        # None of them, where what makes the lengths stands in the call itself.
        odd = [part for part in odd if part.node in (named_so or node.args[1:2])]
    if not odd:
        return None
    above, names = climb(Site(frame, node, odd), outer)
    reader = Reader(frame)
    rows = [
        replace(row(shown, is_odd), also=names.get(part.key))
        for part in odd
        for shown, is_odd in named(part, reader, True)
    ]
    reason = _NUMPY if message.kind == "numpy" else _HOST
    return Explanation(*expression(frame, node), tuple(rows), _to_host(above), reason)


def _on_a_gpu(frame: FailedFrame, node: ast.AST) -> list[Part]:
    """Return the operands on a GPU, a container by its own name; none if one is unknown."""
    done = operation(node, Reader(frame))
    odd: list[Part] = []
    for part in done.parts if done is not None else ():
        named = part.kind == "group" and isinstance(part.node, (ast.Name, ast.Attribute))
        odd += [p for p in ([part] if named else flat([part])) if set(p.devices) - {"cpu"}]
    unknown = done is None or any(part.kind == "unknown" for part in done.parts)
    return [] if unknown else [p for p in odd if p.kind in ("tensor", "made", "group")]


def _to_host(site: Site) -> Fix | None:
    stmt = statement(site.node)
    if stmt is None:
        return None
    edit = Edit(site.frame, stmt)
    edit.replaced += [(part.node, _copied(part, site.frame)) for part in site.odd]
    return edit.fix(total(part.nbytes for part in site.odd))


def _copied(part: Part, frame: FailedFrame) -> str:
    if part.kind == "group":
        several = in_own_scope(part.node) or part.text in frame.parameters
        guard = ' if hasattr(t, "detach") else t' if several else ""
        return f"[t.detach().cpu(){guard} for t in {part.text}]"
    text = bracketed(part.node, part.text)
    tracked = part.value.requires_grad if part.value is not None else "detach(" not in part.text
    return f"{text}.detach().cpu()" if tracked else f"{text}.cpu()"


def for_optimizer(frame: FailedFrame, message: Message) -> Explanation | None:
    """Explain an optimizer whose state or counters are on the wrong device."""
    node = frame.failed
    if not isinstance(node, ast.Call):
        return None
    owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    values = {frame.text(n): frame.scope.value(n) for n in [*owner, *arguments(node)]}
    found = [(text, v) for text, v in values.items() if issubclass(type(v), Optimizer)]
    stmt = statement(node)
    if len(found) != 1 or stmt is None:
        return None
    text, optimizer = found[0]
    parameters: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
    steps = message.kind == "steps"
    away = _away(optimizer, parameters, steps)
    devices, homes = {full(t.device) for t in away}, {full(p.device) for p in parameters}
    alone = can_precede(frame, stmt)
    followed = not steps and isinstance(stmt, ast.Expr)  # `loss.backward(); o.step()`
    if len(devices) != 1 or len(homes) != 1 or not (alone or followed):
        return None
    if steps:
        loop = f"for state in {text}.state.values():"
        edit = Edit(frame, stmt, [f'{loop} state["step"] = state["step"].cpu()'])
    else:
        loops = loops_around(stmt)
        once = loops and can_precede(frame, loops[-1]) and root(text) not in stored(loops[-1])
        # It brings each state to its parameter, whatever the optimizer.
        line = f"{text}.load_state_dict({text}.state_dict())"
        edit = Edit(frame, loops[-1] if once else stmt, [line])
        if not alone and not once:
            edit = Edit(frame, stmt, replaced=[(stmt, f"{line}; {frame.text(stmt)}")])
    nbytes = total(bytes_of(t) for t in away)
    weights = total(bytes_of(p) for p in parameters)
    about = f"{len(parameters)} parameters", f"{len(away)} tensors"
    rows = (
        Operand(f"{text}.param_groups", tuple(homes), weights, about[0]),
        Operand(f"{text}.state", tuple(devices), nbytes, about[1], odd=True),
    )
    why = _COUNTERS if steps else _STATE
    return Explanation(*expression(frame, node), rows, edit.fix(nbytes), why)


def _away(optimizer: Any, parameters: list[Tensor], steps: bool) -> list[Tensor]:
    """Return the counters on a GPU, or the other state that is not with its parameter."""
    found = []
    for parameter in parameters:
        for key, held in dict(optimizer.state.get(parameter, {})).items():
            if issubclass(type(held), Tensor) and (key == "step") == steps:
                wrong = held.is_cuda if steps else held.device != parameter.device
                found += [held] if wrong else []
    return found


def for_worker(frames: list[FailedFrame]) -> Explanation:
    """Name the loader whose workers read tensors on a GPU, by the name in the outermost frame."""
    file, line, rows = frames[0].filename, frames[0].line, list[Operand]()
    why = "the workers of a DataLoader are processes that can read tensors on the CPU alone"
    held = (
        (name, [*{id(t): t for _, t in held_by(loader) if t.device.type != "cpu"}.values()])
        for frame in reversed(frames)
        for name, loader in _loaders(frame)
    )
    if found := next(((name, tensors) for name, tensors in held if tensors), None):
        name, tensors = found
        nbytes, count = sum(bytes_of(t) or 0 for t in tensors), len(tensors)
        devices = tuple(dict.fromkeys(full(t.device) for t in tensors))
        about = f"DataLoader, {count} tensor{'s' * (count > 1)}"
        rows.append(Operand(name, devices, nbytes, about, odd=True))
        brought = [origin for t in tensors if (origin := origin_of(t))]
        if brought:
            names = some(dict.fromkeys(origin.name for origin in brought))
            cells = ", ".join(dict.fromkeys(origin.cell for origin in brought if origin.cell))
            why += f"; {cells or 'a cell'} brought {names} to a GPU, and "
            why += "%ongpu home brings them back"
        if len(brought) < count:
            why += f"; run %ongpu home, then run the cell again that makes {name}, "
            why += "without %%ongpu or with num_workers=0"
    return Explanation(source_of(file, line), line, file, label(file), tuple(rows), None, why)


def _loaders(frame: FailedFrame) -> Iterator[tuple[str, Any]]:
    """Yield the loaders in a frame's statement, with their names."""
    stmt = next(filter(None, map(statement, frame.candidates)), None)
    for node in ast.walk(stmt.iter if isinstance(stmt, ast.For) else stmt) if stmt else ():
        value = frame.scope.value(node)
        if issubclass(type(value), DataLoader):
            yield frame.text(node), value


def for_load(frame: FailedFrame) -> Explanation | None:
    """Explain a `torch.load` of a file from a machine with other GPUs."""
    node = frame.failed
    stmt = statement(node) if node is not None else None
    if not isinstance(node, ast.Call) or stmt is None:
        return None
    is_load = ast.unparse(node.func).endswith("load") and is_torch(frame.scope.value(node.func))
    placed = len(node.args) > 1 or any(k.arg in ("map_location", None) for k in node.keywords)
    if placed or not is_load:
        return None
    text = frame.text(node)[:-1].rstrip().rstrip(",")
    edit = Edit(frame, stmt, replaced=[(node, f'{text}, map_location="cpu")')])
    return Explanation(*expression(frame, node), (), edit.fix(None), _FILE)


def for_generator(frame: FailedFrame, outer: list[FailedFrame]) -> Explanation | None:
    """Explain a generator on another device than the numbers that it is to draw."""
    node, reader = frame.failed, Reader(frame)
    if name := next((name for name, _ in _loaders(frame)), None):
        where = full(torch.get_default_device())
        why = (
            f"the default device is {where}, where it shuffles by a generator of the CPU: make "
            f'{name} with generator=torch.Generator("{where}")'
        )
        loader = Operand(name, ("cpu",), None, "DataLoader", odd=True)
        return Explanation(*expression(frame, frame.candidates[0]), (loader,), None, why)
    if node is None or frame.scope.name("torch") is not torch:
        return None
    found = arguments(node) if isinstance(node, ast.Call) else []
    parts = [p for a in found if (p := reader.part(a))]
    given = [p for p in parts if p.kind == "generator"]
    if len(given) != 1 or not isinstance(node, ast.Call):
        return None
    (part,) = given
    target = _drawn_on(node, reader, part)
    if target is None or target == part.device:
        return None
    frames = [frame, *outer]
    if part.value is None:
        fix = _made(part.node, frame, target)
    else:
        fix = _made_there(part, node, target, frames)
    drawn = [p for p in parts if p.kind in ("tensor", "made")]
    rows = [row(shown, False) for p in drawn for shown, _ in named(p, reader, False)]
    why = f"numbers for {target} are drawn by a generator on {target}"
    if fix is None:
        why += f': give it one made by torch.Generator("{target}")'
    return Explanation(*expression(frame, node), (*rows, row(part, True)), fix, why)


def _drawn_on(node: ast.Call, reader: Reader, part: Part) -> str | None:
    """Return the device of the numbers that a call draws."""
    for keyword in node.keywords:
        if keyword.arg == "device":
            return reader.device(keyword.value, "")
    owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    for candidates in (owner, arguments(node)):
        parts = [p for n in candidates if (p := reader.part(n)) and p.kind in ("tensor", "made")]
        if len({p.device for p in parts}) == 1:
            return parts[0].device
    return "cpu" if part.device != "cpu" else None


def _made(node: ast.expr, frame: FailedFrame, target: str) -> Fix | None:
    """Return the edit of the call that makes a generator; None if it does more than seed it."""
    made, stmt = node, statement(node)
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and stmt is not None:
        if ast.unparse(made.func) == "torch.Generator":
            return Edit(frame, stmt, replaced=[(made, f'torch.Generator("{target}")')]).fix(0)
        if made.func.attr != "manual_seed":
            return None
        made = made.func.value
    return None


def _made_there(part: Part, node: ast.Call, target: str, frames: list[FailedFrame]) -> Fix | None:
    """Return the edit of the one statement that made it, if all its draws are on `target`."""
    for frame in frames:
        tree, scope = frame.tree, function_of(frame.candidates[0]) if frame.candidates else None
        found = []
        for stmt in ast.walk(tree) if tree is not None else ():
            if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1:
                (name,) = stmt.targets
                here = function_of(stmt) is scope or not isinstance(name, ast.Name)
                if here and frame.scope.value(name) is part.value:
                    found.append(stmt)
        if len(found) == 1 and tree is not None:
            text = ast.unparse(found[0].targets[0])
            fix = _made(found[0].value, frame, target)
            if fix and not _draws_elsewhere(text, tree, node, target, part, frame):
                return fix
    return None


def _draws_elsewhere(
    text: str, tree: ast.AST, node: ast.Call, target: str, part: Part, frame: FailedFrame
) -> bool:
    """Return whether torch draws from it, or may draw, on another device than `target`."""
    reader = Reader(frame)
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or call.lineno == node.lineno:
            continue
        by_name = any(k.arg == "generator" for k in call.keywords)
        draws = by_name or is_torch(frame.scope.value(call.func))
        given = draws and text in [ast.unparse(a) for a in arguments(call)]
        if given and _drawn_on(call, reader, part) != target:
            return True
    return False
