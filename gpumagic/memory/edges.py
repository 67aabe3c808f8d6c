"""Tell what an object refers to: as Python's garbage collector sees it, and as torch does beyond.

It goes by types and reads what C keeps: no property, no `__getattr__`, no `__hash__` of anybody's
runs. On its way it notes what may be memory on a GPU: tensors, storages, other libraries' arrays.
"""

import gc
import sys
import types
from collections.abc import Callable, Sequence
from contextvars import Context, Token
from itertools import compress
from operator import not_
from typing import Any

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
    """What a class or a module refers to: that is most of the process, and is looked at last."""
    return gc.get_referents(obj)


class Edges:
    """How each type refers to others; what was met that may hold memory on a GPU."""

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
        """What gives what objects of a type keep where the collector does not see it, and how."""
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
        """The numbers, from `first` on, of those that refer to anything: most tensors do not.

        Tensors are noted. They are asked together: one by one would take several times as long.
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
        """What torch keeps with a tensor, each with the step that leads there."""
        found: list[Edge] = self._of_torch.of_tensor(tensor, self._graphs)
        return found

    def of_node(self, node: Any) -> list[Edge]:
        """What a node of a graph holds, each with the step that leads there."""
        return autograd_graph.edges(node) if self._graphs else []

    def _array(self, array: Any) -> list[Any]:
        self.arrays.append(array)
        return gc.get_referents(array)


def of_optimizer(optimizer: Any) -> list[Edge]:
    """Its parameters, which else would be found as keys of its state."""
    groups = own(optimizer).get("param_groups")
    found: list[Edge] = []
    for n, group in enumerate(groups if type(groups) is list else ()):
        params = dict.get(group, "params") if isinstance(group, dict) else None
        for k, parameter in enumerate(params if type(params) is list else ()):
            found.append((parameter, f".param_groups[{n}]['params'][{k}]"))
    return found


def of_context(context: Context) -> list[Edge]:
    """The values of context variables."""
    return [(value, f": {variable.name}") for variable, value in context.items()]


def of_token(token: Token[Any]) -> list[Edge]:
    """What a context variable was before."""
    return [(token.old_value, ".old_value")]


def ndarray() -> Any:
    """The arrays of NumPy; no types where it is not imported."""
    return getattr(sys.modules.get("numpy"), "ndarray", ())


def of_array(array: Any) -> list[Any]:
    """The objects in an array of NumPy's, of which the collector knows nothing."""
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
