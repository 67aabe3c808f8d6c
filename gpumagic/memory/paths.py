"""Tell which holders reach an object of a walk, its kind, and its path as one would type it.

An object's first path comes from the parents that the walk noted: ``model.fc.weight``. Other
holders are known by name only. A step that begins with a colon belongs to the last part that a
person knows by name: ``loss.grad_fn: MulBackward0``, ``the exception of In [4]: frame step``.
Only what C keeps is read: no property and no other code of the user's runs.
"""

import gc
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from inspect import CO_OPTIMIZED
from typing import Any, NamedTuple

from gpumagic.frameworks.framework import library_of
from gpumagic.memory.memory_report import SAVED, STATE, kind_of_array
from gpumagic.memory.object_graph import Walk
from gpumagic.memory.references import is_node, is_other_array, nearest_leaf
from gpumagic.usercode.values import (
    bases_of,
    class_name,
    comes_from,
    is_module,
    is_tensor,
    members_of,
    own,
)

_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))
_MODULE_STATE = ("_parameters", "_buffers", "_modules")
# Of what C computes when it is asked, these run no code and make nothing.
_READ: tuple[Any, ...] = (
    vars(types.CellType)["cell_contents"],
    *map(vars(types.FunctionType).__getitem__, ("__defaults__", "__kwdefaults__")),
    *map(vars(BaseException).__getitem__, ("__cause__", "__context__", "args")),
)


class Way(NamedTuple):
    """Name the holder that reaches a storage, and the storage's kind there."""

    root: str
    kind: str


class Paths:
    """The holders, kinds and paths of some objects of a walk, by number.

    A meeting is an object that several others refer to. Each object has the roots of the nearest
    meeting above it, so 100,000 tensors in a list cost little more than one.
    """

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._meetings: list[int] = []  # the nearest one of each object; ``~n`` is root `n`
        self._parts: list[str] = []  # the kind of everything below an object; empty if unknown
        self._look_through()
        self._roots = self._roots_of_meetings()
        self._ways: dict[tuple[int, str], tuple[Way, ...]] = {}
        # The kinds that a class alone decides.
        self._kinds: dict[int, str] = {}
        self._named: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}  # by class
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

    def _roots_of_meetings(self) -> dict[int, int]:
        """Return the numbers of the roots that reach each meeting, as bits."""
        parents, others = self._walk.parents, self._walk.others
        below: dict[int, list[int]] = defaultdict(list)
        for meeting in {*self._meetings}:
            if meeting >= 0:
                for above in {*map(self._meeting, (parents[meeting], *others[meeting]))}:
                    below[above].append(meeting)
        found = defaultdict(int, {~root: 1 << root for root in range(len(self._walk.roots))})
        changed = set(found)
        while changed:
            now, changed = changed, set()
            for above in now:
                for meeting in below.get(above, ()):
                    if (reached := found[meeting] | found[above]) != found[meeting]:
                        found[meeting] = reached
                        changed.add(meeting)
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
            reached = self._roots[meeting]
            every = [n for n in range(reached.bit_length()) if reached >> n & 1]
            roots = [self._walk.roots[root] for root in (self._root(number), *every)]
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
            found = self._steps[parent] = dict[int, str]()
            for value, step in self._all_steps(objects[parent], owner):
                found.setdefault(id(value), step)
        obj = objects[child]
        return self._steps[parent].get(id(obj), f".<{class_name(type(obj))}>")

    def _all_steps(self, obj: Any, owner: Any) -> Iterator[tuple[Any, str]]:
        """Yield all that an object refers to, with the steps; `owner` refers to the object."""
        kind = type(obj)
        if id(kind) not in self._named:
            edges = self._walk.references.edges(kind)
            named = (name for base, name in _NAMED if issubclass(kind, base))
            self._named[id(kind)] = edges or next(named, None), _members(kind)
        named_by, members = self._named[id(kind)]
        if named_by is _items:
            yield from _items(obj, owner, self._key)
        elif named_by is not None:
            yield from named_by(obj)
        if not _is_one_of(kind, _WHOLE):
            yield from _attributes(obj, kind, members)

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


# -- steps
def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(value is each for each in values)  # a metaclass may define what is equal


