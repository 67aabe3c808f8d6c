"""Explain an exception: from its frames to the operands, the cause and the fix.

Never runs the user's code, never touches the exception, keeps nothing: the result is text and
numbers. Where what the frames show does not agree with what the text of the error says, there is no
explanation.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from gpumagic import faults
from gpumagic.mismatch.explanation import Explanation, Fix, Operand
from gpumagic.mismatch.fix.choose import Choice, choose, make_there
from gpumagic.mismatch.fix.host_and_state import for_host, for_load, for_optimizer, for_worker
from gpumagic.mismatch.fix.later_uses import also_needed, result_clashes
from gpumagic.mismatch.fix.moves import move_modules, move_tensors
from gpumagic.mismatch.fix.random_numbers import for_generator
from gpumagic.mismatch.fix.site import Site, climb
from gpumagic.mismatch.read import messages
from gpumagic.mismatch.read.operand_rows import expression, inside, listed, named, row
from gpumagic.mismatch.read.operation import Conflict, conflict
from gpumagic.mismatch.reasons import reason
from gpumagic.usercode.frames import FailedFrame, errors, failed_frames


def explain(
    error: BaseException, *, namespace: Mapping[str, Any] | None = None
) -> Explanation | None:
    """Say what torch's error between devices is about, in the names of the code that raised it.

    `gpumagic.explain`, which asks here, says more of the parameters and the result.
    """
    # In an except block an error of ours would hide the user's own.
    with faults.kept("explaining an error"), torch._C.DisableTorchFunctionSubclass():
        for each in errors(error):
            message = messages.read(each)
            if message is not None:
                return _explain(each, message, namespace or {})
    return None


def _explain(
    error: BaseException, message: messages.Message, namespace: Mapping[str, Any]
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
    if message.kind == "load":
        return for_load(frame)
    if message.kind == "worker":
        return for_worker(frame)
    if optimizer := for_optimizer(frame, message):
        return optimizer
    clash = conflict(frame, message)
    choice = choose(clash, message) if clash else None
    return _mismatch(clash, choice, outer, message.kind) if clash and choice else None


def _mismatch(clash: Conflict, choice: Choice, outer: list[FailedFrame], kind: str) -> Explanation:
    frame, node, odd = clash.frame, clash.operation.node, list(choice.odd)
    data = all(part.kind != "module" for part in odd)
    extra = also_needed(frame, node, odd, choice.target) if data else []
    site = Site(frame, node, odd, extra, list(clash.leaves), clash.operation.fixed)
    above, names = climb(site, outer) if data else (site, {})
    if not data:
        fix = move_modules(site, choice)
    else:
        fix = make_there(site, choice.target) or _fix(site, above, choice)
    frames = [frame for frame in outer if fix is None or frame.filename == fix.filename]
    if fix is not None and result_clashes(frames, odd, choice.target):
        fix = None
    why = reason(clash.leaves, [(frame, odd), (above.frame, above.odd)], kind)
    return Explanation(*expression(frame, node), _rows(clash, choice, site, names), fix, why)


def _fix(site: Site, above: Site, choice: Choice) -> Fix | None:
    """The code to paste, as far out as the operands have names; None where none is right."""
    target, other, fix = choice.target, choice.other_nbytes, None
    if above is not site:
        more = also_needed(above.frame, above.node, [*above.odd, *above.extra], target)
        fix = move_tensors(replace(above, extra=[*above.extra, *more]), target, other)
    return fix or move_tensors(site, target, other)


def _rows(
    clash: Conflict, choice: Choice, site: Site, names: dict[str, str]
) -> tuple[Operand, ...]:
    """The operands, and what meets the result further on; `names` has those of the caller."""
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
