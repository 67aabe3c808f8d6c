"""Copy a notebook's objects, with the references between the objects.

One pickler writes all objects, so that each has exactly one copy. The notebook's functions and
classes, and most of their instances, are recreated without calling the user's methods. Most library
objects are *shared*: the copies refer to the original object.
"""

import contextvars
import enum
import functools
import io
import pickle
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from gpumagic.copies.storages import StorageCopier
from gpumagic.usercode.program import own_code
from gpumagic.usercode.values import attributes, comes_from, globals_of, is_tensor, own, slots_of

_CACHED = type(functools.lru_cache(str))
_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE in the `__flags__` of classes made in Python

# Types whose values are written into the pickle, not shared.
_INLINE = {int, float, bool, complex, str, bytes, type(None), tuple, list, dict, set, frozenset}
_SHARED_KINDS = {
    *(object, type(Ellipsis), type(NotImplemented), types.CodeType, contextvars.ContextVar),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.ClassMethodDescriptorType),
}
# Share objects of these packages and classes, which are immutable or process-wide.
_SHARED = (
    *("datetime", "decimal", "fractions", "uuid", "pathlib", "re"),
    *("builtins.range", "builtins.slice"),
    *("IPython", "ipykernel", "ipywidgets", "traitlets", "tqdm", "zmq", "tornado", "asyncio"),
    *("logging", "typing", "inspect", "importlib", "contextvars", "concurrent", "subprocess"),
    *("multiprocessing", "threading.Thread", "gpumagic"),
    *("torch._dynamo", "torch._inductor", "torch._ops", "torch._library", "torch.distributed"),
    *("torch.cuda.streams", "triton", "torch.jit.ScriptFunction", "torch.device", "torch.dtype"),
    *("torch.layout", "torch.memory_format", "torch.Size", "torch.finfo", "torch.iinfo"),
    *("jaxlib._jax.Device", "jaxlib._jax.Sharding"),
)
# Copy objects of these classes attribute by attribute, without the class's pickling methods.
_WHOLE = (
    *("torch.nn.Module", "torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler"),
    *("torch.amp.GradScaler", "torch.utils.data.DataLoader", "jax.custom_jvp", "jax.custom_vjp"),
    "equinox.Module",  # pickle would call `__new__`, which returns a singleton
)


