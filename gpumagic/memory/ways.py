"""Find which holders reach an object of a walk, and its kind for each: parameter, output, …

Objects next to each other are answered together, so 100,000 tensors in a list cost little more
than one.
"""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from gpumagic.frameworks.framework import library_of
from gpumagic.memory.autograd_graph import is_node
from gpumagic.memory.heap import Walk, is_other_array
from gpumagic.memory.memory_report import SAVED, STATE, kind_of_array
from gpumagic.usercode.values import comes_from, is_tensor, own

_TENSOR, _MODULE = "tensor", "module"
MOST = 8
"""The most roots that are reported to reach one object."""


class Way(NamedTuple):
    """Name the holder that reaches a storage, and the storage's kind there."""

    root: str
    kind: str


class _Above:
    """Cache facts about objects that share an ancestor and a class."""

    def __init__(self, meeting: int, root: int, role: str | None = None, part: str = "") -> None:
        self.meeting = meeting  # the nearest that others refer to as well; else the root, ``~n``
        self.root = root  # its number
        self.role = role  # kind of the objects below, if these ones determine it
        self.part = part  # kind of everything below, if known
        self.below: dict[int, _Above] = {}  # of objects one step below, by the id of their class
        self.ways: dict[int | str, tuple[Way, ...]] = {}  # to them, by that id or what they are


