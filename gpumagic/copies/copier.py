"""Copies of whatever a notebook's variables hold, with the relations between them.

One pickle is written and read back, so that each object has one copy. Tensors and arrays go beside
it (`Blocks`); functions and classes of the notebook are made anew, with copies as their globals;
libraries are shared.
"""

import io
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from gpumagic.copies import functions, instances, shared_objects
from gpumagic.copies.storages import Blocks
from gpumagic.moving.find_tensors import own_attributes


class Copier(cloudpickle.Pickler):  # type: ignore[misc]
    """Copies values in two steps: `write` reads the originals, `read` makes the copies.

    Parameters
    ----------
    namespace : dict
        The notebook's variables.
    fresh : dict
        What the copies of the notebook's functions have as their globals.
    blocks : Blocks

    Attributes
    ----------
    met : dict
        The variables that were met, by name: those asked for, and those that functions read.
    notes : dict
        Lines for the user, in order.
    later : list of callable
        What is done when all copies are there.
    marked : list of type
        Classes that pickling leaves a mark in, which `write` takes away.
    finalised : bool
        An object with a `__del__` of the notebook was met.
    """

    def __init__(self, namespace: dict[str, Any], fresh: dict[str, Any], blocks: Blocks) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=5)
        self.met: dict[str, Any] = {}
        self.notes: dict[str, None] = {}
        self.blocks = blocks
        self.namespace = namespace
        self._modules = {"__main__", namespace.get("__name__", "__main__")} - {"builtins"}
        self._spaces = {id(namespace): (namespace, fresh)}
        self._table: list[Any] = []
        self._indices: dict[int, int] = {}
        self._made: dict[int, Any] = {}
        self._ours: dict[type, bool] = {}
        self._kinds: dict[type, tuple[bool, bool, frozenset[int]]] = {}
        self.alive: list[Any] = []
        self.later: list[Callable[[], Any]] = []
        self.marked: list[type] = []
        self.finalised = False
        self.token: Tensor | None = None

    def write(self, values: Any) -> None:
        """Read the originals.

        Raises
        ------
        Exception
            `rules.Uncopied`, and what pickling raises, for what cannot be copied.
        """
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns that from 3.14 on it will not copy iterators of itertools.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.dump(values)
        finally:
            for kind in self.marked:
                if "__slotnames__" in vars(kind):
                    type.__delattr__(kind, "__slotnames__")

    def read(self) -> Any:
        """Make the copies; `Blocks.copy` comes before."""
        self.token = torch.zeros((), requires_grad=True)
        self._stream.seek(0)
        made = _Reader(self._stream, self._table).load()
        for finish in self.later:
            finish()
        return made

    def clear(self) -> None:
        """Hold nothing any more."""
        self.clear_memo()
        self._stream.close()
        for held in (self._table, self._indices, self._made, self._ours, self._kinds, self._spaces):
            held.clear()
        for kept in (self.alive, self.later, self.marked, self.met):
            kept.clear()

    # -- what is shared
    def persistent_id(self, value: Any) -> int | None:
        """The index of what is shared; None for what is copied. pickle asks for every object."""
        kind = type(value)
        if kind in shared_objects.INLINE:
            if kind is dict and id(value) in self._spaces:
                return self.keep(self.space(value))
            return None
        if kind is str or kind is bytes:
            return None if len(value) < shared_objects.LONG else self.keep(value)
        if kind is types.FunctionType:
            return self.keep(value) if self._is_shared_function(value) else None
        if id(value) == id(self):
            return self.keep(value)
        if issubclass(kind, type):
            return None if self.is_ours(value) else self.keep(value)
        if kind is types.ModuleType and vars(value) is self.namespace:
            raise shared_objects.Uncopied("the notebook's own module", value)
        if kind is shared_objects.CACHED:
            inner = vars(value).get("__wrapped__")
            return None if self.is_notebooks(inner) else self.keep(value)
        if kind not in self._kinds:
            copied = issubclass(kind, Tensor) or self.is_ours(kind)
            shared = not copied and shared_objects.is_shared_kind(kind)
            self._kinds[kind] = copied, shared, shared_objects.of_its_module(kind)
        copied, shared, of_modules = self._kinds[kind]
        if copied or not (shared or shared_objects.is_shared(value, kind, of_modules)):
            return None
        if shared_objects.is_aloud(kind):
            self.notes[f"{shared_objects.named(kind)} is shared with the notebook, not copied"] = (
                None
            )
        return self.keep(value)

    def keep(self, value: Any) -> int:
        """An index by which `original` gives the value back."""
        index = self._indices.setdefault(id(value), len(self._table))
        if index == len(self._table):
            self._table.append(value)
        return index

    def space(self, original: dict[str, Any]) -> dict[str, Any]:
        """The globals of the copies of functions whose globals are `original`."""
        if not functions.is_notebook(original) and id(original) not in self._spaces:
            return original
        kept = self._spaces.setdefault(id(original), (original, dict(original)))
        return kept[1]

    def is_notebooks(self, function: Any) -> bool:
        """Whether it is a function that was defined in the notebook."""
        if type(function) is not types.FunctionType:
            return False
        space = function.__globals__
        return id(space) in self._spaces or functions.is_notebook(space)

    def _is_shared_function(self, function: types.FunctionType) -> bool:
        if self.is_notebooks(function):
            return False
        held = function.__closure__ or function.__defaults__ or function.__kwdefaults__
        return not (held or vars(function)) or functions.is_importable(function)

    def is_ours(self, kind: type) -> bool:
        """Whether a class, or one that it comes from, was defined in the notebook."""
        if kind not in self._ours:
            self._ours[kind] = any(self._is_from_here(base) for base in kind.__mro__)
            self.finalised |= self._ours[kind] and shared_objects.defines(kind, "__del__")
        return self._ours[kind]

    def _is_from_here(self, kind: type) -> bool:
        if not kind.__flags__ & (1 << 9):  # Py_TPFLAGS_HEAPTYPE
            return False
        if kind.__module__ in self._modules:
            return True
        held = list(vars(kind).values())
        if any(self.is_notebooks(item) for item in held):
            return True
        # As the backward class that torch makes for an autograd.Function of the notebook.
        refers = any(
            issubclass(type(item), type) and item.__module__ in self._modules for item in held
        )
        return refers and not functions.is_importable(kind)

    def reducer_override(self, value: Any) -> Any:
        """How an object is made anew, as `object.__reduce__` says it."""
        kind = type(value)
        if issubclass(kind, Tensor):
            return self._reduce_tensor(value, kind)
        reduce = functions.REDUCERS.get(kind) or instances.REDUCERS.get(kind)
        if reduce is None and issubclass(kind, type):
            reduce = functions.reduce_class
        if reduce is not None:
            return reduce(self, value)
        shared_objects.refuse(value, kind)
        if shared_objects.is_array(value, kind):
            return self.blocks.array, (self.blocks.add(value),)
        return instances.reduce_instance(self, value, kind)

    def _reduce_tensor(self, tensor: Tensor, kind: type) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            number = self.blocks.add(tensor)
            leaf = tensor.is_leaf
            held: dict[str, Any] = {}
            if leaf and tensor.grad is not None:
                held["grad"] = tensor.grad
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if leaf and getattr(tensor, name, None):
                    held[name] = getattr(tensor, name)
        state = (held, own_attributes(tensor) or None)
        args = (number, None if kind is Tensor else kind)
        if not any(state):
            return self.new_tensor, args
        return self.new_tensor, args, state, None, None, _set_tensor

    def new_tensor(self, number: int, kind: type | None) -> Tensor:
        """The copy of a tensor, known by its number in `blocks`."""
        return self.blocks.tensor(number, kind or Tensor, self.token)

    def once(self, index: int, make: Callable[[], Any]) -> Any:
        """What `make` gave the first time: a cycle makes a pickle build an object twice."""
        if index not in self._made:
            self._made[index] = make()
        return self._made[index]

    def original(self, index: int) -> Any:
        """What `keep` was given."""
        return self._table[index]


class _Reader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, table: list[Any]) -> None:
        super().__init__(stream)
        self._table = table

    def persistent_load(self, index: int) -> Any:
        return self._table[index]


def _set_tensor(tensor: Tensor, state: Any) -> None:
    held, attributes = state
    with torch._C.DisableTorchFunctionSubclass():
        for name, value in held.items():
            setattr(tensor, name, value)
    if attributes:
        own_attributes(tensor).update(attributes)  # type: ignore[attr-defined]
