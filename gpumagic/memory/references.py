"""List what an object refers to: what the collector sees, and what torch keeps with it in C.

Only what C keeps is read: no property, `__getattr__` or `__hash__` runs. Saved tensors are not
unpacked, because their hooks are the user's code. Graphs are not read while a backward pass on
another thread may free them.
"""

import gc
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, repeat
from operator import is_, not_
from traceback import walk_stack
from typing import Any

from gpumagic.usercode.files import is_users
from gpumagic.usercode.values import (
    bases_of,
    class_name,
    comes_from,
    defined_in,
    members_of,
    own,
    torch_here,
)

Edge = tuple[Any, str]
"""An object, and the step of a path that reaches it."""
Edges = Callable[[Any], list[Edge]]
Refers = Callable[[Any], list[Any]]
GRAPH = ".grad_fn"
"""The step from a tensor into its graph."""
# The most nodes that are searched for one leaf.
_NODES = 500
_RAW = "_raw_saved_"
# Py_TPFLAGS_HAVE_GC: an object without it refers to nothing that the collector could see.
_COLLECTED = 1 << 14
_flags = vars(type)["__flags__"].__get__
_EXCHANGES = ("__dlpack_device__", "__cuda_array_interface__")


def postponed(obj: Any) -> list[Any]:
    """Return what a class or a module refers to: most of the process, so it is visited last."""
    return gc.get_referents(obj)


class References:
    """The rules by which objects of each class refer to others."""

    def __init__(self) -> None:
        self.tensors: list[int] = []
        """The visited tensors and storages, by their numbers in the walk."""
        self.arrays: list[Any] = []
        """The visited arrays of other libraries."""
        self.rules: dict[int, Refers | None] = {}
        """By the id of a class its rule; None if its objects can hold nothing."""
        self.indirect: set[int] = set()
        """Ids of the classes of optimizers and graphs, which refer to what others hold."""
        # Kept so that the ids stay unique. Classes are no keys: a metaclass may define a hash.
        self.types: list[type] = []
        self._tensor_types: set[int] = set()
        self._torch = _TorchReferences(torch_here()) if torch_here() is not None else None
        self._graphs = _graphs_can_be_read()

    def learn(self, kind: type) -> Refers | None:
        """Find the rule of a class."""
        self.types.append(kind)
        if comes_from(kind, "torch.Tensor", "torch.UntypedStorage"):
            self._tensor_types.add(id(kind))
        if is_node(kind) or comes_from(kind, "torch.optim.Optimizer"):
            self.indirect.add(id(kind))
        rule = self.rules[id(kind)] = self._rule(kind)
        return rule

    def edges(self, kind: type) -> Edges | None:
        """Return the rule for references of a class that the collector does not see."""
        if (torch := self._torch) is not None:
            if comes_from(kind, "torch.Tensor"):
                return lambda tensor: torch.of_tensor(tensor, self._graphs)
            if comes_from(kind, "torch._C.ScriptModule"):
                return torch.of_script
        if comes_from(kind, "torch.optim.Optimizer"):
            return _of_optimizer
        if is_node(kind):
            return edges_of_node if self._graphs else lambda node: []
        return None

    def _rule(self, kind: type) -> Refers | None:
        bases = bases_of(kind)
        if (edges := self.edges(kind)) is not None:
            return lambda obj: [*(child for child, _ in edges(obj)), *gc.get_referents(obj)]
        if any(base is each for base in (type, types.ModuleType) for each in bases):
            return postponed
        if is_other_array(kind):
            return self._other_array
        stored = comes_from(kind, "torch.UntypedStorage")
        return gc.get_referents if stored or _flags(kind) & _COLLECTED else None

    def that_refer(self, objects: list[Any], first: int) -> Sequence[int]:
        """Return the numbers, from `first` on, of objects with references: most tensors have none.

        Tensors are noted. They are read together: one by one would take several times as long.
        """
        numbers, kinds = range(first, first + len(objects)), [*map(id, map(type, objects))]
        tensors = [*compress(numbers, map(self._tensor_types.__contains__, kinds))]
        if not tensors or self._torch is None:
            return numbers
        self.tensors += tensors
        plain = [*map(self._torch.classes.__contains__, kinds)]
        if self._torch.refer_to_nothing([*compress(objects, plain)]):
            return [*compress(numbers, map(not_, plain))]
        return numbers

    def _other_array(self, array: Any) -> list[Any]:
        self.arrays.append(array)
        return gc.get_referents(array)


