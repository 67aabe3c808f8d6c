"""A fix that is sure: with what it brings next mended too, or none."""

import ast
import difflib
from collections.abc import Iterable

from gpumagic.tensors.explain.edits import bracketed, edited
from gpumagic.tensors.explain.explanation import Fix
from gpumagic.tensors.explain.frames import Place
from gpumagic.tensors.explain.moving_tensors import with_device
from gpumagic.tensors.explain.parts import Part
from gpumagic.tensors.explain.site import Site, moving, written_device
from gpumagic.tensors.explain.verify import next_clash
from gpumagic.tensors.explain.walking import Clash

_TRIES = 4
_LINES = 12


def settle(fix: Fix | None, places: list[Place], odd: Iterable[Part], target: str) -> Fix | None:
    """`fix` if nothing that can be seen fails after it, or with that mended too; otherwise None."""
    odd = list(odd)
    for _ in range(_TRIES):
        clash = next_clash(fix, places, odd, target) if fix is not None else None
        if fix is None or clash is None:
            return fix
        fix = _extended(fix, clash, places)
    return None


def _extended(fix: Fix, clash: Clash, places: list[Place]) -> Fix | None:
    place = next((p for p in places if p.filename == fix.filename), None)
    if clash.node is None or place is None:
        return None
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
