"""Move modules: once, before the loops around what failed."""

import ast
from dataclasses import replace

from gpumagic.mismatch.explanation import Fix
from gpumagic.mismatch.fix.choose import Choice
from gpumagic.mismatch.fix.edits import Edit, bracketed, can_precede
from gpumagic.mismatch.fix.site import Site, moving, written_device
from gpumagic.mismatch.read.operand import bytes_of, tensors_of
from gpumagic.mismatch.read.syntax import in_own_scope, loops_around, root, statement, stored, uses
from gpumagic.usercode.values import full


def move_modules(site: Site, choice: Choice) -> Fix | None:
    """The fix for operands that are all modules; None where one is used on both devices."""
    stmt = statement(site.node)
    if stmt is None or any(_used_before(part.text, stmt) for part in site.odd):
        return None
    loops = loops_around(stmt)
    names = {root(part.text) for part in site.odd}
    if loops and can_precede(site.frame, loops[-1]) and not names & stored(loops[-1]):
        stmt = loops[-1]
    edit, nbytes = Edit(site.frame, stmt), 0
    above = replace(site, node=stmt)
    for part in site.odd:
        if part.value is None or in_own_scope(part.node) or not can_precede(site.frame, stmt):
            device = written_device(site, choice.target, before=False)
            edit.replaced.append((part.node, moving(bracketed(part.node, part.text), device)))
            continue
        edit.before.append(moving(part.text, written_device(above, choice.target, before=True)))
        tensors = [tensor for _, tensor in tensors_of(part.value)]
        nbytes += sum(bytes_of(t) or 0 for t in tensors if full(t.device) != choice.target)
    return edit.fix(None if edit.replaced else nbytes, choice.other_nbytes, once=True)


def _used_before(text: str, stmt: ast.stmt) -> bool:
    """Whether a loop uses the module earlier in its turn, where it must be as it is now."""
    return any(
        use.lineno < stmt.lineno and isinstance(getattr(use, "parent", None), ast.Call)
        for loop in loops_around(stmt)
        for use in uses(loop, text)
    )
