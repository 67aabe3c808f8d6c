"""Explain an error between devices: from its frames to the operands, the cause, the fix.

Never runs the user's code, never touches the exception, keeps no tensor. If the frames contradict
the text of the error, or a cause is not certain, nothing is said.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gpumagic import faults
from gpumagic.mismatch.explanation import (
    Edit,
    Explanation,
    Fix,
    Operand,
    before_loops,
    can_precede,
    expression,
    total,
)
from gpumagic.mismatch.fixes import (
    Choice,
    Site,
    choose,
    climb,
    move_owners,
    write_fix,
)
from gpumagic.mismatch.operand import (
    TRANSFERS,
    Part,
    Reader,
    arguments,
    bytes_of,
    full,
    is_torch,
    tensors_of,
)
from gpumagic.mismatch.operation import (
    Message,
    Operation,
    also_needed,
    conflict,
    meets,
    named_in,
    read,
    sent_home,
)
from gpumagic.mismatch.sources import (
    moving_tensors,
    register,
    unregistered,
    with_device,
)
from gpumagic.moving.move import origin_of
from gpumagic.usercode.files import label, last_cell, shell, source_of
from gpumagic.usercode.frames import FailedFrame, errors, failed_frames, statement

_SHOWN = 3
_PLACED = re.compile(r"\s*%%ongpu\b\s*(?:cuda:|/?gpu:)?([^\s?]*)")
_NUMPY = "NumPy works in the host's memory only, so the values must be copied there"
_HOST = "it is read on the host, before the work starts"
_INDEX = "an index must be on the CPU or on the same device as what it indexes"
_DICT = "a dict does not move with the model: each of its tensors does by itself"
_STATE = (
    "the optimizer took its state on before the model moved; move the model first, then make "
    "the optimizer or load its state"
)
_FILE = "the file holds tensors of a GPU that is not here; load them to the CPU, then move"
_WORKERS = (
    "the workers and pin_memory of a DataLoader can read tensors on the CPU alone; run %ongpu "
    "home, then run the cell again that makes {}, without %%ongpu or with num_workers=0, "
    "pin_memory=False"
)
_SHUFFLES = (
    "the default device is {0}, where it shuffles by a generator of the CPU: make {1} with "
    'generator=torch.Generator("{0}")'
)


def explain(
    error: BaseException, *, namespace: Mapping[str, Any] | None = None
) -> Explanation | None:
    """Explain torch's error between devices in the names of the code that raised it.

    `gpumagic.explain` calls it, and documents the parameters and the result.
    """
    # In an except block an error of ours would hide the user's own.
    with faults.kept("explaining an error"), torch._C.DisableTorchFunctionSubclass():
        for each in errors(error):
            message = read(each)
            found = failed_frames(each.__traceback__) if message is not None else []
            if message is not None and found:
                found[0].scope.outer = {**(namespace or {}), **found[0].scope.outer}
                return _explain(found, message)
    return None


def _explain(found: list[FailedFrame], message: Message) -> Explanation | None:
    frame, outer = found[0], found[1:]
    if message.kind == "generator":
        return _for_generator(found)
    if message.kind == "worker":
        return _for_worker(found)
    if special := _for_load(frame) if message.kind == "load" else _for_optimizer(frame):
        return special
    clash, on_host = conflict(frame, message), message.kind in ("numpy", "host")
    for at in range(len(outer), 0, -1):
        if not on_host and (call := _module_call(found[at], found[at - 1], message)):
            clash, outer, message = call, found[at + 1 :], replace(message, kind="mixed")
            break
    choice = choose(clash, message, [frame, *outer]) if clash else None
    if clash is None or choice is None:
        return None
    explanation = _mismatch(clash, choice, outer, message.kind)
    return replace(explanation, first=_placed(found, choice))


def _module_call(frame: FailedFrame, within: FailedFrame, message: Message) -> Operation | None:
    """Return the call of a module with data elsewhere: its fix is there, not in the module's class.

    None if `within`, the called code, has moved its data since.
    """
    call = conflict(frame, message, certain=True)
    if call is None or not call.calls_module or call.parts[0].node is not call.node.func:
        return None
    data = {part.device for part in call.parts if part.kind != "module"}
    whole = all(map(_moves_whole, call.parts))
    return call if whole and data and data <= _given_devices(within) else None


def _given_devices(frame: FailedFrame) -> set[str]:
    now = map(frame.scope.name, frame.parameters)
    return {full(value.device) for value in now if issubclass(type(value), Tensor)}


def _moves_whole(part: Part) -> bool:
    """Whether `.to()` moves all of an operand, which is on one device."""
    if len(part.devices) > 1:
        return False
    if part.kind != "module" or part.value is None:
        return True
    return {id(t) for _, t in tensors_of(part.value)} <= set(map(id, moving_tensors(part.value)))


def _placed(found: list[FailedFrame], choice: Choice) -> str | None:
    """Return the line that places this cell as an earlier one was placed; None if none was."""
    frame, (gpu, _, number) = found[-1], choice.target.partition(":")
    here = frame.at_top and label(frame.filename) == last_cell()
    home = all(part.device == "cpu" and _follows(part, found[0]) for part in choice.odd)
    if not (here and home and gpu == "cuda") or any(map(_stays_home, found)):
        return None
    history = getattr(getattr(shell(), "history_manager", None), "input_hist_raw", [""])
    *earlier, now = map(_PLACED.match, history)
    places = {match[1] for match in earlier if match}
    return f"%%ongpu {number}" if number in places and not now else None


def _stays_home(frame: FailedFrame) -> bool:
    """Whether a placed cell would bring an operand to the CPU too, because its code says so."""
    node = frame.failed
    return node is not None and sent_home([node], node, frame, made=True)


def _follows(part: Part, frame: FailedFrame) -> bool:
    """Whether a placed cell moves a part, or makes it on its device."""
    made = [node for node, _ in with_device(part.node, frame, "")]
    return part.value is not None or made == [part.node]


def _mismatch(clash: Operation, choice: Choice, outer: list[FailedFrame], kind: str) -> Explanation:
    frame, node, odd = clash.reader.frame, clash.node, list(choice.odd)
    extra = also_needed(frame, node, odd, choice.target)
    site = Site(clash, odd, extra)
    above, names = climb(site, outer)
    # What a comprehension names is named by the function around it too.
    around = outer[:1] if frame.code.co_name.endswith(("comp>", "expr>")) else []
    places = [(each, odd) for each in [frame, *around]] + [(above.frame, above.odd)]
    tried = [*((each, [*moved, *extra]) for each, moved in places), *places]
    fixes = (register(moved, each) for each, moved in tried if choice.target != "cpu")
    fix = next(filter(None, fixes), None)
    # An index is moved where it is used: the function's other uses of it stay as they are.
    an_index = kind == "index" and clash.parts[0] not in odd
    fix = fix or move_owners(choice, [frame, *outer])
    fix = fix or write_fix(site, site if an_index else above, choice)
    if fix and _fails_next(fix, outer[:1], odd, choice.target):
        fix = None
    why = _reason(clash.parts, places, kind)
    return Explanation(*expression(frame, node), _rows(clash, choice, site, names), fix, why)


def _fails_next(fix: Fix, caller: list[FailedFrame], odd: list[Part], target: str) -> bool:
    """Whether the result then meets, in the code that called the function, what does not move."""
    found = [each for each in caller if each.failed and each.filename == fix.filename]
    calls = [(each, each.failed or ast.Pass()) for each in found]
    return any(meets(each, at, odd, {ast.unparse(at): target}, target) for each, at in calls)


# -- the rows
def _rows(
    clash: Operation, choice: Choice, site: Site, names: dict[str, str]
) -> tuple[Operand, ...]:
    """Return the operands, and the tensors that later meet the result, with the caller's names."""
    rows: list[Operand] = []
    for _, group in groupby(clash.parts, key=lambda part: id(part.node)):
        parts = list(group)
        if len(parts) > 2 * _SHOWN:  # of a long list the first few odd ones
            odd = [part for part in parts if part in choice.odd]
            parts = odd[:_SHOWN] + [part for part in parts if part not in odd][:1]
        for part in parts:
            for shown, is_odd in _named(part, clash.reader, part in choice.odd):
                rows.append(replace(_row(shown, is_odd), also=names.get(part.key)))
    known = {operand.name for operand in rows}
    for part in site.extra:
        if part.text not in known:
            rows.append(replace(_row(part, False), also=names.get(part.key), along=True))
    return tuple(dict.fromkeys(rows))


