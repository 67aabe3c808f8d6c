"""Explain device errors of optimizers, files, loaders, generators and missing GPUs."""

import ast
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gpumagic.device import here
from gpumagic.device.where import there_is
from gpumagic.display.units import some
from gpumagic.mismatch import operand, sources
from gpumagic.mismatch.callers import earlier_cells
from gpumagic.mismatch.explanation import (
    Edit,
    Explanation,
    Fix,
    Operand,
    around,
    before_loops,
    bracketed,
    can_precede,
    expression,
    total,
)
from gpumagic.mismatch.operation import Message, named_in, storages
from gpumagic.moving.move import origin_of
from gpumagic.usercode.files import label, source_of
from gpumagic.usercode.frames import FailedFrame, parents, statement, stored, uses
from gpumagic.usercode.values import MISSING, of_function

_STATE = (
    "the optimizer's state stayed behind when the model moved; load_state_dict moves the state to "
    "the parameters (or move the model before the optimizer steps or loads its state)"
)
_FILE = "the file holds tensors of a GPU that is not here; load them to the CPU, then move"
_WORKERS = "the workers and pin_memory of a DataLoader can only read tensors on the CPU; "
_AGAIN = (
    "make {} again with num_workers=0, pin_memory=False; or put its tensors on the CPU first: "
    "type {}, then make {} in a cell without %%ongpu"
)
_LIBRARYS = "a library made this loader; turn off workers and pin_memory in the library's options"
_DEFAULT = "the default device is {}, but torch's CPU generator draws these numbers"
_SHOWN = 3
_NUMBERED = (".to", ".cuda", ".device", ".set_device")  # calls that accept a GPU's number


def special_cause(found: list[FailedFrame], message: Message) -> Explanation | None:
    """Explain an error that has one of the causes in this file; return None for other errors."""
    if message.kind == "generator":
        return _for_default_generator(found) or _for_generator(found)
    if message.kind in ("worker", "pin"):
        return _for_worker(found, message.kind == "pin")
    if message.kind in ("load", "ordinal"):
        return _for_missing(found, message.kind)
    return _for_optimizer(found)


def _in_statement(frame: FailedFrame, kind: type) -> list[tuple[str, Any]]:
    """Return the name and value of each object of class `kind` in a frame's failed statement."""
    nodes = ast.walk(_header(frame) or ast.Pass())
    values = {frame.text(node): frame.scope.value(node) for node in nodes}
    return [(text, value) for text, value in values.items() if issubclass(type(value), kind)]


def _header(frame: FailedFrame) -> ast.AST | None:
    """Return a frame's failed statement. For a `for` loop, return only the iterated expression."""
    stmt = next(filter(None, map(statement, frame.candidates)), None)
    return stmt.iter if isinstance(stmt, ast.For) else stmt


def _outermost(frames: list[FailedFrame], name: str, value: Any) -> tuple[Any, ast.stmt, str]:
    """Return (frame, failed statement, name) for the outermost frame that names `value`."""
    for frame in reversed(frames):
        known = [text for text, each in _in_statement(frame, type(value)) if each is value]
        known += [name] * (frame.scope.value(ast.parse(name, mode="eval").body) is value)
        stmt = next(filter(None, map(statement, frame.candidates)), None)
        if known and stmt is not None:
            return frame, stmt, known[0]
    return frames[0], ast.Pass(), name


def _for_optimizer(frames: list[FailedFrame]) -> Explanation | None:
    """Explain an optimizer whose state is not on the device of the parameters."""
    frame, found = frames[0], _in_statement(frames[0], Optimizer)
    node = frame.failed
    if node is None or statement(node) is None or len(found) != 1:
        return None
    text, optimizer = found[0]
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    state = ((p, *each) for p in parameters for each in optimizer.state.get(p, {}).items())
    tensors = ((p, t) for p, key, t in state if issubclass(type(t), Tensor) and key != "step")
    away = [t for p, t in tensors if t.device != p.device]
    devices = {operand.full(tensor.device) for tensor in away}
    homes = {operand.full(parameter.device) for parameter in parameters}
    if len(devices) != 1 or len(homes) != 1:
        return None
    outer, stmt, name = _outermost(frames, text, optimizer)
    # Every optimizer's load_state_dict moves the state to the device of the parameters.
    line = f"{name}.load_state_dict({name}.state_dict())"
    start, nbytes = before_loops(outer, stmt, [name]), total(map(operand.bytes_of, away))
    fix = Edit(outer, start, [line]).fix(nbytes) if can_precede(outer, start) else None
    weights = total(map(operand.bytes_of, parameters))
    rows = (
        Operand(f"{text}.param_groups", tuple(homes), weights, f"{len(parameters)} parameters"),
        Operand(f"{text}.state", tuple(devices), nbytes, f"{len(away)} tensors", odd=True),
    )
    return Explanation(*expression(frame, node), rows, fix, _STATE)


