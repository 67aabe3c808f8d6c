"""Write the paths from roots to the objects of a walk, as one would type or say them."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from gpumagic.memory.autograd_graph import is_node, nearest_leaf
from gpumagic.memory.edges import is_other_array
from gpumagic.memory.heap import Walk
from gpumagic.memory.memory_report import OTHER, SAVED, STATE
from gpumagic.memory.step_names import StepNames
from gpumagic.usercode.values import class_name, own

MOST = 8
"""Of how many roots it is told that they reach an object."""


_BESIDE = (STATE, SAVED)


class FoundPath(NamedTuple):
    """A way to a storage: ``net.fc1.weight``, what it is, and the holder that it begins with."""

    path: str
    kind: str
    root: str
    beside: str = ""  # of what is kept for a parameter or was saved beside it, its path


class Paths:
    """The paths to objects of a walk, by the number of the object and that of the root."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._names = StepNames(walk.edges)
        self._steps: dict[int, dict[int, str]] = {}
        # The text, and the part of it from which a step with a colon begins.
        self._written: dict[tuple[int, int], tuple[str, str]] = {}
        self._roots: dict[int, int] = {}
        self._reached: dict[int, dict[int, int]] = {}
        self._within: dict[int, str] = {}
        # How paths go on from an object: text and start, what the root says of it, and the holder.
        self._onwards: dict[int, list[tuple[str, str, str, str]]] = {}
        self._naming_a_key = False

    def found(self, number: int) -> list[FoundPath]:
        """All paths to an object: from the first root by all that refer to it, then from others."""
        parent = self._walk.parents[number]
        if parent < 0 or number in self._walk.others:
            return [*self._each(number)]
        # One of a hundred thousand in a list has the way of the list, and a step of its own.
        step = self._step(parent, number)
        kind = self._kind(number, step)
        beside = self._beside(number) if kind in _BESIDE else ""
        anew = step.startswith(": ")
        if parent not in self._onwards:
            self._onwards[parent] = [*self._ways(parent)]
        return [
            FoundPath((start if anew else text) + step, of_root or kind, holder, beside)
            for text, start, of_root, holder in self._onwards[parent]
        ]

    def _ways(self, number: int) -> Iterator[tuple[str, str, str, str]]:
        for n in self.roots(number):
            text, root = self.text(number, n), self._walk.roots[n]
            yield text, self._written[number, n][1], root.kind, root.holder or root.name

    def _each(self, number: int) -> Iterator[FoundPath]:
        kind = self.kind(number)
        beside = self._beside(number) if kind in _BESIDE else ""
        for root in self.roots(number):
            first, here = root == self.root(number), self._walk.roots[root]
            for text in self._direct(number) if first else [self.text(number, root)]:
                yield FoundPath(text, here.kind or kind, here.holder or here.name, beside)

    def root(self, number: int) -> int:
        """The number of the root that an object was met from."""
        chain = []
        while number >= 0 and number not in self._roots:
            chain.append(number)
            number = self._walk.parents[number]
        root = ~number if number < 0 else self._roots[number]
        self._roots.update(dict.fromkeys(chain, root))
        return root

    def roots(self, number: int) -> list[int]:
        """The roots that reach an object, that which it was met from first."""
        first = self.root(number)
        return [first] + [root for root in self._reached.get(number, ()) if root != first]

    def text(self, number: int, root: int | None = None) -> str:
        """The path to an object, by default from the root that it was met from."""
        root = self.root(number) if root is None else root
        chain = []
        while number >= 0 and (number, root) not in self._written:
            chain.append(number)
            number = self._parent(number, root)
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
        root = self.root(number)
        found = [self.text(number)]
        for parent in self._walk.others.get(number, ())[:MOST]:
            if parent >= 0 and self.root(parent) == root:
                found.append(self.text(parent) + self._step(parent, number))
        return found

    def _parent(self, number: int, root: int) -> int:
        reached = self._reached.get(number, {})
        return reached[root] if root in reached else self._walk.parents[number]

    def _step(self, parent: int, child: int) -> str:
        obj = self._walk.objects[child]
        if parent not in self._steps:
            above = self._walk.parents[parent]
            owner = self._walk.objects[above] if above >= 0 else None
            self._steps[parent] = self._names.of(self._walk.objects[parent], owner, self._key)
        return self._steps[parent].get(id(obj), f".<{class_name(type(obj))}>")

    def _key(self, key: Any) -> str:
        number = self._walk.number(key) if issubclass(type(key), Tensor) else None
        if number is None or self._naming_a_key:  # it may itself be found by way of a key
            return f"<{class_name(type(key))}>"
        self._naming_a_key = True
        try:
            return self.text(number)
        finally:
            self._naming_a_key = False

    def find_others(self, numbers: Iterable[int]) -> None:
        """Find which other roots reach these objects, and how."""
        parents, others = self._walk.parents, self._walk.others
        above: dict[int, list[int]] = {}  # what is on a way to them, and where it leads
        # What only one object refers to is reached as that is.
        seen = {n if n in others or parents[n] < 0 else parents[n] for n in numbers}
        todo = list(seen)
        while todo:
            number = todo.pop()
            for parent in (parents[number], *others.get(number, ())):
                above.setdefault(parent, []).append(number)
                if parent >= 0 and parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        changed = sorted(seen & others.keys())
        while changed:
            again: dict[int, None] = {}
            for number in changed:
                if self._reach(number):
                    again |= dict.fromkeys(above.get(number, ()))
            changed = list(again)

    def _reach(self, number: int) -> bool:
        """Let an object be reached by the roots of what refers to it; whether that is new."""
        reached = self._reached.setdefault(number, {self.root(number): self._walk.parents[number]})
        before = len(reached)
        for parent in (self._walk.parents[number], *self._walk.others.get(number, ())):
            roots = [~parent] if parent < 0 else self._reached.get(parent) or [self.root(parent)]
            for root in roots:
                if len(reached) < MOST:
                    reached.setdefault(root, parent)
        return len(reached) > before

    def kind(self, number: int) -> str:
        """What an object is: a parameter, a gradient, an output …"""
        parent = self._walk.parents[number]
        return self._kind(number, self._step(parent, number) if parent >= 0 else "")

    def _kind(self, number: int, step: str) -> str:
        if step.startswith("._saved_") and is_node(type(self._above(number))):
            return SAVED
        if step == ".grad" and issubclass(type(self._above(number)), Tensor):
            return "gradient"
        if issubclass(type(self._walk.objects[number]), nn.Parameter):
            return "parameter"
        if is_other_array(type(self._walk.objects[number])):
            return OTHER
        part = self._part_of(self._walk.parents[number])
        return part or ("buffer" if self._is_buffer(number) else "tensor")

    def _is_buffer(self, number: int) -> bool:
        held, above = self._above(number), self._walk.parents[number]
        while above >= 0 and type(self._walk.objects[above]) is dict:
            above = self._walk.parents[above]
        owner = self._walk.objects[above] if above >= 0 else None
        return issubclass(type(owner), nn.Module) and own(owner).get("_buffers") is held

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

    def _part_of(self, number: int) -> str:
        """What everything is that an object leads to, where that is known."""
        chain = []
        while number >= 0 and number not in self._within:
            chain.append(number)
            number = self._walk.parents[number]
        found = self._within[number] if number >= 0 else ""
        for below in reversed(chain):
            obj = self._walk.objects[below]
            if issubclass(type(obj), Optimizer):
                found = STATE
            elif is_node(type(obj)):
                found = SAVED
            elif issubclass(type(obj), nn.Module):
                found = ""
            self._within[below] = found
        return found
