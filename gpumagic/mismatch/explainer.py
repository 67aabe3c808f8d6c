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

from gpumagic import faults
from gpumagic.mismatch.explanation import (
    Explanation,
    Fix,
    Operand,
    expression,
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
    full,
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
)
from gpumagic.mismatch.sources import (
    moving_tensors,
    register,
    row,
    unregistered,
    with_device,
)
from gpumagic.mismatch.special_causes import special_cause
from gpumagic.moving.move import origin_of
from gpumagic.usercode.files import label, last_cell, shell
from gpumagic.usercode.frames import FailedFrame, errors, failed_frames

_SHOWN = 3
_PLACED = re.compile(r"\s*%%ongpu\b\s*(?:cuda:|/?gpu:)?([^\s?]*)")
_PLACES_ITSELF = re.compile(r"\s*%%(?:ongpu|gpu\w+)\b")
_SAYS_CPU = re.compile(r"""\.cpu\(|["']cpu["']""")
_NUMPY = "NumPy works in the host's memory only, so the values must be copied there"
_HOST = "it is read on the host, before the work starts"
_INDEX = "an index must be on the CPU or on the same device as what it indexes"
_DICT = "a dict does not move with the model: each of its tensors does by itself"


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
    if (special := special_cause(found, message)) or message.kind in ("generator", "ordinal"):
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
    given = map(within.scope.name, within.parameters)
    now = {full(value.device) for value in given if issubclass(type(value), Tensor)}
    return call if all(map(_moves_whole, call.parts)) and data and data <= now else None


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
    # A placed cell leaves on the CPU what its code puts there.
    stays = any(_SAYS_CPU.search(_so_far(each)) for each in found)
    if stays or not (here and home and gpu == "cuda"):
        return None
    *earlier, now = getattr(getattr(shell(), "history_manager", None), "input_hist_raw", [""])
    places = {match[1] for match in map(_PLACED.match, earlier) if match}
    alone = not _PLACES_ITSELF.match(now)
    return f"%%ongpu {number}" if number in places and alone else None


def _so_far(frame: FailedFrame) -> str:
    """Return the code above the failed expression, and its text."""
    above = frame.source.splitlines()[: frame.line - 1]
    return "\n".join([*above, *map(frame.text, frame.candidates)])


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
                rows.append(replace(row(shown, is_odd), also=names.get(part.key)))
    known = {operand.name for operand in rows}
    for part in site.extra:
        if part.text not in known:
            rows.append(replace(row(part, False), also=names.get(part.key), along=True))
    return tuple(dict.fromkeys(rows))


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
                f"{origin.cell or 'a cell'} moved {part.text} to {part.device}; "
                "%ongpu home undoes that, and --back in that cell avoids it"
            )
    return None
