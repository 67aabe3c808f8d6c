"""Find every storage on a GPU, with its bytes and the ways by which Python reaches it.

Each storage is found once, and counted as torch's allocator counts it. What is returned are names
and numbers: it keeps nothing alive. No code of the user's runs, and nothing is imported.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic.frameworks.exchange import Place, library_of
from gpumagic.memory import other_arrays
from gpumagic.memory.edges import AT_ONCE
from gpumagic.memory.heap import Root, Walk, no_collections
from gpumagic.memory.memory_report import KEPT, kind_of_array
from gpumagic.memory.paths import FoundPath, Paths
from gpumagic.memory.roots import Roots
from gpumagic.memory.ways import Way, Ways
from gpumagic.usercode.torch_classes import torch_here

if TYPE_CHECKING:
    from gpumagic.memory.allocator import Allocator

# Constants of what it has compiled are among them.
_UNMET = "held by {} itself, or by no Python object"


class FoundStorage(NamedTuple):
    """A piece of memory on a GPU, its bytes, and the ways to it: the first one counts."""

    device: str
    address: int  # as in torch.cuda.memory_snapshot()
    nbytes: int
    ways: tuple[Way, ...]
    paths: tuple[FoundPath, ...] = ()  # where they were asked for
    is_of_other_library: bool = False  # torch has not allocated it

    @property
    def is_kept(self) -> bool:
        """Whether nothing holds it but what `%gpufree` lets go of."""
        return all(way.kind in KEPT for way in self.ways)

    @property
    def roots(self) -> set[str]:
        """All who hold it, by their first names."""
        return {way.root for way in self.ways}


def find(
    namespace: Mapping[str, Any],
    more: Iterable[Root] = (),
    closed: Iterable[Any] = (),
    allocator: "Allocator | None" = None,
    *,
    paths: bool = False,
) -> list[FoundStorage]:
    """Every storage on a GPU that something in this process holds, the largest first.

    It looks from `more` than the notebook's roots, and through nothing that is `closed`. Where the
    blocks of the allocator were read already, they are given. To write the `paths` takes longer.
    """
    torch = torch_here()
    if torch is not None and allocator is None:
        from gpumagic.memory.allocator import Allocator

        allocator = Allocator()
    # Nor may a `__torch_function__` of the user's come in between.
    with no_collections(), torch._C.DisableTorchFunction() if torch else nullcontext():
        roots = Roots(namespace)
        walk = Walk([*roots.closed(), *closed])
        search = _Search(walk, allocator)
        try:
            for group in (*roots.near(), more):
                walk.walk(group)
            walk.walk_later(roots.is_users_class)
            if search.misses_any():
                from gpumagic.memory.leftovers import walk_leftovers

                walk_leftovers(walk, search.missing, roots.far)
            return search.found(paths)
        finally:
            walk.forget()


class _Search:
    """Matches what a walk meets with what the allocator has given out."""

    def __init__(self, walk: Walk, allocator: "Allocator | None") -> None:
        self._walk, self._allocator = walk, allocator
        self._numbers: dict[Place, list[int]] = {}
        self._matched = 0

    def misses_any(self) -> bool:
        """Whether there are tensors in storages that the walk has not met."""
        self._match()
        if self._allocator is None:
            return False
        if sum(place.nbytes for place in self._numbers) == self._allocator.total:
            return False
        return any(not self._walk.knows(obj) for obj in self.missing(gc.get_objects()))

    def missing(self, objects: list[Any]) -> Iterator[Any]:
        """Those that are tensors or storages on a GPU that was not met before."""
        from torch import Tensor, UntypedStorage

        from gpumagic.memory.leftovers import of_kinds

        for obj in of_kinds(objects, Tensor, UntypedStorage):
            place = None if self._allocator is None else self._allocator.place(obj)
            if place is not None and place not in self._numbers:
                yield obj

    def _match(self) -> None:
        """Note the storages of what was met since the last time."""
        met, objects = self._walk.edges.tensors, self._walk.objects
        if self._allocator is None:
            return
        for first in range(self._matched, len(met), AT_ONCE):
            some = met[first : first + AT_ONCE]
            places = self._allocator.places([objects[number] for number in some])
            for number, place in zip(some, places, strict=True):
                if place is not None:
                    self._numbers.setdefault(place, []).append(number)
        self._matched = len(met)

    def found(self, paths: bool) -> list[FoundStorage]:
        """All storages with the ways to them, the largest first."""
        self._match()
        unmet: dict[Place, str] = {}
        others: set[Place] = set()
        for array, place in other_arrays.places(self._walk.edges.arrays):
            ours = self._allocator and self._allocator.block(place)  # whose memory it shares
            number = self._walk.number(array)
            if not ours:
                others.add(place)
            if number is None:
                unmet[ours or place] = library_of(array)
            else:
                self._numbers.setdefault(ours or place, []).append(number)
        ways = Ways(self._walk, chain.from_iterable(self._numbers.values()))
        written = Paths(self._walk, ways) if paths else None
        every = [
            FoundStorage(
                *place,
                ways.of(numbers),
                _written(written, numbers) if written else (),
                place in others,
            )
            for place, numbers in self._numbers.items()
        ]
        every += [
            FoundStorage(
                *place, (Way(_UNMET.format(library), kind_of_array(library)),), (), place in others
            )
            for place, library in unmet.items()
            if place not in self._numbers
        ]
        return sorted(every, key=itemgetter(2), reverse=True)


def _written(paths: Paths, numbers: Iterable[int]) -> tuple[FoundPath, ...]:
    """Each path once."""
    found = chain.from_iterable(map(paths.found, numbers))
    return tuple({path.path: path for path in found}.values())
