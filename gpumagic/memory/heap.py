"""Walk through what objects refer to, breadth first, from roots in their order.

Each object is met once, by its shortest way from the first root that reaches it; what else refers
to it is noted beside. Classes and modules are left for later, for they lead to everything.
"""

import gc
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gpumagic.memory.edges import Edges, Refers, later

AT_ONCE = 1024
"""So many objects are looked at together: a tensor with a gradient among them has all tensors
asked one by one."""
_CLOSED = -1
# What the collector knows all about, unlike what torch keeps with a tensor.
_PLAIN = (gc.get_referents, later)


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
    """Where a walk begins: how the paths from there begin, and the row that they belong to."""

    name: str
    value: Any
    kind: str = ""  # of all that is found there, where that says more than what it is itself
    holder: str = ""  # if another than the name


class Walk:
    """All objects that were met, by number; those in `closed` are roots and never on the way."""

    def __init__(self, closed: Iterable[Any]) -> None:
        self.roots: list[Root] = []
        self.objects: list[Any] = []
        self.parents: list[int] = []
        """Of each object the one that it was met through; ``~n`` where it is root `n` itself."""
        self.others: dict[int, list[int]] = {}
        """The other objects, or roots, that refer to one."""
        self.edges = Edges()
        # All that is kept here keeps its id.
        self._kept = list(closed)
        self._numbers = dict.fromkeys(map(id, self._kept), _CLOSED)
        self._later: dict[int, tuple[Any, list[int]]] = {}
        self._next = 0
        self._within: Container[int] | None = None

    def number(self, obj: Any) -> int | None:
        """The number of an object that was met."""
        found = self._numbers.get(id(obj), _CLOSED)
        return None if found == _CLOSED else found

    def forget(self) -> None:
        """Let go of all that was met: what refers to itself would stay until it is collected."""
        self.edges.rules.clear()

    def knows(self, obj: Any) -> bool:
        """Whether an object was met, or is closed."""
        return id(obj) in self._numbers

    def walk(self, roots: Iterable[Root], within: Container[int] | None = None) -> None:
        """Meet all that roots lead to; if `within` is given, of objects only those of its ids."""
        self._within = within
        for root in roots:
            parent = ~len(self.roots)
            self.roots.append(root)
            self._meet([(parent, [root.value])])
        self._walk()

    def walk_later(self, now: Callable[[Any], bool]) -> None:
        """Meet the classes and modules that were left, and all that they lead to."""
        while chosen := [each for each in self._later.values() if now(each[0])]:
            for obj, parents in chosen:
                del self._later[id(obj)]
                # A class is told by its own name, not as that of some object.
                first = next((parent for parent in parents if parent < 0), parents[0])
                self.others[len(self.objects)] = [each for each in parents if each != first]
                self._numbers[id(obj)] = len(self.objects)
                self.objects.append(obj)
                self.parents.append(first)
            self._walk()

    def _walk(self) -> None:
        objects, rules = self.objects, self.edges.rules
        while (first := self._next) < len(objects):
            some = objects[first : first + AT_ONCE]
            self._next += len(some)
            numbers = self.edges.that_refer(some, first)
            self._meet((n, rules[id(type(objects[n]))](objects[n])) for n in numbers)

    def _meet(self, found: Iterable[tuple[int, list[Any]]]) -> None:
        """Note what objects, by number, refer to."""
        # What a million objects pass through: nothing is called that need not be.
        rules, limited = self.edges.rules, self._within is not None
        waiting = {} if limited else self._later
        objects, note, here = self.objects, self._numbers.setdefault, len(self.objects)
        for parent, referents in found:
            for obj in referents:
                try:
                    refers = rules[id(type(obj))]
                except KeyError:
                    refers = self.edges.learn(type(obj))
                if refers is None or (limited and not self._is_within(obj, refers)):
                    continue
                key = id(obj)
                if refers is later and key in waiting:
                    waiting[key][1].append(parent)
                elif refers is later and not limited and key not in self._numbers:
                    waiting[key] = obj, [parent]
                elif (number := note(key, here)) == here:
                    objects.append(obj)
                    self.parents.append(parent)
                    here += 1
                elif number != _CLOSED:
                    self.others.setdefault(number, []).append(parent)

    def _is_within(self, obj: Any, refers: Refers) -> bool:
        """Whether what a walk is limited to has an object, or it leads where C keeps more."""
        within: Any = self._within
        return id(obj) in within or id(obj) in self._numbers or refers not in _PLAIN