class _TorchReferences:
    """Reads what torch keeps with a tensor in C: its gradient, its graph, its hooks."""

    def __init__(self, torch: Any) -> None:
        # A subclass may override these attributes, so they are read from C's own class.
        self._torch, self._base = torch, torch._C.TensorBase
        get: dict[str, Any] = {
            name: member.__get__
            for name, member in vars(self._base).items()
            if type(member) is types.GetSetDescriptorType
        }
        self._grad, self._grad_fn = get["grad"], get["grad_fn"]
        self._retains, self._layout = get["retains_grad"], get["layout"]
        names = "_backward_hooks", "_post_accumulate_grad_hooks"
        self._hooks = [(f".{name}", get[name]) for name in names]
        rows, columns = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
        # The parts of sparse tensors. C makes new tensors of them for each call.
        self._parts = {
            torch.sparse_coo: ("_indices", "_values"),
            **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), (*rows, "values")),
            **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), (*columns, "values")),
        }
        # The collector sees nothing of a plain tensor but its class.
        self.classes = {id(torch.Tensor), id(torch.nn.Parameter)}

    def refer_to_nothing(self, tensors: list[Any]) -> bool:
        """Whether tensors of torch's own classes hold nothing, all of them."""
        try:
            # In this order: torch warns if another tensor than a leaf is asked for its gradient.
            for get in (self._grad_fn, self._grad):
                if not all(map(is_, map(get, tensors), repeat(None))):
                    return False
        except RuntimeError:  # see `of_tensor`
            return False
        if any(map(self._parts.get, map(self._layout, tensors))):
            return False
        return {*map(id, gc.get_referents(*tensors))} <= self.classes

    def of_tensor(self, tensor: Any, graphs: bool) -> list[Edge]:
        """List what torch keeps with a tensor."""
        found = [(held, step) for step, get in self._hooks if (held := get(tensor)) is not None]
        if (parts := self._parts.get(self._layout(tensor))) is not None:
            with self._torch.no_grad():
                found += [(getattr(self._base, part)(tensor), f".{part}()") for part in parts]
        try:
            function = self._grad_fn(tensor)
            if function is not None and graphs:
                found.append((function, GRAPH))
            has_gradient = function is None or self._retains(tensor)
            if has_gradient and (grad := self._grad(tensor)) is not None:
                found.append((grad, ".grad"))
        except RuntimeError:  # a view whose base was changed in a way that autograd forbids
            pass
        return found

    def of_script(self, module: Any) -> list[Edge]:
        """List the tensors of a TorchScript module, which C++ holds."""
        kinds = self._torch._C.ParameterDict, self._torch._C.BufferDict
        return [(tensor, f".{name}") for kind in kinds for name, tensor in kind(module).items()]


def _of_optimizer(optimizer: Any) -> list[Edge]:
    """List its parameters, which would otherwise be found as keys of its state."""
    groups = own(optimizer).get("param_groups")
    found: list[Edge] = []
    for n, group in enumerate(groups if type(groups) is list else ()):
        params = dict.get(group, "params") if isinstance(group, dict) else None
        for k, parameter in enumerate(params if type(params) is list else ()):
            found.append((parameter, f".param_groups[{n}]['params'][{k}]"))
    return found


def is_other_array(kind: type) -> bool:
    """Whether objects of a class are arrays of a library that may lie on a GPU."""
    if comes_from(kind, "tensorflow.Variable"):  # it exchanges nothing by itself
        return True
    members = [members_of(base) for base in bases_of(kind)]
    if not any(name in held for name in _EXCHANGES for held in members):
        return False
    if comes_from(kind, "torch.Tensor", "numpy.ndarray"):
        return False
    home = sys.modules.get(str(defined_in(kind)).partition(".")[0])
    return type(home) is types.ModuleType and not is_users(vars(home).get("__file__"))


# -- autograd's graphs
def is_node(kind: type) -> bool:
    """Whether objects of a class are nodes of autograd graphs."""
    found = (members_of(base).get("next_functions") for base in bases_of(kind))
    return any(type(member) is types.GetSetDescriptorType for member in found)


def edges_of_node(node: Any) -> list[Edge]:
    """List what a node of a graph holds: other nodes, the leaf where it ends, what it saved."""
    found: list[Edge] = []
    try:
        for function, _ in node.next_functions:
            if function is not None:
                found.append((function, f": {class_name(type(function))}"))
        found += [(variable, ".variable") for variable in _leaf(node)]
        found += _saved(node)
    except RuntimeError:  # a backward pass has freed it
        pass
    return found


def nearest_leaf(node: Any) -> Any:
    """Return the leaf that is the fewest steps from a node: for a layer, its parameter."""
    waiting, seen = deque([node]), {id(node): node}
    while waiting and len(seen) < _NODES:
        node = waiting.popleft()
        for leaf in _leaf(node):
            return leaf
        for function, _ in node.next_functions:
            if function is not None and id(function) not in seen:
                seen[id(function)] = function
                waiting.append(function)
    return None


def _leaf(node: Any) -> Iterator[Any]:
    if type(node).__name__ == "AccumulateGrad":
        yield node.variable


def _saved(node: Any) -> Iterator[Edge]:
    names = (name for base in bases_of(type(node)) for name in members_of(base))
    for name in [name for name in names if name.startswith(_RAW)]:
        try:
            raw = getattr(node, name)
            parts = enumerate(raw) if type(raw) in (tuple, list) else [("", raw)]
            for n, part in parts:
                # An older torch gives it only unpacked.
                data = getattr(part, "data", None)
                if data is not None:
                    yield data, f"._saved_{name[len(_RAW) :]}" + (f"[{n}]" if n != "" else "")
        except RuntimeError:  # freed
            continue


def _graphs_can_be_read() -> bool:
    """Whether no other thread runs a backward pass, which frees the tensors that it has used."""
    if (torch := torch_here()) is None:
        return True
    backward = torch.autograd.graph._engine_run_backward.__code__
    innermost = sys._current_frames()
    del innermost[threading.get_ident()]  # a frame that holds itself stays until it is collected
    return not any(
        frame.f_code is backward for each in innermost.values() for frame, _ in walk_stack(each)
    )