def _for_missing(frames: list[FailedFrame], kind: str) -> Explanation | None:
    """Explain a missing GPU. The fix names the last existing GPU, or loads a file to the CPU."""
    frame, last = frames[0], torch.cuda.device_count() - 1
    node = frame.failed
    if not isinstance(node, ast.Call):
        return None
    numbered = ast.unparse(node.func).endswith(_NUMBERED)
    for each in operand.arguments(node) if last >= 0 else []:
        value = frame.scope.value(each)
        device = operand.device_of(value) if numbered or type(value) is not int else None
        if device is not None and (device.index or 0) > last:
            fix = _renamed(each, node, frames, value, last)
            why = f"{frame.text(each)} is no GPU here: {there_is(here(memory=False))}"
            return Explanation(*expression(frame, node), (), fix, why)
    word = next((word.value for word in node.keywords if word.arg == "map_location"), ast.Pass())
    if kind == "ordinal" or isinstance(word, ast.JoinedStr):  # a library or f-string has the number
        why = f"the code names a GPU that is not here: {there_is(here(memory=False))}"
        return Explanation(*expression(frame, node), (), _within_count(word, frame), why)
    return _with_argument(node, frame, "map_location", '"cpu"', _FILE)


def _renamed(
    each: ast.expr, node: ast.Call, frames: list[FailedFrame], value: Any, last: int
) -> Any:
    """Return the fix that replaces `each`, or the value assigned to `each`, by the last GPU."""
    there = {int: f"{last}", str: f'"cuda:{last}"'}
    new = there.get(type(value), f'torch.device("cuda:{last}")')
    # Fix the outermost code that names the device. Other frames may have an equal int by chance.
    called = frames if type(value) is not int else frames[:1]
    frame, stmt, name = _outermost(called, frames[0].text(each), value)
    made = sources.only_assignment(name, stmt)
    if name.isidentifier() and frame.at_top and not made:
        number = getattr(operand.device_of(value), "index", None)
        return _in_earlier_cell(frame, name, partial(_renumbered, number, last, new)) or Edit(
            frame, before_loops(frame, stmt, [name]), [f"{name} = {new}"]
        ).fix(None)
    fix = (made and _within_count(made.value, frame)) or _within_count(each, frames[0])
    fix = fix or (around(frame, [(made.value, new)], None) if made else None)
    return fix or around(frames[0], [(each, new)], None)


def _in_earlier_cell(frame: FailedFrame, name: str, edits: Callable[..., Any]) -> Fix | None:
    """Return the fix of the latest cell that assigns a variable, unless the failed cell does.
    `edits` returns the edits for the assigned value and the cell's nodes."""
    for cell in () if name in stored(frame.tree or ast.Pass()) else earlier_cells(frame):
        binds: Any = [n for n in cell.nodes if isinstance(n, ast.stmt) and name in stored(n)]
        if binds:
            alone = sources.assigns(binds[-1], name)
            return around(cell, edits(binds[-1].value, cell.nodes) if alone else [], None)
    return None


def _renumbered(
    number: int | None, last: int, new: str, value: ast.AST, nodes: list[Any]
) -> list[tuple[ast.AST, str]]:
    """Return the edit of the number that names a GPU, as in ``GPU = 2``, or else of `value`."""
    read = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    given = [n for n in nodes if isinstance(n, ast.Assign) and stored(n) & read]
    numbers = [n.value for n in given if ast.unparse(n.value) == str(number)]
    return [(numbers[-1], str(last))] if numbers else [(value, new)]


def _within_count(value: ast.AST, frame: FailedFrame) -> Fix | None:
    """Return the fix of an f-string, such as f"cuda:{rank}", for numbers that are too large."""
    found = [node.value for node in ast.walk(value) if isinstance(node, ast.FormattedValue)]
    edits: Any = [(n, f"{bracketed(n, ast.unparse(n))} % torch.cuda.device_count()") for n in found]
    numbers = [int] * (torch.cuda.device_count() > 0)
    known = [type(frame.scope.value(node)) for node in found]
    return around(frame, edits, None) if known == numbers else None


def _with_argument(
    call: ast.Call, frame: FailedFrame, name: str, value: str, why: str
) -> Explanation | None:
    """Explain a torch call that should pass the argument `name`. Return None for other calls."""
    function, stmt = frame.scope.value(call.func), statement(call)
    known = () if stmt is None or not operand.is_torch(function) else _parameters(function)
    given = [keyword.arg for keyword in call.keywords]
    if stmt is None or name not in known or name in given or None in given:
        return None
    edit = Edit(frame, stmt, replaced=[sources.with_keyword(call, frame, f"{name}={value}")])
    return Explanation(*expression(frame, call), (), edit.fix(None), why)