class Copier(cloudpickle.Pickler):  # type: ignore[misc]
    """Copy values in two steps: `write` pickles the originals, `read` makes the copies."""

    def __init__(
        self,
        namespace: dict[str, Any],
        fresh: dict[str, Any],  # globals for copies of the notebook's functions
        storages: StorageCopier,  # copies tensors and arrays after `write`
        stays: Callable[[Any], bool] | None,  # returns True for additional objects to share
    ) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=5)
        self._namespace, self._storages, self._stays = namespace, storages, stays
        self.read_by_functions: dict[str, Any] = {}  # values that copied functions read, by name
        self.finishing: list[Callable[[], Any]] = []  # calls to make when all copies exist
        self.alive: list[Any] = []  # keeps the targets of copied weak references alive
        self._modules = {"__main__", namespace.get("__name__", "__main__")} - {"builtins"}
        self._spaces = {id(namespace): (namespace, fresh)}  # globals and their copies, by id
        # Shared and recreated originals, by id. The id is also the original's number in the pickle.
        self._originals: dict[int, Any] = {}
        self._copies: dict[int, Any] = {}  # copies of recreated objects, by number
        self._ours: dict[type, bool] = {}  # results of `is_ours`
        self._kinds: dict[type, tuple[bool, bool, frozenset[int]]] = {}  # cache of `_shares`

    def write(self, value: Any) -> None:
        with warnings.catch_warnings():
            # Python 3.12 warns that Python 3.14 will not pickle iterators of itertools.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.dump(value)

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the copies; `names` has one name per `write`. First copy the storages."""
        self._stream.seek(0)
        reader: Any = pickle.Unpickler(self._stream)
        reader.persistent_load = self._originals.__getitem__
        made = {name: reader.load() for name in names}
        for finish in self.finishing:
            finish()
        return made

    def clear(self) -> None:
        self.clear_memo()
        self._stream.close()
        for name, held in vars(self).items():
            if name != "_namespace" and isinstance(held, (dict, list)):
                held.clear()

    def persistent_id(self, value: Any) -> int | None:
        """Return an object's number to share the object, or None to copy it. Called by pickle."""
        if self._stays is not None and self._stays(value):
            return self._number(value)
        if type(value) in _INLINE:
            if type(value) is dict and id(value) in self._spaces:
                return self._number(self.space(value))
            return None
        return self._number(value) if self._shares(value) else None

    def reducer_override(self, value: Any) -> Any:
        """Return how pickle recreates an object, in the format of `object.__reduce__`."""
        kind = type(value)
        if is_tensor(value):
            return self._storages.reduce_tensor(value)
        reduce = _REDUCERS.get(kind, _reduce_class if issubclass(kind, type) else None)
        if reduce is not None:
            return reduce(self, value)
        if _is_jitted(kind):
            return _reduce_jitted(self, value)
        if self._storages.has(value, kind):
            return self._storages.reduce(value, kind, own(value) if self.is_ours(kind) else {})
        return _reduce_instance(self, value, kind)

    def recreate(self, original: Any, make: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """Return a reduce value that makes a copy by calling ``make(original, *args)``."""
        return Copier.copied, (self, self._number(original), make, *args)

    def copied(self, number: int, make: Callable[..., Any], *args: Any) -> Any:
        """Return the copy, which the first call makes. In a reference cycle, pickle calls twice."""
        if number not in self._copies:
            self._copies[number] = make(self._originals[number], *args)
        return self._copies[number]

    def _number(self, value: Any) -> int:
        self._originals[id(value)] = value
        return id(value)

    def space(self, original: dict[str, Any]) -> dict[str, Any]:
        """Return the globals for copies of functions whose globals are `original`."""
        if not self._is_space(original):
            return original
        return self._spaces.setdefault(id(original), (original, dict(original)))[1]

    def _is_space(self, space: dict[str, Any]) -> bool:
        """Whether a dict is the globals of the notebook or of a script that `%run` ran."""
        return id(space) in self._spaces or space.get("__name__") == "__main__"

    def is_notebooks(self, function: Any) -> bool:
        return type(function) is types.FunctionType and self._is_space(function.__globals__)

    def is_ours(self, kind: type) -> bool:
        """Whether the notebook defines a class or one of its bases; False for classes to share."""
        if kind not in self._ours:
            # Code compares enums by identity, so they are shared. ctypes classes cannot be copied.
            stays = comes_from(kind, "enum.Enum", "_ctypes.Structure", "_ctypes.Array")
            ours = not (stays or self._storages.others.know(kind))
            self._ours[kind] = ours and any(map(self._is_from_here, kind.__mro__))
        return self._ours[kind]

    def _is_from_here(self, kind: type) -> bool:
        if not kind.__flags__ & _MADE_IN_PYTHON:
            return False
        if any(map(self.is_notebooks, vars(kind).values())):
            return True  # a library's class with a method from the notebook
        # torch makes a backward class for each autograd.Function; `_forward_cls` is the Function.
        forward = vars(kind).get("_forward_cls", kind)
        return kind.__module__ in self._modules or forward.__module__ in self._modules

    def reads(self, function: types.FunctionType) -> dict[str, Any]:
        """Return the variables that a function of the notebook reads; empty for other functions."""
        space = function.__globals__
        if not self._is_space(space):
            return {}
        names = globals_of(function.__code__)
        found = {name: space[name] for name in names if name in space and name != "__builtins__"}
        if space is self._namespace:
            self.read_by_functions.update(found)
        return found

    def _shares(self, value: Any) -> bool:
        kind = type(value)
        if kind is types.FunctionType:
            held = value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)
            return not self.is_notebooks(value) and (not any(held) or self._is_of_library(value))
        if kind is _CACHED:
            return not self.is_notebooks(vars(value).get("__wrapped__"))
        if kind is types.BuiltinFunctionType:  # a function of a C module, or a bound method
            return isinstance(value.__self__, (types.ModuleType, type, type(None)))
        if _is_jitted(kind):
            return self._is_of_library(value)
        if issubclass(kind, type):
            return not self.is_ours(value)
        if kind not in self._kinds:
            copied = is_tensor(value) or self.is_ours(kind)
            self._kinds[kind] = copied, not copied and _is_shared_kind(kind), _of_its_module(kind)
        copied, shared, of_module = self._kinds[kind]
        return not copied and (shared or id(value) in of_module)

    def _is_of_library(self, function: Any) -> bool:
        """Whether a library defines exactly `function`. A user's wrapper may have the same name."""
        found: Any = sys.modules.get(function.__module__ or "")
        for name in function.__qualname__.split("."):
            found = getattr(found, name, None)
        return found is function and function.__module__ not in self._modules


