"""Explain an error about tensors on different devices by its operands, its cause and a fix.

None of the user's code runs, the exception stays unchanged, and no tensor is kept alive. There is
no explanation if the frames contradict the error's message, or if the cause is uncertain. In this
package, an operand is *odd* if it is on the wrong device.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from gpumagic import faults
from gpumagic.mismatch import callers, fixes, sources
from gpumagic.mismatch.explanation import Explanation, Operand, expression, trial_on
from gpumagic.mismatch.operand import TRANSFERS, Part, Reader, full, tensors_of
from gpumagic.mismatch.operation import (
    Message,
    Operation,
    also_needed,
    conflict,
    named_in,
    ran_mixed,
    read,
    without_lengths,
)
from gpumagic.mismatch.special_causes import special_cause
from gpumagic.moving.move import origin_of
from gpumagic.moving.moved import Origin
from gpumagic.usercode.files import last_cell
from gpumagic.usercode.frames import FailedFrame, errors, failed_frames

_SHOWN = 3
_WHY = {
    "numpy": "NumPy works in the host's memory only, so the values must be copied there",
    "host": "torch reads this argument on the CPU, so it must be there",
}
_INDEX = "an index must be on the CPU or on the same device as what it indexes"
_DICT = "a dict does not move with the model: move each of its tensors"


def explain(
    error: BaseException,
    *,
    namespace: Mapping[str, Any] | None = None,
    target: str = "",
    here: bool = False,
) -> Explanation | None:
    """Return the explanation of torch's error, or None. `gpumagic.explain` calls this function.
    The fix moves values to `target`, if given. If `here`, the fix edits no caller's code."""
    # An error in this code would hide the user's error. `faults.kept` catches and records it.
    with faults.kept("explaining an error"), torch._C.DisableTorchFunctionSubclass():
        for each in errors(error):
            if (message := read(each)) and (found := failed_frames(each.__traceback__)):
                found[0].scope.outer = {**(namespace or {}), **found[0].scope.outer}
                return _explain(found, message, target or trial_on.get(), here)
    return None


def _explain(
    found: list[FailedFrame], message: Message, target: str, here: bool
) -> Explanation | None:
    frame, outer = found[0], found[1:]
    special = special_cause(found, message)
    if special or message.kind in ("generator", "ordinal"):
        return special
    clash, on_host = conflict(frame, message), message.kind in ("numpy", "host")
    for at in range(len(outer), 0, -1):
        if not on_host and (call := _module_call(found[at], found[at - 1], message)):
            clash, outer, message = call, found[at + 1 :], replace(message, kind="mixed")
            break
    choice = fixes.choose(clash, message, target) if clash else None
    if clash is None or choice is None:
        return None
    return _mismatch(clash, choice, [] if here else outer, message.kind, here)


def in_library(frame: FailedFrame, message: Message | None) -> Explanation | None:
    """Return an explanation without a fix if a library combined tensors that it made or moved."""
    devices = sorted(message.devices) if message is not None else []
    if len(devices) < 2 or frame.direct or frame.failed is None:
        return None
    rows = (Operand(f"a tensor in {frame.package}", (d,), None, "") for d in devices)
    return Explanation(*expression(frame, frame.failed), (*rows,), None, None)


def _module_call(frame: FailedFrame, within: FailedFrame, message: Message) -> Operation | None:
    """Return the frame's call of a module, if an input is on another device; None if uncertain."""
    call = conflict(frame, message, certain=True)
    if call is None or not call.calls_module or call.parts[0].node is not call.node.func:
        return None
    call = without_lengths(call, within)
    data = {part.device for part in call.parts if part.kind != "module"}
    given = map(within.scope.name, within.parameters)
    now = {full(value.device) for value in given if issubclass(type(value), Tensor)}
    stays = any(ran_mixed(within, name) for name in within.parameters)
    whole = all(map(_moves_whole, call.parts)) and not stays
    return call if whole and data and data <= now else None


def _moves_whole(part: Part) -> bool:
    """Whether an operand is on a single device, and `.to()` moves all of its tensors."""
    if len(part.devices) > 1 or part.kind != "module" or part.value is None:
        return len(part.devices) < 2
    moving = set(map(id, sources.moving_tensors(part.value)))
    return {id(tensor) for _, tensor in tensors_of(part.value)} <= moving


