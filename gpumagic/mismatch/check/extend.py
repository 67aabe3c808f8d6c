"""A fix that is sure: with what it brings next mended too, or none."""

import ast
import difflib
import re
import textwrap
from collections.abc import Iterable
from dataclasses import replace

from gpumagic.mismatch.check.follow import Clash
from gpumagic.mismatch.check.loops import around, changed
from gpumagic.mismatch.check.verify import next_clash
from gpumagic.mismatch.explanation import Fix
from gpumagic.mismatch.fix.edits import bracketed, edited
from gpumagic.mismatch.fix.fix_tensors import with_device
from gpumagic.mismatch.fix.site import Site, moving, written_device
from gpumagic.mismatch.read.operand import Part
from gpumagic.usercode.frames import Place, parse

_TRIES = 4
_LINES = 12
_FOR = (ast.For, ast.AsyncFor)
_OF_ANOTHER = re.compile(r"\([\w.]+\.device\)")


def settle(fix: Fix | None, places: list[Place], odd: Iterable[Part], target: str) -> Fix | None:
    """`fix` if nothing that can be seen fails after it, or with that mended too; otherwise None."""
    odd = list(odd)
    for _ in range(_TRIES):
        clash = next_clash(fix, places, odd, target) if fix is not None else None
        if fix is None or clash is None:
            return fix
        fix = _extended(fix, clash, places)
    return None


def once_before_loops(
    fix: Fix | None, places: list[Place], odd: Iterable[Part], target: str
) -> Fix | None:
    """A move for good of what no loop binds, before the loop; else `fix` as it is."""
    place = next((p for p in places if fix is not None and p.filename == fix.filename), None)
    code = parse(textwrap.dedent(fix.code)) if fix is not None and fix.where == "before" else None
    if fix is None or place is None or place.tree is None or code is None:
        return fix
    found = [s for s in ast.walk(place.tree) if isinstance(s, ast.stmt) and s.lineno == fix.line]
    loops = [s for s in (around(found[0]) if found else ()) if isinstance(s, _FOR)]
    plain = textwrap.dedent(fix.code)
    for loop in reversed(loops):
        # A device that only the loop knows is written out.
        for text in (plain, _OF_ANOTHER.sub(f'("{target}")', plain)):
            names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
            lines = textwrap.indent(text, " " * loop.col_offset)
            first = replace(fix, code=lines, line=loop.lineno, end_line=loop.lineno)
            if not names & changed(loop) and next_clash(first, places, odd, target) is None:
                return first
    return fix


def _extended(fix: Fix, clash: Clash, places: list[Place]) -> Fix | None:
    place = next((p for p in places if p.filename == fix.filename), None)
    if clash.node is None or place is None:
        return None
    if getattr(clash.node, "lineno", fix.line) < fix.line:
        return None  # earlier in a loop: in its first turn what the fix moves is not there yet
    site = Site(place, clash.node, list(clash.odd))
    edits: list[tuple[ast.AST, str]] = []
    for part in clash.odd:
        if part.kind not in ("tensor", "made") or ast.unparse(part.node) != part.text:
            return None
        if clash.target == "host":
            text = f"{bracketed(part.node, part.text)}.detach().cpu()"
        else:
            device = written_device(site, clash.target, before=False)
            call = part.node if part.factory and isinstance(part.node, ast.Call) else None
            moved = moving(bracketed(part.node, part.text), device)
            text = with_device(call, part.text, device) if call is not None else moved
        edits.append((part.node, text))
    lines = place.source.splitlines()
    new = edited(fix.apply(place.source).splitlines(), 1, edits)
    spans = [
        c for c in difflib.SequenceMatcher(None, lines, new, False).get_opcodes() if c[0] != "equal"
    ]
    first, last, begin, end = spans[0][1], spans[-1][2], spans[0][3], spans[-1][4]
    if end - begin > _LINES:
        return None
    counts = [fix.nbytes, *(0 if p.factory else p.nbytes for p in clash.odd)]
    nbytes = None if None in counts else sum(c for c in counts if c is not None)
    where = "replace" if last > first else "before"
    code = "\n".join(new[begin:end])
    return Fix(code, where, first + 1, max(last, first + 1), fix.filename, fix.label, nbytes, None)
