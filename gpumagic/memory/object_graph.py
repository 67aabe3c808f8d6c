"""Visit all objects reachable from roots, and find each object's kind, path and holders.

References come from the garbage collector and from torch's C code. An object's parent is the first
referrer visited. Optimizers and autograd graphs are searched last, because most objects to which
they refer belong to other holders. No path passes through Python modules or libraries' classes,
which reach the whole process. Only fields defined in C are read, so that no user code runs.
"""

import gc
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from traceback import walk_stack
from typing import Any, NamedTuple

from gpumagic.memory.memory_report import SAVED, STATE
from gpumagic.usercode import values
from gpumagic.usercode.files import is_users

GRAPH = ".grad_fn"  # the step from a tensor to its autograd graph
# When to follow an object's references: never, at once, or after all objects with `_AT_ONCE`.
_NEVER, _AT_ONCE, _INDIRECT = range(-1, 2)
_CLOSED = -1  # the number of every object that no path may pass through
_COLLECTED = 1 << 14  # Py_TPFLAGS_HAVE_GC; without this flag, `gc` returns no references
_flags = vars(type)["__flags__"].__get__
_EXCHANGES = ("__dlpack_device__", "__cuda_array_interface__")
_MODULE_STATE = {"_parameters": "", "_buffers": "buffer", "_modules": ""}
_SPARSE = ("_indices", "_values", "crow_indices", "ccol_indices", "col_indices", "row_indices")
_NODES = 500  # maximum number of autograd nodes to search for a leaf tensor
_LEAF = "AccumulateGrad"


class Root(NamedTuple):
    """Describe an object where a walk starts."""

    name: str  # first part of every path that starts here
    value: Any
    kind: str = ""  # overrides the kinds of all objects reached from the root
    holder: str = ""  # name of the holder in the report; `name` if empty


class Way(NamedTuple):
    """Record that an object is reachable from a holder."""

    root: str  # name of the holder
    kind: str  # kind of the object, which may differ between holders


class Edge(NamedTuple):
    """Describe a reference from an object to another object, the child."""

    child: Any
    step: str  # text that the reference adds to a path, such as ".weight"
    kind: str = ""  # kind of the child, if the reference determines it
    kept_for: Any = None  # the parameter to which a gradient or optimizer state belongs


class Walk:
    """Visit and number objects, but do not pass through the objects in `closed`."""

    def __init__(self, closed: Iterable[Any], is_users_class: Callable[[Any], bool]) -> None:
        self.roots: list[Root] = []
        self.objects: list[Any] = []
        self.parents: list[int] = []  # number of each object's parent; the roots are -1, -2, …
        self.others: dict[int, list[int]] = {}  # each object's other referrers, if it has several
        self._is_users_class = is_users_class
        self.kinds: list[type] = []
        self._kept = list(closed)  # keep these objects alive, so that their ids stay unique
        # The keys are ids, because hashing an object could run the user's code.
        self._numbers = dict.fromkeys(map(id, self._kept), _CLOSED)
        self._rules = _rules()
        self.rules: dict[int, _Rule] = {}  # the rule of each class, by the id of the class
        self._turns: dict[int, int] = {}
        self._queues: tuple[list[int], ...] = ([], [])

    def number(self, obj: Any) -> int | None:
        """Return the number of a visited object; None if the object was not visited."""
        found = self._numbers.get(id(obj), _CLOSED)
        return None if found == _CLOSED else found

    def knows(self, obj: Any) -> bool:
        """Whether an object was visited, must not be visited, or is a class."""
        return id(obj) in self._numbers or issubclass(type(obj), type)

    def walk(self, roots: Iterable[Root], within: Collection[int] | None = None) -> None:
        """Visit all reachable objects; follow gc's references only to ids in `within`, if given."""
        for root in roots:
            self.roots.append(root)
            self._visit([(-len(self.roots), [root.value])])
        while queue := next(filter(None, self._queues), None):
            some = queue.copy()
            queue.clear()
            self._visit(self._children(some, within))

    def _learn(self, kind: type) -> "_Rule":
        self.kinds.append(kind)
        rule = self.rules[id(kind)] = next(rule for rule in self._rules if rule.fits(kind))
        self._turns[id(kind)] = rule.turn
        return rule

    def _children(self, numbers: list[int], within: Any) -> Iterator[tuple[int, list[Any]]]:
        """Yield the number of each object, and the objects that it refers to."""
        objects, rules = self.objects, self.rules
        for number in numbers:
            obj = objects[number]
            held = gc.get_referents(obj)
            if within is not None:
                held = [each for each in held if id(each) in within]
            if (edges := rules[id(type(obj))].edges) is not None and (found := edges(obj)):
                held = [edge.child for edge in found] + held
            yield number, held

    def _visit(self, found: Iterable[tuple[int, list[Any]]]) -> None:
        """Number each child that was not visited before, and add it to a queue."""
        # This loop may run for a million objects, so it avoids function calls.
        turns, numbers, here = self._turns, self._numbers, len(self.objects)
        for parent, children in found:
            for obj in children:
                try:
                    turn = turns[id(type(obj))]
                except KeyError:
                    turn = self._learn(type(obj)).turn
                if turn == _NEVER or (number := numbers.setdefault(id(obj), here)) == _CLOSED:
                    continue
                if number != here:
                    self.others.setdefault(number, []).append(parent)
                elif issubclass(type(obj), type) and not self._is_users_class(obj):
                    numbers[id(obj)] = _CLOSED
                    self._kept.append(obj)
                else:
                    self.objects.append(obj)
                    self.parents.append(parent)
                    self._queues[turn].append(here)
                    here += 1