def _is_jitted(kind: type) -> bool:
    return kind.__name__ == "PjitFunction" and kind.__module__.startswith("jaxlib.")


def _is_shared_kind(kind: type) -> bool:
    if kind in _SHARED_KINDS or issubclass(kind, (types.ModuleType, enum.Enum)):
        return True
    name = f"{kind.__module__}.{kind.__qualname__}."
    shared = name.startswith(tuple(f"{each}." for each in _SHARED))
    # Copy compiled modules and virtual GPUs' generators, although their packages are in `_SHARED`.
    return shared and not comes_from(kind, "torch.nn.Module", "torch._C.Generator")


def _of_its_module(kind: type) -> frozenset[int]:
    """Return the ids of the objects, such as sentinels, in the namespace of a class's module."""
    if (name := kind.__module__) in ("__main__", "builtins") or name not in sys.modules:
        return frozenset()
    return frozenset(id(item) for item in list(vars(sys.modules[name]).values()))


def _reduce_function(copier: Copier, function: types.FunctionType) -> Any:
    made = copier.recreate(function, _new_function, copier, function.__closure__)
    held = function.__defaults__, function.__kwdefaults__, vars(function), copier.reads(function)
    return *made, held, None, None, _set_function


def _new_function(old: types.FunctionType, copier: Copier, cells: Any) -> Any:
    space = copier.space(old.__globals__)
    code = old.__code__ if space is old.__globals__ else own_code(old.__code__)
    new = types.FunctionType(code, space, old.__name__, None, cells)
    for name in functools.WRAPPER_ASSIGNMENTS:
        setattr(new, name, getattr(old, name))
    return new


def _set_function(function: types.FunctionType, state: Any) -> None:
    function.__defaults__, function.__kwdefaults__, held, read = state
    vars(function).update(held)
    function.__globals__.update(read)


def _reduce_cell(copier: Copier, cell: types.CellType) -> Any:
    made = copier.recreate(cell, lambda old: types.CellType())
    try:
        contents = cell.cell_contents
    except ValueError:  # the cell is empty
        return made
    copier.read_by_functions[f"(closure {len(copier.read_by_functions)})"] = contents
    return *made, (contents,), None, None, lambda new, held: setattr(new, "cell_contents", held[0])


def _reduce_cached(copier: Copier, cached: Any) -> Any:
    def new(old: Any, function: Any) -> Any:
        return functools.lru_cache(**old.cache_parameters())(function)

    held = dict(vars(cached))
    return *copier.recreate(cached, new, held.pop("__wrapped__")), held


def _reduce_jitted(copier: Copier, function: Any) -> Any:
    """Return how pickle recreates a function that JAX compiled; JAX compiles the copy again."""
    kind: Any = type(function)
    made = copier.recreate(function, lambda old: kind.__new__(kind))
    return *made, (function.__getstate__(), vars(function)), None, None, _set_jitted


def _set_jitted(function: Any, state: Any) -> None:
    made, held = state
    function.__setstate__(made)
    vars(function).update(held)


def _reduce_class(copier: Copier, kind: type) -> Any:
    held = {
        name: item
        for name, item in vars(kind).items()
        if name not in ("__module__", "__qualname__", "__slots__", "_abc_impl")
        and getattr(item, "__objclass__", None) is not kind  # type.__new__ makes its descriptors
    }
    made = copier.recreate(kind, _new_class, copier, type(kind), kind.__bases__)
    return *made, (copier, held), None, None, _set_class


