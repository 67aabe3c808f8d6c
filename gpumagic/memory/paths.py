"""Tell which holders reach an object of a walk, its kind, and its path as one would type it.

An object's first path comes from the parents that the walk noted: ``model.fc.weight``. Other
holders are known by name only. A step that begins with a colon belongs to the last part that a
person knows by name: ``loss.grad_fn: MulBackward0``, ``the exception of In [4]: frame step``.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gpumagic.frameworks.framework import library_of
from gpumagic.memory.memory_report import SAVED, STATE, kind_of_array
from gpumagic.memory.object_graph import Walk
from gpumagic.memory.references import is_node, is_other_array, nearest_leaf
from gpumagic.memory.step_names import StepNames
from gpumagic.usercode.values import class_name, comes_from, is_module, is_tensor, own

MOST = 8
"""The most roots that are reported to reach one object."""


class Way(NamedTuple):
    """Name the holder that reaches a storage, and the storage's kind there."""

    root: str
    kind: str


class Paths:
    """The holders, kinds and paths of some objects of a walk, by number.

    A meeting is an object that several others refer to. Each object has the roots of the nearest
    meeting above it, so 100,000 tensors in a list cost little more than one.
    """

    def __init__(self, walk: Walk, numbers: Iterable[int]) -> None:
        self._walk = walk
        self._meetings: list[int] = []  # the nearest one of each object; ``~n`` is root `n`
        self._parts: list[str] = []  # the kind of everything below an object; empty if unknown
        self._look_through()
        self._roots = self._roots_of({self._meetings[number] for number in numbers})
        self._ways: dict[tuple[int, str], tuple[Way, ...]] = {}
        # The kinds that a class alone decides.
        self._kinds: dict[int, str] = {}
        self._names = StepNames(walk.references)
        self._steps: dict[int, dict[int, str]] = {}
        # The path, and the part of it after which a step with a colon is written.
        self._written: dict[int, tuple[str, str]] = {}
        self._naming_a_key = False

    def _look_through(self) -> None:
        objects, others = self._walk.objects, self._walk.others
        parts, meetings = self._parts, self._meetings
        kinds = self._walk.references.types
        below = {id(kind): _part(kind) for kind in kinds}
        self._keeping = {id(k) for k in kinds if is_node(k) or comes_from(k, "torch.Tensor")}
        alike: dict[tuple[int, ...], int] = {}  # objects with the same referrers are one meeting
        for number, parent in enumerate(self._walk.parents):  # a parent has a lower number
            part = below[id(type(objects[number]))]
            if part is None:
                part = parts[parent] if parent >= 0 else ""
            parts.append(part)
            if number in others:
                meetings.append(alike.setdefault((parent, *others[number]), number))
            else:
                meetings.append(meetings[parent] if parent >= 0 else parent)

    def _meeting(self, number: int) -> int:
        return self._meetings[number] if number >= 0 else number

    def _roots_of(self, wanted: set[int]) -> dict[int, list[int]]:
        """Return the roots that reach each of some meetings, in the order of the walk."""
        below: dict[int, list[int]] = defaultdict(list)
        todo = list(wanted)
        while todo:
            if (meeting := todo.pop()) < 0:
                continue
            referrers = self._walk.parents[meeting], *self._walk.others[meeting]
            for above in dict.fromkeys(map(self._meeting, referrers)):
                below[above].append(meeting)
                if above not in wanted:
                    wanted.add(above)
                    todo.append(above)
        found: dict[int, list[int]] = {each: [] for each in wanted}
        for root in sorted((each for each in wanted if each < 0), reverse=True):
            todo, seen = [root], {root}
            while todo:
                meeting = todo.pop()
                found[meeting].append(~root)
                new = [each for each in below[meeting] if each not in seen]
                seen.update(new)
                todo += [each for each in new if len(found[each]) < MOST]
        return found

    def _root(self, number: int) -> int:
        """Return the root of an object's first path."""
        meeting = self._meetings[number]
        while meeting >= 0:
            meeting = self._meeting(self._walk.parents[meeting])
        return ~meeting

    def ways(self, number: int) -> tuple[Way, ...]:
        """Return all ways to an object, the first one first."""
        key = meeting, kind = self._meetings[number], self.kind(number)
        if key not in self._ways:
            every = [self._root(number), *self._roots[meeting]]
            roots = [self._walk.roots[root] for root in every]
            ways = (Way(root.holder or root.name, root.kind or kind) for root in roots)
            self._ways[key] = tuple(dict.fromkeys(ways))
        return self._ways[key]

    def plain_first(self, numbers: list[int]) -> list[int]:
        """Sort the objects of one storage so that what a graph saved comes after the rest."""
        root = self._root(numbers[0])
        return sorted(numbers, key=lambda n: (self._root(n) != root, self.kind(n) == SAVED))

    # -- kinds
    def kind(self, number: int) -> str:
        """Return the kind of an object: a parameter, a gradient, an output …"""
        obj, parent = self._walk.objects[number], self._walk.parents[number]
        known = self._kinds.get(id(type(obj)))
        if known is None:
            known = self._kinds[id(type(obj))] = _kind_by_class(obj)
        if parent < 0:
            return known or "tensor"
        above = self._walk.objects[parent]
        if id(type(above)) in self._keeping and (kept := self._kept_by_torch(obj, above)):
            return kept
        if found := known or self._parts[parent]:
            return found
        return "buffer" if type(above) is dict and self._is_buffer(parent) else "tensor"

    def _kept_by_torch(self, obj: Any, above: Any) -> str:
        """Return the kind of a gradient or of a tensor that a graph saved; else empty."""
        tensor, edges = is_tensor(above), self._walk.references.edges(type(above))
        steps = [step for child, step in edges(above) if child is obj] if edges else []
        if tensor:
            return "gradient" if ".grad" in steps else ""
        return SAVED if any(step.startswith("._saved_") for step in steps) else ""

    def _is_buffer(self, number: int) -> bool:
        """Whether an object is a module's own dictionary of buffers."""
        objects, held = self._walk.objects, number
        while number >= 0 and type(objects[number]) is dict:
            number = self._walk.parents[number]
        if number < 0 or number == held or not is_module(objects[number]):
            return False
        return own(objects[number]).get("_buffers") is objects[held]

    # -- paths
    def path(self, number: int) -> str:
        """Return the path to an object from the root that it was met from."""
        chain = []
        while number >= 0 and number not in self._written:
            chain.append(number)
            number = self._walk.parents[number]
        name = self._walk.roots[~number].name if number < 0 else ""
        text, start = (name, name) if number < 0 else self._written[number]
        for child in reversed(chain):
            step = "" if number < 0 else self._step(number, child)
            if step.startswith(": "):
                text = start + step
            elif step:
                text = start = text + step
            self._written[child] = text, start
            number = child
        return text

    def _step(self, parent: int, child: int) -> str:
        objects = self._walk.objects
        if parent not in self._steps:
            above = self._walk.parents[parent]
            owner = objects[above] if above >= 0 else None
            self._steps[parent] = self._names.of(objects[parent], owner, self._key)
        obj = objects[child]
        return self._steps[parent].get(id(obj), f".<{class_name(type(obj))}>")

    def _key(self, key: Any) -> str:
        number = self._walk.number(key) if is_tensor(key) else None
        if number is None or self._naming_a_key:  # its own path may lead through a key
            return f"<{class_name(type(key))}>"
        self._naming_a_key = True
        try:
            return self.path(number)
        finally:
            self._naming_a_key = False

    def parameter(self, numbers: Sequence[int]) -> str:
        """Return the path of the parameter that some memory was kept for; empty if there is none.

        That memory is an optimizer's state, or was saved by the graph.
        """
        found = (self._parameter(each) for each in numbers if self.kind(each) in (STATE, SAVED))
        return next(filter(None, found), "")

    def _parameter(self, number: int) -> str:
        parent = self._walk.parents[number]
        above = self._walk.parents[parent] if parent >= 0 else -1
        if above >= 0 and (step := self._step(above, parent))[:2].startswith("["):
            return step[1:-1] if step[1:2].isidentifier() else ""
        node = self._walk.objects[parent] if parent >= 0 else None
        leaf = self._walk.number(nearest_leaf(node)) if is_node(type(node)) else None
        return "" if leaf is None else self.path(leaf)


def _part(kind: type) -> str | None:
    """Return the kind of everything below objects of a class; None if it is that of the above."""
    if is_node(kind):
        return SAVED
    if comes_from(kind, "torch.optim.Optimizer"):
        return STATE
    return "" if comes_from(kind, "torch.nn.Module") else None


def _kind_by_class(obj: Any) -> str:
    if comes_from(type(obj), "torch.nn.Parameter"):
        return "parameter"
    return kind_of_array(library_of(obj)) if is_other_array(type(obj)) else ""