class Paths:
    """Find the holders, the kind and the path of an object that a finished walk has numbered."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        objects, count = walk.objects, len(walk.roots)
        # `first` has the root where an object's path starts, `below` a kind that children inherit.
        # Parents have smaller numbers than children. Both lists end with the roots, at -1, -2, ….
        self._first = first = [0] * len(objects) + [*reversed(range(count))]
        self._below = below = [""] * (len(objects) + count)
        kinds = {kind: rule.below for kind, rule in walk.rules.items()}
        for number, parent in enumerate(walk.parents):
            first[number] = first[parent]
            kind = kinds[id(type(objects[number]))]
            below[number] = below[parent] if kind is None else kind
        self._reached = _reached(walk)
        self._parameters = {id(k) for k in walk.kinds if values.comes_from(k, "torch.nn.Parameter")}
        self._ways: dict[tuple[int, int, str], tuple[Way, ...]] = {}
        self._named: dict[int, dict[int, Edge]] = {}

    def ways(self, number: int, kind: str = "") -> tuple[Way, ...]:
        """Return a `Way` for each holder of an object, first for the holder that its path names."""
        first, reached, kind = self._first[number], self._reached[number], kind or self.kind(number)
        if (key := (first, reached, kind)) not in self._ways:
            every = [n for n in range(reached.bit_length()) if reached >> n & 1]
            roots = [self._walk.roots[n] for n in (first, *every)]
            ways = (Way(root.holder or root.name, root.kind or kind) for root in roots)
            self._ways[key] = tuple(dict.fromkeys(ways))
        return self._ways[key]

    def plain_first(self, numbers: list[int]) -> list[int]:
        """Put objects of `numbers[0]`'s root first. In each group, put saved tensors last."""
        first = self._first[numbers[0]]
        return sorted(numbers, key=lambda n: (self._first[n] != first, self.kind(n) == SAVED))

    def kind(self, number: int) -> str:
        """Return the kind of an object, such as ``"parameter"`` or ``"gradient"``."""
        obj, parent = self._walk.objects[number], self._walk.parents[number]
        if id(type(obj)) in self._parameters:
            return "parameter"
        known = ""
        if parent >= 0 and self._walk.rules[id(type(self._walk.objects[parent]))].edges:
            known = self._edge(parent, obj).kind
        return known or self._below[number] or "tensor"

    def path(self, number: int) -> tuple[str, ...]:
        """Return the name of an object's root, and the steps from this root to the object."""
        edges = []
        while (parent := self._walk.parents[number]) >= 0:
            edges.append(self._edge(parent, self._walk.objects[number]))
            number = parent
        found = [self._walk.roots[-parent - 1].name]
        start = 1
        for edge in reversed(edges):
            if edge.step.startswith(": "):  # name only the last of adjacent graph nodes
                found[start:] = [edge.step]
            elif edge.step:
                found.append(edge.step)
                start = len(found)
        return tuple(found)

    def parameter(self, number: int) -> tuple[str, ...]:
        """Return the path of the parameter to which a gradient, state or saved tensor belongs."""
        parent = self._walk.parents[number]
        if parent < 0:
            return ()
        above, edge = self._walk.objects[parent], self._edge(parent, self._walk.objects[number])
        found = self._walk.number(nearest_leaf(above) if is_node(type(above)) else edge.kept_for)
        return () if found is None else self.path(found)

    def _edge(self, parent: int, child: Any) -> Edge:
        """Return the first edge from parent to child, or an edge named after the child's class."""
        if parent not in self._named:
            found = self._named[parent] = dict[int, Edge]()
            for edge in self._edges(parent):
                found.setdefault(id(edge.child), edge)
        unnamed = Edge(child, f".<{values.class_name(type(child))}>")
        return self._named[parent].get(id(child), unnamed)

    def _edges(self, number: int) -> Iterator[Edge]:
        obj, parent = self._walk.objects[number], self._walk.parents[number]
        if edges := self._walk.rules[id(type(obj))].edges:
            yield from edges(obj)
        attributes = values.own(obj)
        yield Edge(attributes, "")
        if parent >= 0 and values.own(self._walk.objects[parent]) is obj:
            yield from (Edge(value, f".{name}") for name, value in _items(obj))
        else:
            yield from (Edge(value, f"[{values.key_text(key)}]") for key, value in _items(obj))
        yield from (Edge(value, f".{name}") for name, value in _items(attributes))
        # Include slots, and members defined in C, such as `__self__` of a method.
        for base in values.bases_of(type(obj)):
            for name, member in values.members_of(base).items():
                if type(member) is types.MemberDescriptorType:
                    with suppress(AttributeError):  # the slot is not set
                        yield Edge(member.__get__(obj), f".{name}")


