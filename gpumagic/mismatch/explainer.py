"""From an exception to its explanation.

Never runs the user's code, never touches the exception, keeps nothing: the result is text and
numbers. Where what the frames show does not agree with what the text of the error says, there is no
explanation.
"""

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from gpumagic.mismatch.check.extend import once_before_loops, settle
from gpumagic.mismatch.check.later_uses import also_needed, meets_another
from gpumagic.mismatch.explanation import Explanation, Fix
from gpumagic.mismatch.fix.callers import climb, climb_to_globals
from gpumagic.mismatch.fix.choose import Choice, choose, gains, other_way
from gpumagic.mismatch.fix.edits import Edit
from gpumagic.mismatch.fix.fix_factories import create_there
from gpumagic.mismatch.fix.fix_generators import for_generator
from gpumagic.mismatch.fix.fix_tensors import move_tensors
from gpumagic.mismatch.fix.site import Site
from gpumagic.mismatch.fix.special import for_host, for_load, for_optimizer, for_parallel
from gpumagic.mismatch.fix.write import write
from gpumagic.mismatch.read import messages
from gpumagic.mismatch.read.assignments import not_assigned
from gpumagic.mismatch.read.operand_rows import expression, inside, listed, named, row
from gpumagic.mismatch.read.operation import Conflict, conflict
from gpumagic.mismatch.reasons import reason
from gpumagic.usercode.frames import Place, errors, parents, places


def explain(
    error: BaseException, *, namespace: Mapping[str, Any] | None = None
) -> Explanation | None:
    """Say what an error between devices is about, in the names of the code that raised it.

    Parameters
    ----------
    error : BaseException
        As it was caught: its traceback is read.
    namespace : mapping, optional
        Names that the code could see besides those of its frames.

    Returns
    -------
    Explanation or None
        None for any other error, and wherever it is not certain. `str()` is text; IPython shows
        HTML; `.fix` is code to paste. It holds no tensor and no frame.

    Examples
    --------
    >>> try:
    ...     y = net(x)
    ... except RuntimeError as error:
    ...     print(gpumagic.explain(error))
    """
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return _first(error, namespace or {})
    except Exception:  # noqa: BLE001  in an except block ours would hide the user's own error
        return None


def _first(error: BaseException, namespace: Mapping[str, Any]) -> Explanation | None:
    for each in errors(error):
        message = messages.read(each)
        if message is not None:
            return _explain(each, message, namespace)
    return None


def _explain(
    error: BaseException, message: messages.Message, namespace: Mapping[str, Any]
) -> Explanation | None:
    found = places(error.__traceback__)
    if not found:
        return None
    here, outer = found[0], found[1:]
    if namespace:
        here.scope.outer = {**namespace, **here.scope.outer}
    if message.kind in ("numpy", "host"):
        return for_host(here, outer, message)
    if message.kind == "generator":
        return for_generator(here, outer)
    if message.kind == "load":
        return for_load(here)
    if parallel := for_parallel(here, error):
        return parallel
    if optimizer := for_optimizer(here, message):
        return optimizer
    clash = conflict(here, message, {})
    choice = choose(clash, message) if clash else None
    if clash is None or choice is None:
        return None
    choice = _kept_off_the_cpu(clash, choice)
    told = _mismatch(clash, choice, outer, message)
    in_vain = not _pays(choice, clash, told.fix)
    other = other_way(choice, clash) if in_vain or _leads_back(told.fix, found) else None
    again = _mismatch(clash, other, outer, message) if other is not None else None
    if other is None or again is None or again.fix is None:
        return replace(told, fix=None) if in_vain else told
    if told.fix is None:
        return again if _pays(other, clash, again.fix) else told
    return told if _leads_back(again.fix, found) else again