class Ways:
    """Find the ways to objects of a walk, by number; only `numbers` will be asked for."""

    def __init__(self, walk: Walk, numbers: Iterable[int]) -> None:
        self._walk = walk
        self._roots = [_Above(~n, n) for n in range(len(walk.roots))]
        self._known: dict[int, _Above] = {}
        # By class, parent and all others that refer to an object.
        self._met: dict[tuple[int, ...], _Above] = {}
        self._reached: dict[int, dict[int, int]] = {}  # by meeting, root and parent on the way
        self._roles: dict[int, str | None] = {}
        others, parents, above = walk.others, walk.parents, self._above
        # The cached facts that each object shares with its siblings.
        self._besides = {n: above(n if n in others else parents[n]) for n in numbers}
        self._find_others({beside.meeting for beside in self._besides.values()})

    def of(self, number: int, more: Iterable[int] = ()) -> tuple[Way, ...]:
        """Return all ways to the objects of one storage, the first one first."""
        beside = self._besides[number]
        found = beside.ways.get(id(type(self._walk.objects[number])))
        if found is None:
            found = self._of(number, beside)
        return (*dict.fromkeys(chain(found, *map(self.of, more))),) if more else found

    def _of(self, number: int, beside: _Above) -> tuple[Way, ...]:
        kind = id(type(self._walk.objects[number]))
        what = self.kind(number)
        if what not in beside.ways:
            roots = (self._walk.roots[root] for root in self.roots(number))
            beside.ways[what] = tuple(
                Way(root.holder or root.name, root.kind or what) for root in roots
            )
        if self._above(self._walk.parents[number]).role not in (_TENSOR, SAVED):
            beside.ways[kind] = beside.ways[what]
        return beside.ways[what]

    def root(self, number: int) -> int:
        """Return the number of the root that first reached an object."""
        return self._above(number).root

    def roots(self, number: int) -> list[int]:
        """Return the roots that reach an object, in the order of the walk."""
        beside = self._besides[number]
        others = self._reached.get(beside.meeting, ())
        return [beside.root] + [root for root in others if root != beside.root]

    def parent(self, number: int, root: int) -> int:
        """Return the object, or root, before another on the way from a root."""
        before = self._walk.parents[number]
        if number not in self._walk.others:
            return before
        return self._reached.get(self._above(number).meeting, {}).get(root, before)

    def _above(self, number: int) -> _Above:
        known, walk = self._known, self._walk
        if number in known:
            return known[number]
        if number >= 0 and number not in walk.others:  # most have siblings of their class
            beside = known.get(walk.parents[number])
            if beside is not None:
                found = beside.below.get(id(type(walk.objects[number])))
                if found is not None:
                    known[number] = found
                    return found
        passed = []
        while number >= 0 and number not in self._known:
            passed.append(number)
            number = self._walk.parents[number]
        found = self._known[number] if number >= 0 else self._roots[~number]
        for below in reversed(passed):
            kind = id(type(self._walk.objects[below]))
            if below in self._walk.others:
                met = kind, self._walk.parents[below], *self._walk.others[below]
                if met not in self._met:
                    self._met[met] = self._step(found, below)
                found = self._met[met]
            elif kind in found.below:
                found = found.below[kind]
            else:
                found = self._step(found, below)
            self._known[below] = found
        return found

    def _step(self, above: _Above, number: int) -> _Above:
        kind = type(self._walk.objects[number])
        met, role = number in self._walk.others, self._role(kind)
        if kind is dict and above.role == _MODULE:
            role = _MODULE
        part = {None: above.part, _TENSOR: above.part, _MODULE: ""}.get(role, role)
        found = _Above(number if met else above.meeting, above.root, role, part or "")
        # A module's dictionaries are of one class, and one of them has its buffers.
        if not met and not (kind is dict and role == _MODULE):
            above.below[id(kind)] = found
        return found

    def _role(self, kind: type) -> str | None:
        if id(kind) not in self._roles:
            found = None
            if comes_from(kind, "torch.Tensor"):
                found = _TENSOR
            elif comes_from(kind, "torch.optim.Optimizer"):
                found = STATE
            elif is_node(kind):
                found = SAVED
            elif comes_from(kind, "torch.nn.Module"):
                found = _MODULE
            self._roles[id(kind)] = found
        return self._roles[id(kind)]

    def _find_others(self, meetings: set[int]) -> None:
        """Find which other roots reach what is below some meetings, and how."""
        below: dict[int, list[int]] = {}
        seen = {number for number in meetings if number >= 0}
        todo = list(seen)
        while todo:
            number = todo.pop()
            for parent in self._referrers(number):
                meeting = self._above(parent).meeting
                below.setdefault(meeting, []).append(number)
                if meeting >= 0 and meeting not in seen:
                    seen.add(meeting)
                    todo.append(meeting)
        changed = sorted(seen)
        while changed:
            again: dict[int, None] = {}
            for number in changed:
                if self._reach(number):
                    again |= dict.fromkeys(below.get(number, ()))
            changed = list(again)

    def _referrers(self, number: int) -> list[int]:
        return [self._walk.parents[number], *self._walk.others[number]]

    def _reach(self, number: int) -> bool:
        """Add the roots of an object's referrers to its own; whether any of them is new."""
        reached = self._reached.setdefault(number, {self.root(number): self._walk.parents[number]})
        before = len(reached)
        for parent in self._referrers(number):
            above = self._above(parent)
            for root in self._reached.get(above.meeting) or [above.root]:
                if len(reached) < MOST:
                    reached.setdefault(root, parent)
        return len(reached) > before

    def kind(self, number: int) -> str:
        """Return the kind of an object: a parameter, a gradient, an output …"""
        kind, above = type(self._walk.objects[number]), self._above(self._walk.parents[number])
        if above.role in (_TENSOR, SAVED) and (found := self._kept_by_torch(number)):
            return found
        if comes_from(kind, "torch.nn.Parameter"):
            return "parameter"
        if is_other_array(kind):
            return kind_of_array(library_of(self._walk.objects[number]))
        is_buffer = above.role == _MODULE and self._is_buffer(self._walk.parents[number])
        return above.part or ("buffer" if is_buffer else "tensor")

    def _kept_by_torch(self, number: int) -> str:
        """Whether it is what a graph saved, or the gradient of a tensor."""
        edges, obj = self._walk.edges, self._walk.objects[number]
        above = self._walk.objects[self._walk.parents[number]]
        tensor = is_tensor(above)
        held = edges.of_tensor(above) if tensor else edges.of_node(above)
        steps = [step for child, step in held if child is obj]
        if tensor:
            return "gradient" if ".grad" in steps else ""
        return SAVED if any(step.startswith("._saved_") for step in steps) else ""

    def _is_buffer(self, number: int) -> bool:
        """Whether an object is a module's own dictionary of buffers."""
        held = self._walk.objects[number]
        while type(self._walk.objects[number]) is dict:
            number = self._walk.parents[number]
        return own(self._walk.objects[number]).get("_buffers") is held
