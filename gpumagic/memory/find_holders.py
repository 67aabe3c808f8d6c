"""Find every storage on a GPU, its bytes, and the paths by which Python reaches it.

Each storage counts once, as torch's allocator counts it; arrays of other libraries by the
protocols for exchanging arrays. The result is names and numbers and keeps nothing alive; none of
the user's code runs.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic import faults
from gpumagic.frameworks.framework import Place, library_of, place_of, wholes
from gpumagic.frameworks.known import started
from gpumagic.memory.memory_report import KEPT, kind_of_array
from gpumagic.memory.object_graph import AT_ONCE, Root, Walk, no_collections, of_kinds
from gpumagic.memory.paths import Paths, Way
from gpumagic.memory.roots import Roots, walk_unreachable
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    from gpumagic.memory.allocator import Allocator, Spot


def array_places(arrays: Iterable[Any]) -> list[tuple[Any, Place]]:
    """Return arrays with their memory on GPUs; a view has the place of its base.

    A framework that lists its live arrays gives all of them, reached by the walk or not.
    """
    every = {id(array): array for array in arrays}
    for framework in started():
        with faults.kept(f"listing the arrays of {framework.name}"):
            every |= {id(array): array for array in framework.live()}
    found: list[tuple[Any, Place]] = []
    for array in every.values():
        with faults.kept("asking another library's array where it is"):
            found += [(array, place) for place in _places(array)]
    # What is the whole says by its name who holds it.
    found.sort(key=lambda each: -each[1].nbytes)
    whole = wholes(place for _, place in found)
    return [(array, whole[place]) for array, place in found]


def _places(array: Any) -> list[Place]:
    for framework in started():
        if framework.is_array(array):
            every = framework.places(array)
            break
    else:
        place = place_of(array)
        every = [place] if place is not None else []
    return [place for place in every if place.device != "cpu"]


# They include the constants of compiled programs.
_UNMET = "held by {} itself, or by no Python object"


class FoundStorage(NamedTuple):
    """Describe a piece of memory on a GPU: its bytes, and its holders; the first one counts."""

    device: str
    address: int  # as in torch.cuda.memory_snapshot()
    nbytes: int
    ways: tuple[Way, ...]
    path: str = ""  # where paths were asked for
    parameter: str = ""  # path of the parameter that this state or saved tensor belongs to
    is_of_other_library: bool = False  # torch has not allocated it

    @property
    def is_kept(self) -> bool:
        """Whether only holders that `%gpufree` releases hold it."""
        return all(way.kind in KEPT for way in self.ways)

    @property
    def roots(self) -> set[str]:
        """Return the first names of all its holders."""
        return {way.root for way in self.ways}


def find(
    namespace: Mapping[str, Any],
    *,
    before: Iterable[Root] = (),
    after: Iterable[Root] = (),
    closed: Iterable[Any] = (),
    allocator: "Allocator | None" = None,
    paths: bool = False,
) -> list[FoundStorage]:
    """List every storage on a GPU that this process holds, the largest first.

    Parameters
    ----------
    namespace : mapping
        The notebook's variables.
    before, after : iterable of Root
        Where to look before and after the notebook's own roots.
    closed : iterable
        Objects through which no path passes.
    allocator : Allocator, optional
        The allocator's blocks, if they were read already.
    paths : bool, default False
        Whether each storage gets the path to it, which takes longer.
    """
    torch = torch_here()
    if torch is not None and allocator is None:
        from gpumagic.memory.allocator import Allocator

        allocator = Allocator()
    # Nor may a `__torch_function__` of the user's run.
    with no_collections(), torch._C.DisableTorchFunction() if torch else nullcontext():
        roots = Roots(namespace)
        walk = Walk([*roots.closed(), *closed])
        search = _Search(walk, allocator)
        try:
            for group in (before, *roots.near(), after):
                walk.walk(group)
            walk.walk_postponed(roots.is_users_class)
            if search.misses_any():
                walk_unreachable(walk, search.missing, roots.far)
            return search.found(paths)
        finally:
            walk.forget()


class _Search:
    """Match the objects that a walk visits with the allocator's blocks."""

    def __init__(self, walk: Walk, allocator: "Allocator | None") -> None:
        self._walk, self._allocator = walk, allocator
        self._first: dict[Spot, int] = {}
        """By place the number of the object there that was met first."""
        self._more: dict[int, list[int]] = {}
        """By that number those of other objects there, if there are any."""
        self._matched = 0

    def misses_any(self) -> bool:
        """Whether there are tensors in storages that the walk has not met."""
        self._match()
        if self._allocator is None:
            return False
        if sum(map(itemgetter(2), self._first)) == self._allocator.total:
            return False
        return any(not self._walk.knows(obj) for obj in self.missing(gc.get_objects()))

    def missing(self, objects: list[Any]) -> Iterator[Any]:
        """Return the tensors and storages whose GPU memory the walk has not met."""
        from torch import Tensor, UntypedStorage

        for obj in of_kinds(objects, Tensor, UntypedStorage):
            place = None if self._allocator is None else self._allocator.place(obj)
            if place is not None and place not in self._first:
                yield obj

    def _match(self) -> None:
        """Note the storages of the objects visited since the last call."""
        met, objects = self._walk.references.tensors, self._walk.objects
        note = self._first.setdefault
        if self._allocator is None:
            return
        for start in range(self._matched, len(met), AT_ONCE):
            some = met[start : start + AT_ONCE]
            places = self._allocator.places([objects[number] for number in some])
            for number, place in zip(some, places, strict=True):
                # As `_note`, without a call.
                if place is not None and (first := note(place, number)) != number:
                    self._more.setdefault(first, []).append(number)
        self._matched = len(met)

    def _note(self, place: Place, number: int) -> int:
        """Note an object; return the number of the first object in the same memory."""
        first = self._first.setdefault(place, number)
        if first != number:
            self._more.setdefault(first, []).append(number)
        return first

    def found(self, paths: bool) -> list[FoundStorage]:
        """Return all storages with the ways to them, the largest first."""
        self._match()
        of_others: set[int] = set()
        unmet: dict[Place, FoundStorage] = {}
        for array, place in array_places(self._walk.references.arrays):
            ours = self._allocator and self._allocator.block(place)  # whose memory it shares
            number = self._walk.number(array)
            if number is not None:
                first = self._note(ours or place, number)
                of_others |= {first} if not ours else set()
            else:
                library = library_of(array)
                way = Way(_UNMET.format(library), kind_of_array(library))
                here = ours or place
                unmet[here] = FoundStorage(*here, (way,), is_of_other_library=not ours)
        found = Paths(self._walk)
        every = [storage for place, storage in unmet.items() if place not in self._first]
        for spot, number in self._first.items():
            ways, objects = found.ways(number), [number]
            if number in self._more:
                objects = found.plain_first([number, *self._more[number]])
                ways = tuple(dict.fromkeys(chain.from_iterable(map(found.ways, objects))))
            names = (found.path(objects[0]), found.parameter(objects)) if paths else ("", "")
            every.append(FoundStorage(*spot, ways, *names, number in of_others))
        return sorted(every, key=itemgetter(2), reverse=True)