def _members(kind: type) -> list[tuple[str, Any]]:
    """Return the slots of a class, and C's own members."""
    # Not all that C computes when it is asked: a node of a graph would unpack what it saved.
    return [
        (name, member.__get__)
        for base in bases_of(kind)
        for name, member in members_of(base).items()
        if type(member) is types.MemberDescriptorType or _is_one_of(member, _READ)
    ]


def _items(
    items: dict[Any, Any], owner: Any, key_name: Callable[[Any], str]
) -> Iterator[tuple[Any, str]]:
    attributes = _is_own(owner, items)
    part = issubclass(type(owner), dict) and _is_module_state(owner, items)
    for key, value in dict.items(items):
        if attributes:
            yield value, "" if _is_module_state(items, value) else f".{key}"
        elif part:
            yield value, f"[{key}]" if str.isdigit(key) else f".{key}"
        else:
            yield value, f"[{_key(key, key_name)}]"
    for key in dict.keys(items):
        if not _is_one_of(type(key), _PLAIN_KEYS):
            yield key, ".<key>"


def _key(key: Any, key_name: Callable[[Any], str]) -> str:
    parts = key if type(key) is tuple else (key,)
    if all(_is_one_of(type(part), _PLAIN_KEYS) for part in parts):
        return repr(key)
    return key_name(key)


def _is_own(owner: Any, items: dict[Any, Any]) -> bool:
    """Whether a dictionary is where `owner` keeps its attributes."""
    kind = type(owner)
    if issubclass(kind, type):
        return any(child is items for child in gc.get_referents(members_of(owner)))
    return own(owner) is items


def _is_module_state(attributes: Any, items: Any) -> bool:
    return any(dict.get(attributes, name) is items for name in _MODULE_STATE)


def _sequence(items: Any) -> Iterator[tuple[Any, str]]:
    base = next(base for base in (list, tuple, deque) if issubclass(type(items), base))
    for n, value in enumerate(base.__iter__(items)):
        yield value, f"[{n}]"


def _frame(frame: types.FrameType) -> Iterator[tuple[Any, str]]:
    for name, value in local_variables(frame).items():
        yield value, f", {name}"
    if frame.f_back is not None:
        yield frame.f_back, _frame_step(frame.f_back)


def _frame_step(frame: types.FrameType) -> str:
    return f": frame {frame.f_code.co_name}"


def _traceback(trace: types.TracebackType) -> list[tuple[Any, str]]:
    return [(trace.tb_frame, _frame_step(trace.tb_frame)), (trace.tb_next, "")]


def _exception(error: Any) -> list[tuple[Any, str]]:
    return [(vars(BaseException)["__traceback__"].__get__(error), "")]


def _attributes(obj: Any, kind: type, members: list[tuple[str, Any]]) -> Iterator[tuple[Any, str]]:
    """Yield an object's attributes: from its dictionary, its slots, and C's own members."""
    if issubclass(kind, type):
        for held in gc.get_referents(members_of(obj)):
            yield held, ""
    else:
        yield kind, ".__class__"
        held = own(obj)
        yield held, ""
        for name, value in held.items():
            yield value, f".{name}"
    for name, get in members:
        try:
            yield get(obj), f".{name}"
        except (AttributeError, ValueError):  # not set
            continue


_NAMED: tuple[tuple[Any, Any], ...] = (
    (dict, _items),
    ((list, tuple, deque), _sequence),
    (types.FrameType, _frame),
    (types.TracebackType, _traceback),
    (BaseException, _exception),
)


# These have no attributes.
_WHOLE = (dict, list, tuple, deque, types.FrameType)


def local_variables(frame: types.FrameType) -> dict[str, Any]:
    """Return the names of a frame, without making the frame keep more than before."""
    seen = frame.f_locals
    names = dict(seen)
    # Until Python 3.13 a frame keeps the dictionary that it was asked for; `locals()` of the
    # user's own is that dictionary, too, and is then held by somebody else.
    if type(seen) is dict and frame.f_code.co_flags & CO_OPTIMIZED:
        held_by_frame_and_us = 3
        if sys.getrefcount(seen) <= held_by_frame_and_us:
            seen.clear()
    return names