def _new_class(old: type, copier: Copier, meta: Any, bases: tuple[type, ...]) -> Any:
    space = {"__module__": old.__module__, "__qualname__": old.__qualname__}
    for name in ("__slots__", "__orig_bases__"):  # required by type.__new__ and Generic
        if name in vars(old):
            space[name] = vars(old)[name]
    # Skip metaclasses of the notebook, because the user's `__new__` must not run again.
    maker: Any = next(m for m in meta.__mro__ if not copier.is_ours(m) and "__new__" in vars(m))
    return maker.__new__(meta, old.__name__, bases, space)


def _set_class(kind: type, state: tuple[Copier, dict[str, Any]]) -> None:
    copier, held = state
    for name, item in held.items():
        finish = functools.partial(type.__setattr__, kind, name, item)
        if name == "__init_subclass__":  # set last, because copying a subclass would call it
            copier.finishing.append(finish)
        else:
            finish()


def _reduce_instance(copier: Copier, value: Any, kind: type) -> Any:
    """Return how pickle recreates an object; NotImplemented to use the class's own pickling."""
    if not (_is_plain(kind) and (comes_from(kind, *_WHOLE) or _pickles_by_default(copier, kind))):
        return NotImplemented
    held = attributes(value)
    if comes_from(kind, "torch.utils.data.DataLoader"):
        held["_iterator"] = None  # running workers are not copied
    return *copier.recreate(value, _new_instance, copier, kind), held, None, None, _set_instance


def _is_plain(kind: type) -> bool:
    """Whether a class and its bases are made in Python, so that `object.__new__` works."""
    return all(
        base.__flags__ & _MADE_IN_PYTHON
        and type(vars(base).get("__new__")) is not types.BuiltinFunctionType
        for base in kind.__mro__[:-1]
    )


def _pickles_by_default(copier: Copier, kind: Any) -> bool:
    """Whether a class is defined in the notebook and has Python's default pickling."""
    ways = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    default = all(getattr(kind, way, None) is getattr(object, way, None) for way in ways)
    return default and copier.is_ours(kind)


def _new_instance(old: Any, copier: Copier, kind: type) -> Any:
    made: Any = object.__new__(kind)
    if comes_from(kind, "torch.nn.RNNBase"):
        # cuDNN needs the weights of a recurrent layer in one block, so flatten the copied weights.
        copier.finishing.append(made.flatten_parameters)
    return made


def _set_instance(value: Any, held: dict[str, Any]) -> None:
    slots = {slot.__name__ for slot in slots_of(type(value))}
    for name, item in held.items():
        if name in slots:
            object.__setattr__(value, name, item)
        else:
            own(value)[name] = item


def _reduce_reference(copier: Copier, reference: Any) -> Any:
    key = [reference.key] if isinstance(reference, weakref.KeyedRef) else []
    args = reference(), reference.__callback__, *key
    return copier.recreate(reference, _new_reference, copier, *args)


def _new_reference(old: Any, copier: Copier, target: Any, *args: Any) -> Any:
    copier.alive.append(target)
    return old if target is None else type(old)(target, *args)


def _refuse(copier: Copier, value: Any) -> Any:
    kind = "a memoryview" if type(value) is memoryview else "an open file"
    raise TypeError(f"cannot copy {kind}")  # cloudpickle would copy the contents


_REDUCERS: dict[type, Callable[[Copier, Any], Any]] = {
    types.FunctionType: _reduce_function,
    types.CellType: _reduce_cell,
    _CACHED: _reduce_cached,
    **dict.fromkeys((weakref.ref, weakref.KeyedRef), _reduce_reference),
    type(threading.Lock()): lambda copier, lock: (threading.Lock, ()),
    type(threading.RLock()): lambda copier, lock: (threading.RLock, ()),
    **dict.fromkeys((io.TextIOWrapper, memoryview), _refuse),
}