def _parameters(function: Any) -> tuple[str, ...]:
    with suppress(TypeError, ValueError):  # functions written in C++ have no signature
        return tuple(inspect.signature(function).parameters)
    return ()


def _for_worker(frames: list[FailedFrame], pins: bool) -> Explanation:
    """Explain a DataLoader whose workers (or, if `pins`, whose `pin_memory`) read GPU tensors."""
    file, line, loaders = frames[0].filename, frames[0].line, _loaders(frames)
    name, tensors = next(iter(loaders.items()), ("the loader", []))
    made = (operand.describe(t, ast.Name(name), f"{name}.{p}") for p, t in tensors[:_SHOWN])
    rows = tuple(sources.row(part, True) for (part,) in made)
    again = _AGAIN.format(some(loaders) or name, *_made_on_host(loaders, frames[-1]))
    why = _WORKERS + (again if loaders or frames[0].direct else _LIBRARYS)
    # Cells of `%%ongpu` do not pin GPU tensors, so suggest `%%ongpu` with the tensors' GPU.
    moved = chain(*loaders.values(), operand.tensors_of(dict(frames[0].library))) if pins else ()
    gpus = {t.device.index for _, t in moved if t.device.type != "cpu" and origin_of(t)}
    first = f"%%ongpu {gpus.pop()}" if len(gpus) == 1 else None
    return Explanation(source_of(file, line), line, file, label(file), rows, None, why, first)


def _loaders(frames: list[FailedFrame]) -> dict[str, list[tuple[str, Tensor]]]:
    """Return the GPU tensors and paths of the failed loader and the notebook's other loaders."""
    every = [each for frame in reversed(frames) for each in _in_statement(frame, DataLoader)]
    if every:  # else a library made the failed loader
        known = [*frames[-1].scope.outer.items(), *frames[-1].scope.local.items()]
        known = [(n, v) for n, v in known if n[0] != "_" and issubclass(type(v), DataLoader)]
        every += [(n, v) for n, v in known if v.pin_memory or v.num_workers]
    once: dict[int, tuple[str, Any]] = {}
    for name, loader in every:
        once.setdefault(id(loader), (name, loader))
    held = ((name, operand.tensors_of(loader)) for name, loader in once.values())
    on_gpu = ((name, [t for t in found if t[1].device.type != "cpu"]) for name, found in held)
    return {name: tensors for name, tensors in on_gpu if tensors}


def _made_on_host(
    loaders: dict[str, list[tuple[str, Tensor]]], frame: FailedFrame
) -> tuple[str, str]:
    """Return code that moves the loaders' tensors to the CPU, and the objects to create again."""
    away = storages([tensor for held in loaders.values() for _, tensor in held])
    every = {**frame.scope.outer, **frame.scope.local}
    held = {name: v for name, v in every.items() if name[0] != "_" and issubclass(type(v), Tensor)}
    its = {name: tensor for name, tensor in held.items() if storages(tensor) & away}
    # `%ongpu home` does not move tensors that were created on the GPU.
    made = [name for name, tensor in its.items() if origin_of(tensor) is None]
    moves = [f"{', '.join(made)} = {', '.join(f'{name}.cpu()' for name in made)}"] if made else []
    unnamed = not away or away - storages([*its.values()])
    moves += ["%ongpu home"] * bool(unnamed or len(made) < len(its))
    data = {id(every[name].dataset) for name in loaders if name in every}
    again = "the data and " * bool(unnamed or any(id(value) in data for value in every.values()))
    return " and ".join(moves), again + (some(loaders) or "the loader")


def _for_default_generator(frames: list[FailedFrame]) -> Explanation | None:
    """Explain code that draws numbers on the default device with torch's CPU generator."""
    frame = frames[0]
    header, device = _header(frame), operand.full(torch.get_default_device())
    if header is None or statement(header) is None or device == "cpu":
        return None
    made, why = f'torch.Generator("{device}")', _DEFAULT.format(device)
    for name, loader in _in_statement(frame, DataLoader):
        outer, stmt, name = _outermost(frames, name, loader)
        here, edits = sources.only_assignment(name, stmt), partial(_drawing, made)
        fix = (here and around(outer, edits(here.value), 0)) or _in_earlier_cell(outer, name, edits)
        why += "" if fix else f": make {name} with generator={made}"
        row_of = Operand(name, ("cpu",), None, "DataLoader", odd=True)
        return Explanation(*expression(frame, header), (row_of,), fix, why)
    calls = [node for node in ast.walk(header) if isinstance(node, ast.Call)]
    told = (_with_argument(call, frame, "generator", made, why) for call in calls)
    return next(filter(None, told), None)