def _row(part: Part, odd: bool) -> Operand:
    return Operand(part.text, part.devices, part.nbytes, part.about, odd=odd)


def _named(part: Part, reader: Reader, odd: bool) -> list[tuple[Part, bool]]:
    """Return a result that has gone by the names of the tensors that it was made from.

    If only operators, indices and methods made it, those tensors replace it; a call's result is
    shown itself, followed by the names in it.
    """
    found = named_in(part, reader)
    if part.kind != "made":
        return [(part, odd)]
    calls = (node for node in ast.walk(part.node) if isinstance(node, ast.Call))
    if found and all(_is_method(call, reader) for call in calls):
        return [(leaf, odd) for leaf in found]
    return [(part, odd), *((leaf, False) for leaf in found)]


def _is_method(node: ast.Call, reader: Reader) -> bool:
    """Whether it calls a tensor's method that leaves the tensor's data where it is."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr in TRANSFERS:
        return False
    owner = reader.part(node.func.value)
    return owner is not None and owner.kind in ("tensor", "made")


# -- the reason
def _reason(
    leaves: tuple[Part, ...], frames: list[tuple[FailedFrame, list[Part]]], kind: str
) -> str | None:
    """One sentence, or None; `frames` has what is odd, by its names in each that names it."""
    if kind in ("numpy", "host"):
        return _NUMPY if kind == "numpy" else _HOST
    if told := _brought(leaves):
        return told
    for frame, odd in frames:
        for part in odd:
            if left := unregistered(part, frame):
                return left.reason
    if any(part.text.endswith('"]') for _, odd in frames for part in odd):
        return _DICT
    return _INDEX if kind == "index" else None


def _brought(leaves: tuple[Part, ...]) -> str | None:
    """Say that an earlier cell moved one operand away from the device of the others."""
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


# -- optimizers, files, loaders, generators
def _in_statement(frame: FailedFrame, kind: type) -> list[tuple[str, Any]]:
    """Return the objects of a class in a frame's statement, with their names."""
    stmt = next(filter(None, map(statement, frame.candidates)), None)
    nodes = ast.walk(stmt.iter if isinstance(stmt, ast.For) else stmt) if stmt else ()
    values = {frame.text(node): frame.scope.value(node) for node in nodes}
    return [(text, value) for text, value in values.items() if issubclass(type(value), kind)]


