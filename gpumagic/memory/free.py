"""Free GPU memory that no variable of the user holds, and show what was freed.

IPython's outputs and exceptions hold such memory. A variable is deleted only if the user names it.
"""

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumagic.device import cuda_state
from gpumagic.display.table import Shown, block, tag
from gpumagic.display.units import size, some
from gpumagic.errors import GpuError, meant
from gpumagic.memory import holders_by_name
from gpumagic.memory.holders_by_name import FoundStorage, find
from gpumagic.memory.memory_report import EXCEPTION, KEPT, OUTPUT, MemoryHolder
from gpumagic.memory.roots import KeptOutputs, release_errors
from gpumagic.usercode.files import user_namespace
from gpumagic.usercode.frames import first_name
from gpumagic.usercode.values import torch_here


@dataclass(frozen=True)
class Released:
    """Record how many bytes one released holder freed."""

    cause: str  # "the exception of In [7]", "Out[3], _", "batch"
    nbytes: dict[str, int]  # freed bytes, by device


@dataclass(frozen=True, repr=False)
class Freed(Shown):
    """Record the result of `%gpufree`. Comments in the source describe the attributes."""

    released: tuple[Released, ...]  # variables in the order given; some may have freed nothing
    allocated: dict[str, int]  # bytes still allocated, by device
    holders: tuple[MemoryHolder, ...]  # the remaining holders, the largest first
    skipped: tuple[str, ...] = ()  # names that could not be deleted, each with the reason
    cache: int = 0  # bytes returned to the driver by torch's cache, including freed tensors

    @property
    def nbytes(self) -> int:
        """Freed bytes of tensors, on all GPUs together."""
        return sum(sum(each.nbytes.values()) for each in self.released)


def free_memory(*what: object) -> Freed:
    """Free the GPU memory that no variable holds, and report how much was freed.

    Release exceptions and outputs that hold tensors on a GPU, and collect garbage. Then return
    cuBLAS's workspaces and the unused cache of torch's allocator to the driver. In an `except`
    block, also clear the frames of the handled error.

    Parameters
    ----------
    *what : str, int, torch.device or Device
        Names of variables to delete too. A variable that cannot be deleted, or whose memory has
        another holder, is listed in `skipped`. If GPUs are given, such as ``0`` or ``"cuda:1"``,
        only exceptions and outputs that hold memory on these GPUs are released.

    Returns
    -------
    Freed
        Freed bytes by cause and device, and the remaining holders.

    Raises
    ------
    GpuError
        No named variable has memory on a GPU; a named GPU does not exist; or CUDA is dead.

    Examples
    --------
    >>> gpumagic.free_memory("batch")
    freed 3.2 GiB (the exception of In [7]: 2.1 GiB on cuda:0, batch: 1.1 GiB on cuda:0) · …
    """
    cuda_state.check()  # if CUDA is dead, destroying a CUDA event ends this process
    namespace = user_namespace()
    names, gpus = holders_by_name.names_and_gpus(what, namespace)
    meter = _Meter()
    _clear_failed_backward()
    gc.collect()
    meter.take("garbage", always=False)
    found, outputs = find(namespace), KeptOutputs(namespace)
    skipped = _skipped(names, namespace, outputs, found)
    gone = [n for n in names if n in namespace and n not in skipped and not outputs.has(n)]
    spare = _held_only_by(gone, found)
    skipped |= (stays := _still_held(gone, found, spare))
    gone = [name for name in gone if name not in stays]
    meter.due = spare
    _release_kept(found, spare, gpus or {each.device for each in found}, outputs, meter)
    for name in reversed(gone):  # memory that several names hold counts for the last deleted
        del namespace[name]
        meter.take(name, {name})
    meter.released += [meter.released.pop() for _ in gone]  # restore the order of the names
    cache = _return_cache()
    meter.take("cuBLAS workspace", always=False)
    left = tuple(holders_by_name.grouped(find(namespace)))
    return Freed(tuple(meter.released), allocated(), left, tuple(skipped.values()), cache)


def _clear_failed_backward() -> None:
    """Run a small backward pass, to clear the tasks that a failed backward pass left queued."""
    if (torch := torch_here()) is not None:
        with torch.enable_grad(), torch.inference_mode(False):
            torch.ones((), device="cpu", requires_grad=True).backward()


def _return_cache() -> int:
    """Return cuBLAS's workspaces and torch's unused cache to the driver; return their bytes."""
    if (torch := torch_here()) is None:
        return 0
    from gpumagic.memory.allocator import clear_workspaces

    clear_workspaces()
    reserved = [torch.cuda.memory_reserved(n) for n in range(torch.cuda.device_count())]
    torch.cuda.empty_cache()
    return sum(old - torch.cuda.memory_reserved(n) for n, old in enumerate(reserved))


def _holders(found: Iterable[FoundStorage], kind: str) -> set[str]:
    return {way.root for each in found for way in each.ways if way.kind == kind}


