"""The fix as code: where most is mended by one line, and as the user would write it."""

from gpumagic.mismatch.explanation import Fix
from gpumagic.mismatch.fix.choose import Choice
from gpumagic.mismatch.fix.fix_modules import module_of, move_modules
from gpumagic.mismatch.fix.fix_tensors import move_tensors
from gpumagic.mismatch.fix.site import Site, parts_of
from gpumagic.mismatch.read.operand import Part
from gpumagic.mismatch.read.operation import Conflict
from gpumagic.usercode.frames import Place


def write(found: Conflict, outer: list[Place], choice: Choice, extra: list[Part]) -> Fix | None:
    """The fix for the operands that `choice` moves, and for `extra`, which meet the result."""
    site = Site(found.place, found.operation.node, list(choice.odd), list(found.leaves))
    site.fixed = found.operation.fixed
    target = choice.target
    if all(p.kind == "module" for p in choice.odd):
        return move_modules(site, outer, choice)
    if target == "cpu":
        return move_tensors(site, target, extra, choice.other_nbytes)
    if lifted := module_of(choice.odd, outer):
        place, node, part = lifted
        inner = Site(place, node, [part], parts_of(place, node))
        return move_modules(inner, [], choice)
    return move_tensors(site, target, extra, choice.other_nbytes)