def _reached(walk: Walk) -> list[int]:
    """Return a bit mask for each object. Bit n is set if root n reaches the object."""
    parents, others, order = walk.parents, walk.others, range(len(walk.objects))
    found = [0] * len(order) + [1 << root for root in reversed(range(len(walk.roots)))]
    # The direction alternates, so that a doubly linked list needs one pass in each direction.
    changed = True
    while changed:
        changed = False
        for number in order:
            reached = found[parents[number]]
            for other in others.get(number, ()):
                reached |= found[other]
            if reached != found[number]:
                found[number], changed = reached, True
        order = order[::-1]
    return found


def _items(held: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a container without calling a subclass's methods."""
    kind = type(held)
    if issubclass(kind, dict):
        return dict.items(held)
    base = next((base for base in (list, tuple, deque) if issubclass(kind, base)), None)
    return () if base is None else enumerate(base.__iter__(held))


class _Rule(NamedTuple):
    """Define how to follow the references of objects of certain classes."""

    fits: Callable[[type], bool]  # whether the rule is for a class
    turn: int  # `_NEVER`, `_AT_ONCE` or `_INDIRECT`
    edges: Callable[[Any], list[Edge]] | None = None  # lists references and their steps
    below: str | None = None  # kind of the objects reached from here; None for the parent's kind


def _rules() -> list[_Rule]:
    torch = values.torch_here()
    readable = torch is None or _graphs_can_be_read(torch)
    tensors = None if torch is None else _of_tensor(torch, readable)
    return [
        _Rule(lambda kind: issubclass(kind, type), _AT_ONCE, _of_class),
        _Rule(_is_closed, _NEVER),
        _Rule(is_node, _INDIRECT, _of_node if readable else None, SAVED),
        _Rule(
            lambda k: values.comes_from(k, "torch.optim.Optimizer"), _INDIRECT, _of_optimizer, STATE
        ),
        _Rule(lambda kind: values.comes_from(kind, "torch.nn.Module"), _AT_ONCE, _of_module, ""),
        _Rule(lambda kind: values.comes_from(kind, "torch.Tensor"), _AT_ONCE, tensors),
        _Rule(lambda kind: bool(_flags(kind) & _COLLECTED) or is_other_array(kind), _AT_ONCE),
        _Rule(lambda kind: True, _NEVER),
    ]


def _of_class(kind: type) -> list[Edge]:
    return [Edge(value, f".{name}") for name, value in values.members_of(kind).items()]


def _is_closed(kind: type) -> bool:
    home = str(values.defined_in(kind)).partition(".")[0]
    return issubclass(kind, types.ModuleType) or home in ("IPython", "ipykernel")


def _of_module(module: Any) -> list[Edge]:
    return [
        Edge(value, module_step(name), kind)
        for part, kind in _MODULE_STATE.items()
        for name, value in _items(values.own(module).get(part))
    ]


def module_step(name: str) -> str:
    """Return the step from a module to one of its parts: ``"[0]"``, ``".weight"``."""
    return f"[{name}]" if str.isdigit(name) else f".{name}"


def _of_optimizer(optimizer: Any) -> list[Edge]:
    held, found = values.own(optimizer), list[Edge]()
    for n, group in _items(held.get("param_groups")):
        for k, parameter in _items(dict.get(group, "params")):
            found.append(Edge(parameter, f".param_groups[{n}]['params'][{k}]"))
    for parameter, state in _items(held.get("state")):
        path = f".state[{values.key_text(parameter)}]"
        for name, value in _items(state):
            found.append(Edge(value, f"{path}[{values.key_text(name)}]", STATE, parameter))
    return found


def _of_tensor(torch: Any, readable: bool) -> Callable[[Any], list[Edge]]:
    """Return a function that lists edges to a tensor's sparse parts, graph and gradient."""
    # Read the fields of torch's C class, because a subclass may override them.
    base, strided, no_grad = torch._C.TensorBase, torch.strided, torch.no_grad
    names = "layout", "grad_fn", "retains_grad", "grad"
    layout, grad_fn, retains, grad = (vars(base)[name].__get__ for name in names)
    parts = dict[int, list[Edge]]()  # cached, because each call returns new tensors

    def edges(tensor: Any) -> list[Edge]:
        found = [*parts.get(id(tensor), ())]
        if layout(tensor) is not strided and not found:
            for name in (*_SPARSE, "values"):
                with no_grad(), suppress(RuntimeError):  # the layout has no such part
                    found.append(Edge(getattr(base, name)(tensor), f".{name}()"))
            parts[id(tensor)] = [*found]
        try:
            function = grad_fn(tensor)
        except RuntimeError:  # a view that autograd rejects after an in-place change
            return found
        if function is not None and readable:
            found.append(Edge(function, GRAPH))
        # torch warns when `grad` is read from a tensor that is not a leaf.
        if (function is None or retains(tensor)) and (held := grad(tensor)) is not None:
            found.append(Edge(held, ".grad", "gradient", tensor))
        return found

    return edges


def is_node(kind: type) -> bool:
    """Whether objects of a class are nodes of autograd graphs."""
    found = (values.members_of(base).get("next_functions") for base in values.bases_of(kind))
    return any(type(member) is types.GetSetDescriptorType for member in found)


def _of_node(node: Any) -> list[Edge]:
    functions = [function for function, _ in node.next_functions if function is not None]
    found = [Edge(each, f": {values.class_name(type(each))}") for each in functions]
    if type(node).__name__ == _LEAF:
        found.append(Edge(node.variable, ".variable"))
    found += [Edge(data, step, SAVED) for step, data in values.saved_by(node)]
    return found


def nearest_leaf(node: Any) -> Any:
    """Return the leaf tensor nearest to an autograd node, usually a parameter; None if too far."""
    waiting, seen = deque([node]), {id(node): node}
    while waiting and len(seen) < _NODES:
        node = waiting.popleft()
        if type(node).__name__ == _LEAF:
            return node.variable
        for function, _ in node.next_functions:
            if function is not None and id(function) not in seen:
                seen[id(function)] = function
                waiting.append(function)
    return None


def _graphs_can_be_read(torch: Any) -> bool:
    """Whether no other thread runs a backward pass, which would free saved tensors."""
    backward, here = torch.autograd.graph._engine_run_backward.__code__, threading.get_ident()
    others = [frame for thread, frame in sys._current_frames().items() if thread != here]
    return all(frame.f_code is not backward for each in others for frame, _ in walk_stack(each))


def is_other_array(kind: type) -> bool:
    """Whether a class is an array type of a library other than torch and may use a GPU."""
    members = [values.members_of(base) for base in values.bases_of(kind)]
    if not any(name in held for name in _EXCHANGES for held in members):
        return False
    if values.comes_from(kind, "torch.Tensor", "numpy.ndarray"):
        return False
    home = sys.modules.get(str(values.defined_in(kind)).partition(".")[0])
    return type(home) is types.ModuleType and not is_users(vars(home).get("__file__"))
