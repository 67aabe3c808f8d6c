"""Follow what is odd from a function's parameter to the name that its caller gave it."""

from dataclasses import dataclass

from gpumagic.mismatch.fix.site import Site, parts_of
from gpumagic.mismatch.read.operand import Part, flat
from gpumagic.usercode.frames import FailedFrame


@dataclass(frozen=True)
class Climbed:
    """The site in the outermost frame that names the same objects."""

    site: Site
    extra: tuple[Part, ...]  # what moves along, by its names there
    names: dict[str, str]  # the names there, by those where it failed, where they differ


def climb(site: Site, extra: list[Part], outer: list[FailedFrame]) -> Climbed:
    """As far out as every operand that moves is the very object that the caller handed over."""
    first = moved = [*site.odd, *extra]
    for frame in outer:
        node = frame.failed
        if node is None or not all(_is_parameter(part, site.frame) for part in moved):
            break
        parts = parts_of(frame, node)
        found = [next((p for p in flat(parts) if p.value is m.value), None) for m in moved]
        above = [part for part in found if part is not None]
        if len(above) < len(moved):
            break
        moved = above
        site = Site(frame, node, moved[: len(site.odd)], parts)
    names = {a.key: b.text for a, b in zip(first, moved, strict=True) if a.text != b.text}
    return Climbed(site, tuple(moved[len(site.odd) :]), names)


def _is_parameter(part: Part, frame: FailedFrame) -> bool:
    known = part.kind == "tensor" and part.value is not None
    return known and part.text in frame.parameters and not frame.at_top