def _pays(choice: Choice, clash: Conflict, fix: Fix | None) -> bool:
    """Whether a fix leaves the work on the GPU, or is worth it, or meant: `table[i].cuda()`."""
    node = clash.operation.node
    above = next(parents(node), None)
    meant = isinstance(above, ast.Attribute) and above.attr in ("to", "cuda")
    return fix is None or meant or gains(choice, fix.nbytes)


def _leads_back(fix: Fix | None, places: list[Place]) -> bool:
    """Whether there is no fix, or one whose result must come back to the host."""
    place = next((p for p in places if fix is not None and p.filename == fix.filename), None)
    if fix is None or place is None:
        return True
    return fix.apply(place.source).count(".cpu()") > place.source.count(".cpu()")


def _kept_off_the_cpu(clash: Conflict, choice: Choice) -> Choice:
    """The cheapest way, unless its result then meets what is on the GPU."""
    if choice.target != "cpu" or any(part.kind == "module" for part in clash.leaves):
        return choice
    if meets_another(clash.place, clash.operation.node, choice.odd, "cpu"):
        return other_way(choice, clash) or choice
    return choice


def _mismatch(
    clash: Conflict, choice: Choice, outer: list[Place], message: messages.Message
) -> Explanation:
    place, node, target = clash.place, clash.operation.node, choice.target
    inner = Site(place, node, list(choice.odd), list(clash.leaves))
    moved: dict[str, str | None] = {part.key: target for part in choice.odd}
    data = all(part.kind != "module" for part in choice.odd)
    extra = also_needed(place, node, choice.odd, moved, target) if data else []
    climbed = climb(inner, extra, outer) if data else climb(inner, [], [])
    if data and climbed.site is inner:
        climbed = climb_to_globals(inner, extra, outer) or climbed
    site, names = climbed.site, climbed.names
    every, moving = [place, *outer], [*choice.odd, *extra]
    fix = settle(_assigning(choice, clash), every, moving, target)
    if fix is None and site.place is not place:
        above: dict[str, str | None] = {p.key: target for p in [*site.odd, *climbed.extra]}
        more = [] if site.for_good else also_needed(site.place, site.node, site.odd, above, target)
        fix = move_tensors(site, target, [*climbed.extra, *more], choice.other_nbytes)
        fix = settle(fix, every, moving, target)
    if fix is None and len(choice.odd) == 1 and not extra:
        fix = create_there(choice.odd[0], inner, target, choice.other_nbytes)
        fix = settle(fix, every, moving, target)
    fix = fix or settle(write(clash, outer, choice, extra), every, moving, target)
    fix = once_before_loops(fix, every, moving, target)
    rows = []
    for part, odd in listed([(part, part in choice.odd) for part in clash.leaves]):
        told = inside(part, target) if len(part.devices) > 1 else []
        for shown, is_odd in named(part, clash.reader, odd and not told):
            rows.append(replace(row(shown, is_odd), also=names.get(part.key)))
        rows += told
    rows = list(dict.fromkeys(rows))
    known = {operand.name for operand in rows}
    along = [part for part in extra if part.text not in known]
    rows += [replace(row(p, False), also=names.get(p.key), along=True) for p in along]
    seen = [(place, list(choice.odd)), (site.place, list(site.odd))]
    why = reason(choice, clash.leaves, seen, message.kind)
    return Explanation(*expression(place, node), tuple(rows), fix, why)


def _assigning(choice: Choice, clash: Conflict) -> Fix | None:
    """`x.to(…)` with nobody to keep its result becomes `x = x.to(…)`."""
    part = choice.odd[0]
    if len(choice.odd) > 1 or part.kind != "tensor" or not part.text.isidentifier():
        return None
    stmt = not_assigned(part.key, clash.place)
    moved = clash.reader.part(stmt.value) if stmt is not None else None
    if stmt is None or moved is None or moved.device != choice.target:
        return None
    text = f"{part.text} = {clash.place.text(stmt)}"
    edit = Edit(clash.place, stmt, replaced=[(stmt, text)])
    return edit.fix(part.nbytes, choice.other_nbytes)
