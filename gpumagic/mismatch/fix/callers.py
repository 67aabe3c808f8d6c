"""Follow what is odd from a function's parameter to the name that its caller gave it."""

from dataclasses import dataclass

from gpumagic.mismatch.fix.fix_tensors import used_again
from gpumagic.mismatch.fix.site import Site
from gpumagic.mismatch.read.expressions import Reader
from gpumagic.mismatch.read.operand import Part, flat
from gpumagic.mismatch.read.operation import operation
from gpumagic.usercode.frames import Place


@dataclass(frozen=True)
class Climbed:
    """The site in the outermost frame that names the same objects, and their names there."""

    site: Site
    extra: tuple[Part, ...]
    names: dict[str, str]


def climb(site: Site, extra: list[Part], outer: list[Place]) -> Climbed:
    """As far out as every operand that moves is the very object that the caller handed over."""
    names: dict[str, str] = {}
    inner_names = {part.key: part.text for part in [*site.odd, *extra]}
    moving = [*site.odd, *extra]
    for place in outer:
        if not all(_is_parameter(part, site.place) for part in moving):
            break
        nodes = place.nodes()
        if len(nodes) != 1:
            break
        done = operation(nodes[0], Reader(place.scope, place.text))
        leaves = flat(done.parts) if done else []
        found = [next((p for p in leaves if p.value is part.value), None) for part in moving]
        if done is None or any(part is None for part in found):
            break
        above = [part for part in found if part is not None]
        for key, text in list(inner_names.items()):
            for before, after in zip(moving, above, strict=True):
                if before.key == key or before.text == names.get(key):
                    names[key] = after.text
            inner_names[key] = text
        moving = above
        site = Site(place, nodes[0], moving[: len(site.odd)], list(done.parts))
    told = {key: name for key, name in names.items() if name != inner_names.get(key)}
    return Climbed(site, tuple(moving[len(site.odd) :]), told)


def _is_parameter(part: Part, place: Place) -> bool:
    return (
        part.kind == "tensor"
        and part.value is not None
        and part.text in place.parameters
        and not place.at_top
    )


def climb_to_globals(site: Site, extra: list[Part], outer: list[Place]) -> Climbed | None:
    """To the cell, where what is odd in a function is a global name that it uses more than once."""
    top = next((place for place in outer if place.at_top), None)
    parts = [*site.odd, *extra]
    if top is None or site.place.at_top or top.scope.outer is not site.place.scope.outer:
        return None
    nodes = top.nodes()
    if len(nodes) != 1 or not all(_is_global(part, site.place) for part in parts):
        return None
    if not any(used_again(part, site.node) for part in site.odd) and not extra:
        return None
    return Climbed(Site(top, nodes[0], list(site.odd), for_good=True), tuple(extra), {})


def _is_global(part: Part, place: Place) -> bool:
    code = place.code
    names = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    return part.kind == "tensor" and part.text.isidentifier() and part.text not in names
