"""Walk objects and what they refer to, breadth first, from roots in a given order.

Each object is met once, by the shortest path from the first root that reaches it; other references
to it are noted. Classes and modules come last, because they reach everything. Only what C keeps is
read: no property, `__getattr__` or `__hash__` runs.
"""

import gc
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, Token
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

from gpumagic.memory import autograd_graph
from gpumagic.memory.autograd_graph import Edge
from gpumagic.usercode.files import is_users
from gpumagic.usercode.values import bases_of, comes_from, defined_in, members_of, own, torch_here

Refers = Callable[[Any], list[Any]]
# Py_TPFLAGS_HAVE_GC: what has it not refers to nothing that the collector could see.
_COLLECTED = 1 << 14
_flags = vars(type)["__flags__"].__get__
_EXCHANGES = ("__dlpack_device__", "__cuda_array_interface__")


def later(obj: Any) -> list[Any]:
    """Return what a class or a module refers to: most of the process, so it is visited last."""
    return gc.get_referents(obj)


class Edges:
    """Keep how each type refers to others, and the visited objects that may hold GPU memory."""

    def __init__(self) -> None:
        self.tensors: list[int] = []  # and storages, by their numbers in the walk
        self.arrays: list[Any] = []
        self._of_torch: Any = None
        if torch_here() is not None:
            from gpumagic.memory import tensor_edges

            self._of_torch = tensor_edges
        self._graphs = autograd_graph.can_be_read()
        # By id, for a metaclass may define a hash; the types themselves, so that ids stay theirs.
        self.rules: dict[int, Any] = {}
        """What gives the referents of objects of a type; None where they can hold nothing."""
        self._types: list[type] = []
        self._tensor_types: set[int] = set()

    def learn(self, kind: type) -> Refers | None:
        """Find the rule of a type."""
        self._types.append(kind)
        if comes_from(kind, "torch.Tensor", "torch.UntypedStorage"):
            self._tensor_types.add(id(kind))
        rule = self.rules[id(kind)] = self._rule(kind)
        return rule

    def beyond(self, kind: type) -> Callable[[Any], list[Edge]] | None:
        """Return the rule for references of a type that the collector does not see."""
        if comes_from(kind, "torch.Tensor"):
            return self.of_tensor
        if comes_from(kind, "torch.optim.Optimizer"):
            return of_optimizer
        if comes_from(kind, "torch._C.ScriptModule"):
            return self._of_torch.of_script  # type: ignore[no-any-return]
        if autograd_graph.is_node(kind):
            return self.of_node
        contexts: tuple[tuple[type, Any], ...] = ((Context, of_context), (Token, of_token))
        bases = bases_of(kind)
        return next((of for base, of in contexts if any(base is each for each in bases)), None)

    def _rule(self, kind: type) -> Refers | None:
        bases = bases_of(kind)
        if (beyond := self.beyond(kind)) is not None:
            if beyond in (of_context, of_token):  # what else they refer to is everybody's
                return lambda obj: [child for child, _ in beyond(obj)]
            return lambda obj: [*(child for child, _ in beyond(obj)), *gc.get_referents(obj)]
        for base, rule in ((type, later), (types.ModuleType, later), (ndarray(), _objects)):
            if any(base is each for each in bases):
                return rule
        if is_other_array(kind):
            return self._array
        stored = comes_from(kind, "torch.UntypedStorage")
        return gc.get_referents if stored or _flags(kind) & _COLLECTED else None

    def that_refer(self, objects: list[Any], first: int) -> Sequence[int]:
        """Return the numbers, from `first` on, of objects with references: most tensors have none.

        Tensors are noted. They are read together: one by one would take several times as long.
        """
        numbers, kinds = range(first, first + len(objects)), [*map(id, map(type, objects))]
        tensors = [*compress(numbers, map(self._tensor_types.__contains__, kinds))]
        if not tensors:
            return numbers
        self.tensors += tensors
        plain = [*map(self._of_torch.CLASSES.__contains__, kinds)]
        if self._of_torch.refer_to_nothing([*compress(objects, plain)]):
            return [*compress(numbers, map(not_, plain))]
        return numbers

    def of_tensor(self, tensor: Any) -> list[Edge]:
        """List what torch keeps with a tensor, each with the step that reaches it."""
        found: list[Edge] = self._of_torch.of_tensor(tensor, self._graphs)
        return found

    def of_node(self, node: Any) -> list[Edge]:
        """List what a node of a graph holds, each with the step that reaches it."""
        return autograd_graph.edges(node) if self._graphs else []

    def _array(self, array: Any) -> list[Any]:
        self.arrays.append(array)
        return gc.get_referents(array)


