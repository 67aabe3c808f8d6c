"""Walk objects and what they refer to, breadth first, from roots in a given order.

Each object is met once, by the shortest path from the first root that reaches it; other references
to it are noted. Optimizers and graphs come after everything else of their roots, because they refer
to what others hold. Classes and modules come last, because they reach everything.
"""

import gc
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gpumagic.memory.references import References, Refers, postponed

AT_ONCE = 1024
"""So many objects are looked at together: a tensor with a gradient among them has all tensors
asked one by one."""
_CLOSED = -1


@contextmanager
def no_collections() -> Iterator[None]:
    """Let no garbage be collected within: there are many objects, none of them garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Root(NamedTuple):
    """Name a start of a walk: the beginning of its paths, and the row that they belong to."""

    name: str
    value: Any
    kind: str = ""  # of everything found there, if that says more than each object's own kind
    holder: str = ""  # if another than the name


class Walk:
    """Number all visited objects; those in `closed` are roots, and no path passes through them."""

    def __init__(self, closed: Iterable[Any]) -> None:
        self.roots: list[Root] = []
        self.objects: list[Any] = []
        self.parents: list[int] = []
        """The number of the object that each was met through; ``~n`` for root `n` itself."""
        self.others: dict[int, list[int]] = {}
        """The other objects, or roots, that refer to one."""
        self.references = References()
        # Objects that are kept here keep their ids.
        self._kept = list(closed)
        self._numbers = dict.fromkeys(map(id, self._kept), _CLOSED)
        self._postponed: dict[int, tuple[Any, list[int]]] = {}
        self._next = 0
        self._within: Container[int] | None = None

    def number(self, obj: Any) -> int | None:
        """Return the number of a visited object."""
        found = self._numbers.get(id(obj), _CLOSED)
        return None if found == _CLOSED else found

    def forget(self) -> None:
        """Release all visited objects: a cycle would keep them until the next collection."""
        self.references.rules.clear()

    def knows(self, obj: Any) -> bool:
        """Whether an object was met, or is closed."""
        return id(obj) in self._numbers

    def walk(self, roots: Iterable[Root], within: Container[int] | None = None) -> None:
        """Visit everything reachable from the roots, or only the ids in `within`."""
        self._within = within
        for root in roots:
            parent = ~len(self.roots)
            self.roots.append(root)
            self._meet([(parent, [root.value])])
        self._walk()

    def walk_postponed(self, now: Callable[[Any], bool]) -> None:
        """Visit the postponed classes and modules, and everything reachable from them."""
        while chosen := [each for each in self._postponed.values() if now(each[0])]:
            for obj, parents in chosen:
                del self._postponed[id(obj)]
                # A class is reported under its own name, not as the class of some object.
                first = next((parent for parent in parents if parent < 0), parents[0])
                self.others[len(self.objects)] = [each for each in parents if each != first]
                self._numbers[id(obj)] = len(self.objects)
                self.objects.append(obj)
                self.parents.append(first)
            self._walk()

    def _walk(self) -> None:
        objects, indirect = self.objects, list[int]()
        while self._next < len(objects) or indirect:
            if self._next < len(objects):
                some, first = objects[self._next : self._next + AT_ONCE], self._next
                self._next += len(some)
                numbers = self.references.that_refer(some, first)
                self._meet(self._referents(numbers, indirect))
            else:
                waiting, indirect = indirect, []
                self._meet(self._referents(waiting, None))

    def _referents(
        self, numbers: Iterable[int], indirect: list[int] | None
    ) -> Iterator[tuple[int, list[Any]]]:
        """Yield what objects refer to; if `indirect` is a list, it gets the later ones."""
        objects, rules = self.objects, self.references.rules
        later = self.references.indirect if indirect is not None else ()
        for number in numbers:
            kind = id(type(objects[number]))
            if kind in later:
                indirect.append(number)  # type: ignore[union-attr]
            else:
                yield number, rules[kind](objects[number])  # type: ignore[misc]

    def _meet(self, found: Iterable[tuple[int, list[Any]]]) -> None:
        """Note what objects, by number, refer to."""
        # A million objects pass through here: nothing is called that need not be.
        rules, limited = self.references.rules, self._within is not None
        waiting = {} if limited else self._postponed
        objects, note, here = self.objects, self._numbers.setdefault, len(self.objects)
        for parent, referents in found:
            for obj in referents:
                try:
                    refers = rules[id(type(obj))]
                except KeyError:
                    refers = self.references.learn(type(obj))
                if refers is None or (limited and not self._is_within(obj, refers)):
                    continue
                key = id(obj)
                if refers is postponed and key in waiting:
                    waiting[key][1].append(parent)
                elif refers is postponed and not limited and key not in self._numbers:
                    waiting[key] = obj, [parent]
                elif (number := note(key, here)) == here:
                    objects.append(obj)
                    self.parents.append(parent)
                    here += 1
                elif number != _CLOSED:
                    self.others.setdefault(number, []).append(parent)

    def _is_within(self, obj: Any, refers: Refers) -> bool:
        """Whether a limited walk includes an object, or the object refers to more through C."""
        within: Any = self._within
        seen_by_collector = refers in (gc.get_referents, postponed)
        return id(obj) in within or id(obj) in self._numbers or not seen_by_collector


def of_kinds(objects: list[Any], *kinds: type) -> list[Any]:
    """Return the objects of some kinds; checks each type once, not each of a million objects."""
    types = {id(of): of for of in map(type, objects)}
    wanted = {number for number, of in types.items() if issubclass(of, kinds)}
    return [obj for obj in objects if id(type(obj)) in wanted]