def _mismatch(
    clash: Operation, choice: fixes.Choice, outer: list[FailedFrame], kind: str, here: bool
) -> Explanation:
    frame, node, odd = clash.reader.frame, clash.node, list(choice.odd)
    # For the kind "host", only the failed call needs values on the CPU, so no other value moves.
    extra = also_needed(frame, node, odd, choice.target) if kind != "host" else []
    site = callers.Site(clash, odd, extra)
    above, names = callers.climb(site, outer)
    # A comprehension may have a separate frame, so also try the frame of the enclosing function.
    around = outer[:1] if frame.code.co_name.endswith(("comp>", "expr>")) else []
    places = [(each, odd) for each in [frame, *around]] + [(above.frame, above.odd)]
    tried = [*((each, [*moved, *extra]) for each, moved in places), *places]
    registering = (sources.register(moved, each, choice.target) for each, moved in tried)
    fix = next(filter(None, registering), None)
    lasts, frames = fix, [frame, *outer]
    lost = (callers.keep_copies(moved, frames, choice.target) for moved in ([*odd, *extra], odd))
    kept, why_lost = next((each for each in lost if each[1]), (None, ""))
    # Fix the failed frame, not a caller, so that other uses of an index do not change. A value that
    # torch reads on the CPU must be copied in each call of the function.
    stays = kind == "host" or (kind == "index" and clash.parts[0] not in odd)
    left, why_left = callers.left_behind(odd[0], frame) if len(odd) == 1 else (None, "")
    sent = (fixes.sent_too(each) for each in (() if choice.to_host else (site, above)))
    fix = fix or kept or left or next(filter(None, sent), None)
    fix = fix or fixes.elsewhere(clash, choice, outer)
    fix = fix or fixes.write_fix(site, site if stays else above, choice)
    why = why_lost or why_left or _reason(clash.parts, places, kind, lasts)
    return Explanation(*expression(frame, node), _rows(clash, choice, site, names), fix, why)


def _rows(
    clash: Operation, choice: fixes.Choice, site: callers.Site, names: dict[str, str]
) -> tuple[Operand, ...]:
    """Return table rows for operands, and for tensors that later code combines with the result."""
    rows: list[Operand] = []
    for _, group in groupby(clash.parts, key=lambda part: id(part.node)):
        parts = list(group)
        if len(parts) > 2 * _SHOWN:  # of a long list, show a few odd items and one other item
            odd = [part for part in parts if part in choice.odd]
            parts = odd[:_SHOWN] + [part for part in parts if part not in odd][:1]
        for part in parts:
            for shown, is_odd in _named(part, clash.reader, part in choice.odd):
                rows.append(replace(sources.row(shown, is_odd), also=names.get(part.key)))
    known = {operand.name for operand in rows}
    more = (part for part in site.extra[: 2 * _SHOWN] if part.text not in known)
    rows += [replace(sources.row(p, False), also=names.get(p.key), along=True) for p in more]
    return tuple(dict.fromkeys(rows))


def _named(part: Part, reader: Reader, odd: bool) -> list[tuple[Part, bool]]:
    """Return the values to show for an operand, each with True if the value is odd, else False."""
    # For a result of operators, indices and methods, show only the named tensors in the expression.
    # For a result of any other call, show the result and then the named tensors.
    found = named_in(part, reader)
    if part.kind != "made":
        return [(part, odd)]
    calls = (node for node in ast.walk(part.node) if isinstance(node, ast.Call))
    if found and all(_is_method(call, reader) for call in calls):
        return [(leaf, odd) for leaf in found]
    return [(part, odd), *((leaf, False) for leaf in found)]


def _is_method(node: ast.Call, reader: Reader) -> bool:
    """Whether a call invokes a tensor's method that does not move the tensor."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr in TRANSFERS:
        return False
    owner = reader.part(node.func.value)
    return owner is not None and owner.kind in ("tensor", "made")


def _reason(
    leaves: tuple[Part, ...], frames: list[tuple[FailedFrame, list[Part]]], kind: str, fix: Any
) -> str | None:
    """Return the reason, or None. `frames` pairs each frame with the operands to move there."""
    if kind in _WHY:
        return "; ".join(filter(None, (_WHY[kind], _brought(leaves))))
    if not fix and (told := _brought(leaves)):
        return told
    every = [(part, frame) for frame, odd in frames for part in odd]
    for part, frame in every:
        if part.kind == "module" and (moved := callers.moved_itself(part, frame)[0]):
            return moved
        if left := sources.unregistered(part, frame):
            # If the fix registers the attribute, leave out the advice to register it.
            return left.reason.partition(sources.PERMANENTLY)[0] if fix else left.reason
    if any(part.text.endswith('"]') and part.kind != "module" for part, _ in every):
        return _DICT
    if kind == "index":
        return _INDEX
    return next(filter(None, (callers.made_in(part, frame) for part, frame in every)), None)


def _brought(leaves: tuple[Part, ...]) -> str | None:
    """Return the reason if an earlier cell moved an operand to another device; else None."""
    for origin in _origins(leaves):
        if origin.cell != last_cell():
            return (
                f"{origin.cell or 'a cell'} moved {origin.name} to {origin.there}; "
                "to undo: %ongpu home; to avoid: --back on that %%ongpu line"
            )
    return None


def _origins(leaves: tuple[Part, ...]) -> Iterator[Origin]:
    """Yield the origin of each operand that a cell moved away from the device of all others."""
    for part in leaves:
        parameters = part.value.parameters() if issubclass(type(part.value), nn.Module) else ()
        origin = origin_of(next(iter(parameters), part.value))
        others = {device for other in leaves if other is not part for device in other.devices}
        if origin is not None and part.device and (others or {"cpu"}) == {str(origin.device)}:
            yield origin