def _release_kept(
    found: Iterable[FoundStorage],
    spare: Iterable[FoundStorage],
    gpus: Collection[str],
    outputs: KeptOutputs,
    meter: "_Meter",
) -> None:
    """Release the exceptions that hold storages in `found`, and the outputs that hold `spare`.
    `spare` are storages that no variable holds, except variables to delete."""
    found, spare = ([each for each in side if each.device in gpus] for side in (found, spare))
    every, held = _holders(found, EXCEPTION), set[str]().union(*(each.roots for each in spare))
    if every:
        release_errors()
    if errors := held & every:
        meter.take(", ".join(sorted(errors)), errors)
    elif every:
        # Variables hold this memory too, so no memory is freed now. Without the cycles of the
        # exceptions, a cell that rebinds these variables frees the memory at once.
        gc.collect()
    if dropped := [name for name in outputs.numbered() if name in held]:
        outputs.drop(dropped)
        meter.take(", ".join(dropped), _holders(spare, OUTPUT))


def _held_only_by(names: Collection[str], found: Iterable[FoundStorage]) -> list[FoundStorage]:
    return [e for e in found if all(way.kind in KEPT or way.root in names for way in e.ways)]


def _still_held(
    names: Collection[str], found: Iterable[FoundStorage], spare: Collection[FoundStorage]
) -> dict[str, str]:
    """Return the reason for each name whose deletion would free nothing."""
    said = {}
    for name in names:
        if not any(name in each.roots for each in spare):
            ways = (way for each in found if name in each.roots for way in each.ways)
            others = {w.root: None for w in ways if w.kind not in KEPT and w.root not in names}
            verb = "hold" if len(others) > 1 else "holds"
            said[name] = f"{name} stays: {some(others)} {verb} its memory too"
    return said


def _skipped(
    names: Collection[str],
    namespace: Mapping[str, Any],
    outputs: KeptOutputs,
    found: Iterable[FoundStorage],
) -> dict[str, str]:
    """Return the reason for each name that cannot be deleted; GpuError if none can be deleted."""
    known = {*namespace, *outputs.numbered()}
    holding = {name for each in found for name in each.roots if name in known}
    skipped = {
        name: f"{name} holds nothing on a GPU"
        if name in known
        else f"{name} is a part of {whole}, and %gpufree deletes whole variables"
        if (whole := first_name(name)) in known
        else f"there is no variable {name!r}"
        for name in names
        if name not in holding and not outputs.has(name)
    }
    if skipped and len(skipped) == len(names):
        name, why = next(iter(skipped.items()))
        question = "" if first_name(name) in namespace else meant(name, namespace)
        raise GpuError(f"{why}; {question}%gpumem shows what is on a GPU")
    return skipped


def allocated() -> dict[str, int]:
    """Return the bytes of tensors and of other frameworks' arrays, by GPU."""
    torch = torch_here()
    count = torch.cuda.device_count() if torch is not None else 0
    found = Counter({f"cuda:{n}": torch.cuda.memory_allocated(n) for n in range(count)})
    for place in {place for _, place in holders_by_name.array_places([])}:
        found[place.device] += place.nbytes
    return dict(found)


class _Meter:
    def __init__(self) -> None:
        self.released: list[Released] = []
        self.due: list[FoundStorage] = []  # storages whose holders are not all released yet
        self._gone = set[str]()
        self._before = allocated()

    def take(self, cause: str, holders: Collection[str] = (), *, always: bool = True) -> None:
        """Record the bytes freed since the last call. If more are due, first collect garbage."""
        self._gone.update(holders)
        due = sum(each.nbytes for each in self.due if each.roots <= self._gone)
        self.due = [each for each in self.due if not each.roots <= self._gone]
        now = allocated()
        # A collection takes seconds in a large process, and most objects are freed without one.
        if sum(self._before.values()) - sum(now.values()) < due:
            gc.collect()
            now = allocated()
        came = {d: max(before - now.get(d, 0), 0) for d, before in self._before.items()}
        if always or any(came.values()):
            self.released.append(Released(cause, came))
        self._before = now


def text(freed: Freed) -> str:
    gave = [each for each in freed.released if any(each.nbytes.values())]
    causes = ", ".join(f"{each.cause}: {_sizes(each.nbytes)}" for each in gave)
    nothing = [f"{each.cause}: nothing" for each in freed.released if each not in gave]
    head = "; ".join(["nothing was freed", *nothing]) if nothing else "there was nothing to free"
    if freed.cache and not gave:
        head = "; ".join([f"freed {size(freed.cache)} of torch's cache", *nothing])
    if gave:
        head = f"freed {size(freed.nbytes)} ({'; '.join([causes, *nothing])})"
    most = ", ".join(f"{row.path} ({size(row.nbytes)})" for row in freed.holders[:3])
    left = f"{_sizes(freed.allocated)} still allocated" + f", most by {most}" * bool(most)
    if not any(freed.allocated.values()):
        left = "no tensor is left on a GPU"
    return " · ".join([head, *freed.skipped, left])


def html(freed: Freed) -> str:
    return block(tag("div", text(freed)))


def _sizes(nbytes: dict[str, int]) -> str:
    """Return sizes as text: `1.2 GiB on cuda:0 and 3 MiB on cuda:1`."""
    return " and ".join(f"{size(count)} on {device}" for device, count in nbytes.items() if count)