def _for_optimizer(frame: FailedFrame) -> Explanation | None:
    """Explain an optimizer whose state is not with its parameters."""
    node, found = frame.failed, _in_statement(frame, Optimizer)
    stmt = statement(node) if node is not None else None
    if node is None or stmt is None or len(found) != 1:
        return None
    text, optimizer = found[0]
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    away = _away(optimizer, parameters)
    devices, homes = {full(t.device) for t in away}, {full(p.device) for p in parameters}
    if len(devices) != 1 or len(homes) != 1:
        return None
    # It brings each state to its parameter, whatever the optimizer.
    line = f"{text}.load_state_dict({text}.state_dict())"
    start, nbytes = before_loops(frame, stmt, [text]), total(map(bytes_of, away))
    fix = Edit(frame, start, [line]).fix(nbytes) if can_precede(frame, start) else None
    weights = total(map(bytes_of, parameters))
    rows = (
        Operand(f"{text}.param_groups", tuple(homes), weights, f"{len(parameters)} parameters"),
        Operand(f"{text}.state", tuple(devices), nbytes, f"{len(away)} tensors", odd=True),
    )
    return Explanation(*expression(frame, node), rows, fix, _STATE)


def _away(optimizer: Optimizer, parameters: list[Tensor]) -> list[Tensor]:
    """Return the state that is not with its parameter; counters of steps may be on the CPU."""
    state = ((p, *each) for p in parameters for each in optimizer.state.get(p, {}).items())
    tensors = ((p, t) for p, key, t in state if issubclass(type(t), Tensor) and key != "step")
    return [t for p, t in tensors if t.device != p.device]


def _for_load(frame: FailedFrame) -> Explanation | None:
    """Explain a `torch.load` of a file from a machine with other GPUs."""
    node = frame.failed
    stmt = statement(node) if node is not None else None
    if not isinstance(node, ast.Call) or stmt is None:
        return None
    placed = len(node.args) > 1 or any(k.arg in ("map_location", None) for k in node.keywords)
    if placed or not is_torch(frame.scope.value(node.func)):
        return None
    text = frame.text(node)[:-1].rstrip().rstrip(",")
    edit = Edit(frame, stmt, replaced=[(node, f'{text}, map_location="cpu")')])
    return Explanation(*expression(frame, node), (), edit.fix(None), _FILE)


