"""Whether the code with a fix in it gets past every operation that can be seen from here.

A step forward through the mended text, by devices alone: from the fix to the end of its function,
into the user's functions that are called on the way, and on through those that called it. A fix
that surely brings the next error is not proposed.
"""

import ast
import textwrap
from collections.abc import Iterable
from dataclasses import replace

from gpumagic.mismatch.check.follow import Clash, Walk
from gpumagic.mismatch.check.patched import Mended, World, default_device
from gpumagic.mismatch.explanation import Fix
from gpumagic.mismatch.fix.edits import function_of, statement
from gpumagic.mismatch.read.expressions import Reader
from gpumagic.mismatch.read.operand import Part, flat
from gpumagic.usercode.frames import Place, parse


def next_clash(fix: Fix, places: list[Place], odd: Iterable[Part], target: str) -> "Clash | None":
    """The first operation that surely fails after `fix`, or None.

    Parameters
    ----------
    places : list of Place
        The frame that failed and those that called it, the deepest first.
    odd : iterable of Part
        What `fix` moves.
    target : str
        Where to.
    """
    odd = list(odd)
    at = next((n for n, place in enumerate(places) if _is_in(fix, place)), None)
    mended = Mended.of(fix, places[at]) if at is not None else None
    if at is None or mended is None:
        return None if at is None else Clash()
    everywhere = World(mended, _values(fix, places[at], odd), default_device(mended.tree))
    kept = [part for part in odd if part.kind == "module"]
    lasting = _values(fix, places[at], kept, ast.Attribute, ast.Subscript)
    outside = replace(everywhere, replaced=lasting)
    result: str | None = None
    written: tuple[str, int] | None = None
    for n, place in enumerate(places):
        found = _at(place)
        if found is None:
            return None
        scope, line = found
        before, written = written, (place.filename, getattr(scope, "lineno", 0))
        if n > at and written == before:
            continue  # a comprehension, within the function whose frame this is
        nodes = place.nodes()
        moved = {ast.unparse(nodes[0]): result} if len(nodes) == 1 else {}
        inner: ast.AST | None = scope
        if n == at:
            inner, line, moved = mended.scope(scope), fix.line, {}
        elif n < at:
            if any(part.kind == "module" for part in odd):
                continue
            moved = _same_objects(place, odd, target, everywhere)
            moved |= {} if n else {p.key: target for p in odd}
        if inner is None:
            return None
        walk = Walk(place.scope, moved, everywhere if n < at else outside)
        walk.through(inner, line)
        if walk.clash is not None:
            return walk.clash if n == at else Clash()
        result = walk.result
    return None


def _values(
    fix: Fix,
    place: Place,
    odd: list[Part],
    *kinds: type[ast.AST],
) -> frozenset[int]:
    """The objects that a fix moves, or replaces under a name of one of these kinds."""
    reader = Reader(place.scope, ast.unparse)
    tree = parse(textwrap.dedent(fix.code))
    parts = list(odd)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Assign):
            targets = [t for target in node.targets for t in getattr(target, "elts", [target])]
            targets = [t for t in targets if isinstance(t, kinds or ast.expr)]
            targets += [t.value for t in targets if isinstance(t, ast.Attribute)]
            parts += [part for t in targets if (part := reader.part(t)) is not None]
    leaves = flat(parts)
    leaves += [part.source for part in leaves if part.source is not None]
    return frozenset(id(part.value) for part in leaves if part.value is not None)


def _at(place: Place) -> tuple[ast.AST, int] | None:
    """The function that a frame runs, and the line of the statement that failed."""
    nodes = place.nodes()
    scope, stmt = (function_of(nodes[0]), statement(nodes[0])) if nodes else (None, None)
    if scope is None and stmt is not None and isinstance(getattr(stmt, "parent", None), ast.Module):
        scope = place.tree
    return (scope, stmt.lineno) if scope is not None and stmt is not None else None


def _is_in(fix: Fix, place: Place) -> bool:
    found = _at(place)
    if found is None or place.filename != fix.filename:
        return False
    scope = found[0]
    if isinstance(scope, ast.Module):
        return True
    return getattr(scope, "lineno", 0) <= fix.line <= getattr(scope, "end_lineno", 0)


def _same_objects(
    place: Place, odd: list[Part], target: str, world: World
) -> dict[str, str | None]:
    moved = {id(part.value) for part in odd}
    return {
        name: target if id(held) in moved else None
        for name, held in place.scope.local.items()
        if id(held) in world.replaced
    }
