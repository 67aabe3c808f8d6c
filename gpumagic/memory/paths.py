"""Write the paths from roots to the objects of a walk, as one would type or say them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from gpumagic.memory.autograd_graph import is_node, nearest_leaf
from gpumagic.memory.heap import Walk
from gpumagic.memory.memory_report import SAVED, STATE
from gpumagic.memory.step_names import StepNames
from gpumagic.memory.ways import MOST, Ways
from gpumagic.usercode.values import class_name, is_tensor

_BESIDE = (STATE, SAVED)


class FoundPath(NamedTuple):
    """A way to a storage: ``net.fc1.weight``, what it is, and the holder that it begins with."""

    path: str
    kind: str
    root: str
    beside: str = ""  # of what is kept for a parameter or was saved beside it, its path


class Paths:
    """The paths to objects of a walk, by the number of the object and that of the root."""

    def __init__(self, walk: Walk, ways: Ways) -> None:
        self._walk, self._ways = walk, ways
        self._names = StepNames(walk.edges)
        self._steps: dict[int, dict[int, str]] = {}
        # The text, and the part of it from which a step with a colon begins.
        self._written: dict[tuple[int, int], tuple[str, str]] = {}
        self._naming_a_key = False

    def found(self, number: int) -> Iterator[FoundPath]:
        """All paths to an object: from the first root by all that refer to it, then from others."""
        kind = self._ways.kind(number)
        beside = self._beside(number) if kind in _BESIDE else ""
        for root in self._ways.roots(number):
            first, here = root == self._ways.root(number), self._walk.roots[root]
            for text in self._direct(number) if first else [self.text(number, root)]:
                yield FoundPath(text, here.kind or kind, here.holder or here.name, beside)

    def text(self, number: int, root: int | None = None) -> str:
        """The path to an object, by default from the root that it was met from."""
        root = self._ways.root(number) if root is None else root
        chain = []
        while number >= 0 and (number, root) not in self._written:
            chain.append(number)
            number = self._ways.parent(number, root)
        name = self._walk.roots[root].name
        text, start = (name, name) if number < 0 else self._written[number, root]
        for child in reversed(chain):
            step = "" if number < 0 else self._step(number, child)
            if step.startswith(": "):
                text = start + step
            elif step:
                text = start = text + step
            self._written[child, root] = text, start
            number = child
        return text

    def _direct(self, number: int) -> list[str]:
        """The paths from the first root by all that refers to an object itself."""
        root = self._ways.root(number)
        found = [self.text(number)]
        for parent in self._walk.others.get(number, ())[:MOST]:
            if parent >= 0 and self._ways.root(parent) == root:
                found.append(self.text(parent) + self._step(parent, number))
        return found

    def _step(self, parent: int, child: int) -> str:
        obj = self._walk.objects[child]
        if parent not in self._steps:
            above = self._walk.parents[parent]
            owner = self._walk.objects[above] if above >= 0 else None
            self._steps[parent] = self._names.of(self._walk.objects[parent], owner, self._key)
        return self._steps[parent].get(id(obj), f".<{class_name(type(obj))}>")

    def _key(self, key: Any) -> str:
        number = self._walk.number(key) if is_tensor(key) else None
        if number is None or self._naming_a_key:  # it may itself be found by way of a key
            return f"<{class_name(type(key))}>"
        self._naming_a_key = True
        try:
            return self.text(number)
        finally:
            self._naming_a_key = False

    def _above(self, number: int) -> Any:
        parent = self._walk.parents[number]
        return self._walk.objects[parent] if parent >= 0 else None

    def _beside(self, number: int) -> str:
        """The path of the parameter that an optimizer keeps something for, or an operation."""
        parent = self._walk.parents[number]
        above = self._walk.parents[parent] if parent >= 0 else -1
        if above >= 0 and (step := self._step(above, parent))[:2].startswith("["):
            return step[1:-1] if step[1:2].isidentifier() else ""
        node = self._above(number)
        leaf = nearest_leaf(node) if is_node(type(node)) else None
        known = None if leaf is None else self._walk.number(leaf)
        return "" if known is None else self.text(known)