def of_optimizer(optimizer: Any) -> list[Edge]:
    """List its parameters, which would otherwise be found as keys of its state."""
    groups = own(optimizer).get("param_groups")
    found: list[Edge] = []
    for n, group in enumerate(groups if type(groups) is list else ()):
        params = dict.get(group, "params") if isinstance(group, dict) else None
        for k, parameter in enumerate(params if type(params) is list else ()):
            found.append((parameter, f".param_groups[{n}]['params'][{k}]"))
    return found


def of_context(context: Context) -> list[Edge]:
    """List the values of context variables."""
    return [(value, f": {variable.name}") for variable, value in context.items()]


def of_token(token: Token[Any]) -> list[Edge]:
    """List the previous value of a context variable."""
    return [(token.old_value, ".old_value")]


def ndarray() -> Any:
    """Return NumPy's array class; an empty tuple if NumPy is not imported."""
    return getattr(sys.modules.get("numpy"), "ndarray", ())


def of_array(array: Any) -> list[Any]:
    """List the objects in a NumPy array, which the collector does not see."""
    kind = ndarray()
    has = vars(kind)["dtype"].__get__(array).hasobject
    return kind.ravel(array).tolist() if has else []


def _objects(array: Any) -> list[Any]:
    return gc.get_referents(array) + of_array(array)


def is_other_array(kind: type) -> bool:
    """Whether objects of a class are arrays of a library that may lie on a GPU."""
    if comes_from(kind, "tensorflow.Variable"):  # it exchanges nothing by itself
        return True
    members = [members_of(base) for base in bases_of(kind)]
    if not any(name in held for name in _EXCHANGES for held in members):
        return False
    if comes_from(kind, "torch.Tensor") or any(base is ndarray() for base in bases_of(kind)):
        return False
    home = sys.modules.get(str(defined_in(kind)).partition(".")[0])
    return type(home) is types.ModuleType and not is_users(vars(home).get("__file__"))


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
    """Name a start of a walk: the beginning of its paths, and the row that they belong to."""

    name: str
    value: Any
    kind: str = ""  # of all that is found there, where that says more than what it is itself
    holder: str = ""  # if another than the name


class Walk:
    """Number all visited objects; those in `closed` are roots, and no path passes through them."""

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
        """Return the number of a visited object."""
        found = self._numbers.get(id(obj), _CLOSED)
        return None if found == _CLOSED else found

    def forget(self) -> None:
        """Release all visited objects: a cycle would keep them until the next collection."""
        self.edges.rules.clear()

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

    def walk_later(self, now: Callable[[Any], bool]) -> None:
        """Visit the postponed classes and modules, and everything reachable from them."""
        while chosen := [each for each in self._later.values() if now(each[0])]:
            for obj, parents in chosen:
                del self._later[id(obj)]
                # A class is reported under its own name, not as the class of some object.
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
        """Whether a limited walk includes an object, or the object refers to more through C."""
        within: Any = self._within
        return id(obj) in within or id(obj) in self._numbers or refers not in _PLAIN


def of_kinds(objects: list[Any], *kinds: type) -> list[Any]:
    """Return the objects of some kinds; checks each type once, not each of a million objects."""
    types = {id(of): of for of in map(type, objects)}
    wanted = {number for number, of in types.items() if issubclass(of, kinds)}
    return [obj for obj in objects if id(type(obj)) in wanted]