def _drawing(generator: str, call: ast.AST, nodes: object = ()) -> list[tuple[ast.AST, str]]:
    """Return the edit that gives a new loader a generator; none if `call` makes no loader."""
    makes = isinstance(call, ast.Call) and ast.unparse(call.func).endswith("DataLoader")
    return [(call, f"{ast.unparse(call)[:-1]}, generator={generator})")] if makes else []


def _for_generator(frames: list[FailedFrame]) -> Explanation | None:
    """Explain a generator that is not on the device of the random numbers."""
    frame, reader = frames[0], operand.Reader(frames[0])
    node: Any = frame.failed
    parts = reader.given(node) if isinstance(node, ast.Call) else []
    given = [part for part in parts if part.kind == "generator"]
    if node is None or len(given) != 1:
        return None
    (part,), target = given, _drawn_on(node, reader, given[0])
    if target is None or target == part.device:
        return None
    rows = [sources.row(named, False) for each in parts for named in named_in(each, reader)]
    fix = _made_on(part, node, frames, target)
    why = f"random numbers on {target} need a generator on {target}"
    if fix is None and (fix := _drawn_with(part, node, frame, target)):
        why += f'; to draw them there, create {part.text} with torch.Generator("{target}")'
    why += "" if fix else f': create it with torch.Generator("{target}")'
    return Explanation(*expression(frame, node), (*rows, sources.row(part, True)), fix, why)


def _drawn_on(node: Any, reader: operand.Reader, part: operand.Part) -> str | None:
    """Return the device of the numbers that a call draws; None if unknown."""
    for keyword in node.keywords:
        if keyword.arg == "device":
            return reader.device(keyword.value, "")
    owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    for candidates in (owner, operand.arguments(node)):
        found = [p for n in candidates for p in reader.parts(n) if p.kind in ("tensor", "made")]
        if len({p.device for p in found}) == 1:
            return found[0].device
    return "cpu" if part.device != "cpu" else None


def _drawn_with(part: operand.Part, node: Any, frame: FailedFrame, target: str) -> Fix | None:
    """Return the fix that draws on the generator's device, and moves the numbers to `target`."""
    words = {word.arg: frame.text(word.value) for word in node.keywords}
    name = of_function(frame.scope.value(node.func), "__name__")
    if name not in operand.FACTORIES or words.get("generator") != part.text or "out" in words:
        return None
    # The generator may be None in another call of this function.
    there = 'device="cpu"' if part.device == "cpu" else f"device={part.text}.device"
    to = words.get("device", f'"{target}"')
    code = frame.text(node).replace(f"device={to}", there, 1)
    code = code if "device" in words else sources.with_keyword(node, frame, there)[1]
    plain = there in code and "requires_grad" not in words
    return around(frame, [(node, f"{code}.to({to})")], None) if plain else None


def _made_on(part: operand.Part, node: Any, frames: list[FailedFrame], target: str) -> Fix | None:
    """Return the fix that makes the generator on `target`; None if other code draws elsewhere."""
    words = (word.value for word in node.keywords if word.arg == "device")
    given = [value for value in words if isinstance(value, ast.Name)]
    for frame in frames:
        reader, own_names = operand.Reader(frame), {*frame.code.co_varnames} - {*frame.parameters}
        made = _assignments_of(part.value, frame) if part.value is not None else []
        value, text = (made[0].value, ast.unparse(made[0].targets[0])) if made else (part.node, "")
        reads = ([*parents(use)] for use in uses(frame.tree or ast.Pass(), text))
        draws = [up for up in reads if not isinstance(up[0], ast.Attribute)]
        calls = (next((n for n in up if isinstance(n, ast.Call)), ast.Pass()) for up in draws)
        asked = ([w.value for w in getattr(c, "keywords", ()) if w.arg == "device"] for c in calls)
        alike = all(each and reader.device(each[0], "") == target for each in asked)
        alike |= len(draws) < 2
        cell = ast.walk(frame.tree or ast.Pass()) if frame.at_top else ()
        later = (stored(n) for n in cell if getattr(n, "lineno", 0) >= value.lineno)
        own_names = own_names.union(*later)  # names that are unbound where the generator is made
        names = (n.id for n in given if n.id not in own_names and reader.device(n, "") == target)
        edits = sources.with_device(value, frame, next(names, f'"{target}"'))
        if alike and (fix := around(frame, edits, 0)):
            return fix
    return None


def _assignments_of(value: Any, frame: FailedFrame) -> list[ast.Assign]:
    """Return a frame's assignments to a single name, attribute or item that has this value."""
    nodes = ast.walk(frame.tree or ast.Pass())
    made = [node for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1]
    return [n for n in made if frame.scope.value(n.targets[0]) is value is not MISSING]