def _for_worker(frames: list[FailedFrame]) -> Explanation:
    """Name the loader whose workers read tensors on a GPU, by the name in the outermost frame."""
    file, line, rows, name = frames[0].filename, frames[0].line, list[Operand](), "the loader"
    loaders = (each for frame in reversed(frames) for each in _in_statement(frame, DataLoader))
    for name, loader in loaders:
        tensors = [t for _, t in tensors_of(loader) if t.device.type != "cpu"]
        if tensors:
            devices = tuple(dict.fromkeys(full(t.device) for t in tensors))
            about = f"DataLoader, {len(tensors)} tensor{'s' * (len(tensors) > 1)}"
            rows.append(Operand(name, devices, total(map(bytes_of, tensors)), about, odd=True))
            break
    why, code = _WORKERS.format(name), source_of(file, line)
    return Explanation(code, line, file, label(file), tuple(rows), None, why)


def _for_generator(frames: list[FailedFrame]) -> Explanation | None:
    """Explain a generator on another device than the numbers that it is to draw."""
    frame, reader = frames[0], Reader(frames[0])
    node = frame.failed
    for name, _ in _in_statement(frame, DataLoader):
        why = _SHUFFLES.format(full(torch.get_default_device()), name)
        loader = Operand(name, ("cpu",), None, "DataLoader", odd=True)
        return Explanation(*expression(frame, frame.candidates[0]), (loader,), None, why)
    parts = reader.given(node) if isinstance(node, ast.Call) else []
    given = [part for part in parts if part.kind == "generator"]
    if node is None or len(given) != 1:
        return None
    (part,), target = given, _drawn_on(node, reader, given[0])
    if target is None or target == part.device:
        return None
    drawn = [p for p in parts if p.kind in ("tensor", "made")]
    rows = [_row(shown, False) for p in drawn for shown, _ in _named(p, reader, False)]
    fix = _made_on(part, frames, target)
    why = f"numbers for {target} are drawn by a generator on {target}"
    why += "" if fix else f': give it one made by torch.Generator("{target}")'
    return Explanation(*expression(frame, node), (*rows, _row(part, True)), fix, why)


def _drawn_on(node: Any, reader: Reader, part: Part) -> str | None:
    """Return the device of the numbers that a call draws."""
    for keyword in node.keywords:
        if keyword.arg == "device":
            return reader.device(keyword.value, "")
    owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    for candidates in (owner, arguments(node)):
        found = [p for n in candidates for p in reader.parts(n) if p.kind in ("tensor", "made")]
        if len({p.device for p in found}) == 1:
            return found[0].device
    return "cpu" if part.device != "cpu" else None


def _made_on(part: Part, frames: list[FailedFrame], target: str) -> Fix | None:
    """Return the edit of the one call that makes a generator, if all its draws are on `target`.

    Not a line where it is used: made again in each turn, it would draw the same numbers.
    """
    for frame in frames:
        nodes = ast.walk(frame.tree) if frame.tree is not None else ()
        found = [s for s in nodes if isinstance(s, ast.Assign) and len(s.targets) == 1]
        found = [s for s in found if frame.scope.value(s.targets[0]) is part.value]
        made, text = part.node, part.key
        if part.value is not None and len(found) == 1:
            made, text = found[0].value, ast.unparse(found[0].targets[0])
        stmt, calls = statement(made), with_device(made, frame, f'"{target}"')
        if stmt is not None and calls:
            elsewhere = _draws_elsewhere(text, frame, part, target)
            return None if elsewhere else Edit(frame, stmt, replaced=calls).fix(0)
    return None


def _draws_elsewhere(text: str, frame: FailedFrame, part: Part, target: str) -> bool:
    """Return whether torch draws from it, or may draw, on another device than `target`."""
    reader, nodes = Reader(frame), ast.walk(frame.tree) if frame.tree is not None else ()
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        by_name = any(keyword.arg == "generator" for keyword in call.keywords)
        given = text in [ast.unparse(argument) for argument in arguments(call)]
        draws = given and (by_name or is_torch(frame.scope.value(call.func)))
        if draws and _drawn_on(call, reader, part) != target:
            return True
    return False
