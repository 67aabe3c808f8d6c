"""Show what was given back: one line, that ends with what still holds the most."""

from gpumagic.display.table import block, tag
from gpumagic.display.units import size, some
from gpumagic.memory.freed import Freed, Released
from gpumagic.memory.memory_report import MemoryHolder

_HOLDERS = 3


def text(freed: Freed) -> str:
    """`freed 3.2 GiB (…) · 512 MiB on cuda:0 still allocated, most by net (400 MiB)`."""
    return " · ".join(_parts(freed))


def html(freed: Freed) -> str:
    """The same line as HTML."""
    head, *rest = _parts(freed)
    return block(tag("b", head) + "".join(tag("span", f" · {part}", "gm-dim") for part in rest))


def _parts(freed: Freed) -> list[str]:
    parts = [_head(freed), *freed.skipped]
    if freed.kept:
        are = "is a variable" if len(freed.kept) == 1 else "are variables"
        parts.append(f"{some(freed.kept)} {are} too, and stayed")
    if freed.debug_gone:
        parts.append("%debug has nothing to look into any more")
    if any(freed.returned.values()):
        parts.append(f"{_sizes(freed.returned)} went back to the driver")
    return [*parts, _held(freed)]


def _head(freed: Freed) -> str:
    gave = [each for each in freed.released if any(each.nbytes.values())]
    nothing = [_nothing(each) for each in freed.released if each not in gave]
    without = "".join(f"; {each}" for each in nothing)
    if not gave:
        return f"nothing was freed{without}" if nothing else "there was nothing to free"
    causes = ", ".join(f"{each.cause}: {_sizes(each.nbytes)}" for each in gave)
    return f"freed {size(freed.nbytes)} ({causes}{without})"


def _nothing(released: Released) -> str:
    """`x: nothing, for y holds it too`."""
    hold = "hold" if len(released.held_by) > 1 else "holds"
    still = f", for {some(released.held_by)} {hold} it too" if released.held_by else ""
    return f"{released.cause}: nothing{still}"


def _sizes(nbytes: dict[str, int]) -> str:
    """`1.2 GiB on cuda:0 and 3 MiB on cuda:1`."""
    return " and ".join(f"{size(count)} on {device}" for device, count in nbytes.items() if count)


def _held(freed: Freed) -> str:
    if not any(freed.allocated.values()):
        return "no tensor is left on a GPU"
    most = ", ".join(_holder(row) for row in freed.holders[:_HOLDERS])
    return f"{_sizes(freed.allocated)} still allocated" + (f", most by {most}" if most else "")


def _holder(row: MemoryHolder) -> str:
    made = f" of {row.made}" if row.made else ""
    return f"{row.path}{made} ({size(row.nbytes)})"
