"""Explain an error between devices: from its frames to the operands, the cause, the fix.

Never runs the user's code, never touches the exception, keeps no tensor. If the frames contradict
the text of the error, or a cause is not certain, nothing is said.
"""

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gpumagic import faults
from gpumagic.mismatch import operation
from gpumagic.mismatch.choose import Choice, also_needed, choose, result_clashes
from gpumagic.mismatch.explanation import Explanation, Fix, Operand, expression
from gpumagic.mismatch.moves import Site, climb, make_there, move_modules, move_tensors
from gpumagic.mismatch.operand import Part, full, tensors_of
from gpumagic.mismatch.operation import Conflict, conflict, inside, listed, named, row
from gpumagic.mismatch.special_fixes import (
    for_generator,
    for_host,
    for_load,
    for_optimizer,
    for_worker,
)
from gpumagic.moving.move import origin_of
from gpumagic.usercode.files import label, last_cell, shell
from gpumagic.usercode.frames import FailedFrame, errors, failed_frames
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


def explain(
    error: BaseException, *, namespace: Mapping[str, Any] | None = None
) -> Explanation | None:
    """Explain torch's error between devices in the names of the code that raised it.

    `gpumagic.explain` calls it, and documents the parameters and the result.
    """
    # In an except block an error of ours would hide the user's own.
    with faults.kept("explaining an error"), torch._C.DisableTorchFunctionSubclass():
        for each in errors(error):
            message = operation.read(each)
            if message is not None:
                return _explain(each, message, namespace or {})
    return None


def _explain(
    error: BaseException, message: operation.Message, namespace: Mapping[str, Any]
) -> Explanation | None:
    found = failed_frames(error.__traceback__)
    if not found:
        return None
    frame, outer = found[0], found[1:]
    if namespace:
        frame.scope.outer = {**namespace, **frame.scope.outer}
    if message.kind in ("numpy", "host"):
        return for_host(frame, outer, message)
    if message.kind == "generator":
        return for_generator(frame, outer)
    if message.kind == "worker":
        return for_worker(found)
    if special := for_load(frame) if message.kind == "load" else for_optimizer(frame, message):
        return special
    clash = conflict(frame, message)
    for at in range(len(outer), 0, -1):
        if call := _module_call(found[at], found[at - 1], message):
            clash, outer, message = call, found[at + 1 :], replace(message, kind="mixed")
            break
    choice = choose(clash, message) if clash else None
    if clash is None or choice is None:
        return None
    explanation = _mismatch(clash, choice, outer, message.kind)
    return replace(explanation, first=_placed(found[-1], choice))


def _module_call(
    frame: FailedFrame, within: FailedFrame, message: operation.Message
) -> Conflict | None:
    """Return the call of a module with data elsewhere: its fix is there, not in the module's class.

    None if `within`, the called code, has moved its data since.
    """
    call = conflict(frame, message, certain=True)
    called = call and isinstance(call.operation.node, ast.Call) and call.operation.node.func
    if call is None or not call.operation.calls_module or call.leaves[0].node is not called:
        return None
    now = map(within.scope.name, within.parameters)
    devices = {full(value.device) for value in now if issubclass(type(value), torch.Tensor)}
    data = {part.device for part in call.leaves if part.kind != "module"}
    known = all(len(part.devices) == 1 and _moves_whole(part) for part in call.leaves)
    return call if known and data and data <= devices else None


def _moves_whole(part: Part) -> bool:
    """Whether `.to()` of a module moves all of its tensors."""
    if part.kind != "module" or part.value is None:
        return True
    moving = [*nn.Module.parameters(part.value), *nn.Module.buffers(part.value)]
    return {id(t) for _, t in tensors_of(part.value)} <= {id(t) for t in moving}


def _placed(frame: FailedFrame, choice: Choice) -> str | None:
    """Return the line that places this cell as an earlier one was placed; None if none was."""
    history = getattr(getattr(shell(), "history_manager", None), "input_hist_raw", [""])
    *earlier, now = [text.split(maxsplit=2)[:2] for text in history]
    here = frame.at_top and label(frame.filename) == last_cell()
    gpu, _, number = choice.target.partition(":")
    home = all(part.device == "cpu" and part.value is not None for part in choice.odd)
    if not (here and home and gpu == "cuda") or now[:1] == ["%%ongpu"]:
        return None
    spellings = {number, choice.target, f"gpu:{number}", f"/gpu:{number}"}
    places = {words[1].rstrip("?") for words in earlier if words[:1] == ["%%ongpu"] and words[1:]}
    return f"%%ongpu {number}" if spellings & places else None


def _mismatch(clash: Conflict, choice: Choice, outer: list[FailedFrame], kind: str) -> Explanation:
    frame, node, odd = clash.frame, clash.operation.node, list(choice.odd)
    data = all(part.kind != "module" for part in odd)
    extra = also_needed(frame, node, odd, choice.target) if data else []
    site = Site(frame, node, odd, extra, list(clash.leaves), clash.operation.fixed)
    above, names = climb(site, outer)
    if not data:
        fix = move_modules(above, choice)
    else:
        fix = make_there(site, choice.target) or _fix(site, above, choice)
    frames = [frame for frame in outer if fix is None or frame.filename == fix.filename]
    if fix is not None and result_clashes(frames, odd, choice.target):
        fix = None
    why = reason(clash.leaves, [(frame, odd), (above.frame, above.odd)], kind)
    return Explanation(*expression(frame, node), _rows(clash, choice, site, names), fix, why)


def _fix(site: Site, above: Site, choice: Choice) -> Fix | None:
    """Return the edit in the outermost frame that has the operands; None if none is right."""
    target, other, fix = choice.target, choice.other_nbytes, None
    if above is not site:
        more = also_needed(above.frame, above.node, [*above.odd, *above.extra], target)
        fix = move_tensors(replace(above, extra=[*above.extra, *more]), target, other)
    return fix or move_tensors(site, target, other)


def _rows(
    clash: Conflict, choice: Choice, site: Site, names: dict[str, str]
) -> tuple[Operand, ...]:
    """Return the operands, and the tensors that later meet the result, with the caller's names."""
    rows: list[Operand] = []
    for part, odd in listed([(part, part in choice.odd) for part in clash.leaves]):
        spread = inside(part, choice.target)
        for shown, is_odd in named(part, clash.reader, odd and not spread):
            rows.append(replace(row(shown, is_odd), also=names.get(part.key)))
        rows += spread
    known = {operand.name for operand in rows}
    for part in site.extra:
        if part.text not in known:
            rows.append(replace(row(part, False), also=names.get(part.key), along=True))
    return tuple(dict.fromkeys(rows))
