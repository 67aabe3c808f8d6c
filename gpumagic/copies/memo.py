"""Decide which objects copies share, and keep the copy of every other one.

Objects of the process and immutable ones are shared. Objects that pickle would turn into something
else are refused. Everything else is copied, a plot as a list.

The copier writes a number for a shared object. The functions that recreate an object ask here for
its original, and for the copy that an earlier visit of a cycle has made.
"""

import contextvars
import enum
import functools
import io
import sys
import threading
import types
from collections.abc import Callable, Container
from typing import Any

from gpumagic.usercode.values import comes_from, is_tensor, torch_here

CACHED = type(functools.lru_cache(str))
LOCKS = (type(threading.Lock()), type(threading.RLock()))

MADE_IN_PYTHON = 1 << 9
"""Py_TPFLAGS_HEAPTYPE, among a class's flags."""

# Types that pickle saves as they are, at C speed.
INLINE = frozenset({int, float, bool, complex, type(None), tuple, list, dict, set, frozenset})
# Strings from this length on are shared, not pickled.
LONG = 4096

_SHARED_KINDS = frozenset(
    (
        *(object, type(Ellipsis), type(NotImplemented), types.CodeType),
        *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType),
        *(types.WrapperDescriptorType, types.ClassMethodDescriptorType),
        contextvars.ContextVar,
    )
)
# Shared types: immutable ones, and types that belong to the process.
_SHARED_ROOMS = (
    *("datetime", "decimal", "fractions", "uuid", "pathlib", "re"),
    *("builtins.range", "builtins.slice"),
    *("IPython", "ipykernel", "logging", "typing", "inspect", "importlib", "contextvars", "zmq"),
    *("tornado", "asyncio", "concurrent", "gpumagic", "torch._dynamo", "torch._inductor"),
    *("torch._ops", "torch._library", "torch.distributed", "torch.cuda.streams", "triton"),
    *("torch.device", "torch.dtype", "torch.layout", "torch.memory_format", "torch.Size"),
    *("torch.jit.ScriptFunction", "jaxlib._jax.Device", "jaxlib._jax.Sharding"),
)
# Shared, with a note to the user, since the code may change them.
_SHARED_ALOUD = ("ipywidgets", "traitlets", "tqdm", "threading.Thread", "multiprocessing.pool")
_WHOLE = (
    *("torch.nn.Module", "torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler"),
    *("torch.amp.GradScaler", "jax.custom_jvp", "jax.custom_vjp"),
    "equinox.Module",  # a singleton that its `__new__` keeps
)


class Uncopied(Exception):
    """An object that cannot be copied, in words."""

    def __init__(self, kind: str, value: object) -> None:
        super().__init__(kind)
        self.value = value


def is_shared_kind(kind: type) -> bool:
    """Whether all objects of a class are shared."""
    if kind in _SHARED_KINDS or issubclass(kind, (types.ModuleType, enum.Enum)):
        return True
    # Also modules of torch.compile, and generators of virtual GPUs.
    if comes_from(kind, "torch.nn.Module") or is_generator(kind):
        return False
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        return not issubclass(kind, numpy.void)  # numbers are immutable
    return within(kind, _SHARED_ROOMS) or is_reported(kind)


def is_shared(value: Any, kind: type, of_modules: Container[int]) -> bool:
    """Whether this object is shared; it is no function and no class."""
    if kind is types.BuiltinFunctionType:
        owner = value.__self__
        # Older versions of pybind11 bind torch's functions like this.
        return (
            owner is None
            or issubclass(type(owner), (types.ModuleType, type))
            or type(owner).__name__ == "PyCapsule"
        )
    if is_generator(kind):
        return is_default_generator(value)
    if issubclass(kind, io.IOBase):
        return value in (sys.stdout, sys.stderr, sys.stdin, sys.__stdout__, sys.__stderr__)
    return id(value) in of_modules


def of_its_module(kind: type) -> frozenset[int]:
    """Return the ids of a class's objects that its library keeps by name, as sentinels."""
    name = kind.__module__
    if name in ("__main__", "builtins") or name not in sys.modules:
        return frozenset()
    return frozenset(id(item) for item in list(vars(sys.modules[name]).values()))


def is_reported(kind: type) -> bool:
    """Whether to tell the user that the object is shared."""
    return any(within(base, _SHARED_ALOUD) for base in kind.__mro__)


def within(kind: type, rooms: tuple[str, ...]) -> bool:
    """Whether a class is in one of these packages, or is one of these classes."""
    name = f"{kind.__module__}.{kind.__qualname__}."
    return any(name.startswith(f"{room}.") for room in rooms)


def is_generator(kind: type) -> bool:
    """Whether a class is torch's class of generators, or the virtual GPUs' replacement."""
    return any(b.__name__ == "Generator" and b.__module__ == "torch._C" for b in kind.__mro__)


def is_default_generator(generator: Any) -> bool:
    """Whether it is a default generator of torch."""
    torch = torch_here()
    defaults: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
    return any(generator._cdata == default._cdata for default in defaults)


def refuse(value: Any, kind: type) -> None:
    """Raise `Uncopied` for an object that pickle would turn into something else."""
    if issubclass(kind, io.IOBase) and kind not in (io.StringIO, io.BytesIO):
        raise Uncopied("an open file", value)
    if within(kind, ("subprocess.Popen", "multiprocessing.process.BaseProcess")):
        raise Uncopied("a process", value)
    if comes_from(kind, "torch.utils.data.dataloader._BaseDataLoaderIter"):
        raise Uncopied("an iterator over a DataLoader", value)
    if comes_from(kind, "torch.jit.ScriptModule"):
        raise Uncopied("a TorchScript module", value)
    if kind.__name__ == "CUDAGraph":
        raise Uncopied("a CUDA graph", value)


def is_array(value: Any, kind: type) -> bool:
    """Whether it is a numpy array of numbers."""
    kinds = ("ndarray", "recarray", "matrix", "memmap")
    of_numpy = kind.__name__ in kinds and kind.__module__.partition(".")[0] == "numpy"
    return of_numpy and not value.dtype.hasobject


def is_jitted(kind: type) -> bool:
    """Whether it is JAX's class of compiled functions."""
    return kind.__name__ == "PjitFunction" and kind.__module__.startswith("jaxlib.")


def is_importable(value: Any) -> bool:
    """Whether a function or class is found by its name in its module."""
    found: Any = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def by_attributes(kind: Any, ours: bool) -> bool:
    """Whether to copy an object by its attributes, ignoring its class's own pickling."""
    if comes_from(kind, *_WHOLE):
        return True
    if not ours and kind.__module__ != "threading":
        return False
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return False
    # A class that defines both says how it is copied.
    return not (defines(kind, "__getstate__") and defines(kind, "__setstate__"))


def defines(kind: type, name: str) -> bool:
    """Whether a class or a base other than object defines this method."""
    return any(name in vars(base) for base in kind.__mro__ if base is not object)


def solid_base(kind: type) -> type:
    """Return the C base class of an object, found as in `copyreg._reduce_ex`."""
    for base in kind.__mro__:
        made_in_python = base.__flags__ & MADE_IN_PYTHON
        new = vars(base).get("__new__")
        if not made_in_python or type(new) is types.BuiltinFunctionType:
            return base
    return object


def slots_of(value: Any) -> dict[tuple[type, str], Any]:
    """Return the values of an object's slots, by class and name."""
    held = {}
    for base in type(value).__mro__:
        if "__slots__" not in vars(base):
            continue
        for name, slot in vars(base).items():
            if type(slot) is types.MemberDescriptorType:
                try:
                    held[base, name] = slot.__get__(value)
                except AttributeError:  # never set
                    continue
    return held


def with_article(name: str) -> str:
    """``"an IntSlider"``."""
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


class Memo:
    """The memo of one copy: the originals by number.

    `fresh` becomes the globals of the copies of the notebook's functions.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        fresh: dict[str, Any],
        stays: Callable[[type], bool] = lambda kind: False,
    ) -> None:
        self.namespace = namespace
        self._stays = stays  # whether a class of the notebook is shared
        # The visited variables by name: the requested ones, and the ones that functions read.
        self.met: dict[str, Any] = {}
        self.notes: dict[str, None] = {}  # notes for the user, in order
        self.later: list[Callable[[], Any]] = []  # to run when all copies exist
        self.alive: list[Any] = []  # objects held by weak references alone
        self._modules = {"__main__", namespace.get("__name__", "__main__")} - {"builtins"}
        self._spaces = {id(namespace): (namespace, fresh)}
        self._table: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.copies: dict[int, Any] = {}
        self._ours: dict[type, bool] = {}
        self._kinds: dict[type, tuple[bool, bool, frozenset[int]]] = {}

    def __getitem__(self, number: int) -> Any:
        return self._table[number]

    def clear(self) -> None:
        """Drop all references."""
        for name, held in vars(self).items():
            if name != "namespace" and isinstance(held, (dict, list)):
                held.clear()

    def number(self, value: Any) -> int:
        """Return the number of a value: ``originals[number]`` is the value."""
        number = self._numbers.setdefault(id(value), len(self._table))
        if number == len(self._table):
            self._table.append(value)
        return number

    def recreate(self, original: Any, make: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """Return what pickle calls to make a copy: ``make(original, *args)``."""
        return _once, (self, self.number(original), make, *args)

    # -- the notebook's objects
    def space(self, original: dict[str, Any]) -> dict[str, Any]:
        """Return the globals for copies of functions whose globals are `original`."""
        if not self.is_space(original):
            return original
        return self._spaces.setdefault(id(original), (original, dict(original)))[1]

    def is_known(self, space: dict[str, Any]) -> bool:
        """Whether functions with these globals were visited."""
        return id(space) in self._spaces

    def is_space(self, space: dict[str, Any]) -> bool:
        """Whether globals are the notebook's; those of a script of `%run` stay separate."""
        return self.is_known(space) or space.get("__name__") == "__main__"

    def is_notebooks(self, function: Any) -> bool:
        """Whether a function is defined in the notebook."""
        return type(function) is types.FunctionType and self.is_space(function.__globals__)

    def is_ours(self, kind: type) -> bool:
        """Whether a class or one of its bases is defined in the notebook."""
        if kind not in self._ours:
            ours = any(self._is_from_here(base) for base in kind.__mro__)
            # An enumeration is shared: its members are compared by identity.
            stays = issubclass(kind, enum.Enum) or self._stays(kind)
            self._ours[kind] = ours and not stays
        return self._ours[kind]

    def _is_from_here(self, kind: type) -> bool:
        if not kind.__flags__ & MADE_IN_PYTHON:
            return False
        if kind.__module__ in self._modules:
            return True
        held = list(vars(kind).values())
        if any(self.is_notebooks(item) for item in held):
            return True
        # For example torch's backward class of an autograd.Function of the notebook.
        refers = any(
            issubclass(type(item), type) and item.__module__ in self._modules for item in held
        )
        return refers and not is_importable(kind)

    # -- shared objects
    def shares(self, value: Any) -> bool:
        """Whether an object is shared; raise Uncopied for the notebook itself."""
        kind = type(value)
        if kind is str or kind is bytes:
            return len(value) >= LONG
        if kind is types.FunctionType:
            return not self.is_notebooks(value) and self._is_library_function(value)
        if kind is CACHED:
            return not self.is_notebooks(vars(value).get("__wrapped__"))
        if is_jitted(kind):
            of_library = value.__module__ not in self._modules
            return of_library and is_importable(value)
        if issubclass(kind, type):
            return not self.is_ours(value)
        if kind is types.ModuleType and vars(value) is self.namespace:
            raise Uncopied("the notebook's own module", value)
        return self._shares_instance(value, kind)

    def _is_library_function(self, function: types.FunctionType) -> bool:
        held = function.__closure__ or function.__defaults__ or function.__kwdefaults__
        # A library's decorated function of the notebook is found there by its name.
        of_library = function.__module__ not in self._modules
        return not (held or vars(function)) or (of_library and is_importable(function))

    def _shares_instance(self, value: Any, kind: type) -> bool:
        if kind not in self._kinds:
            copied = is_tensor(value) or self.is_ours(kind)
            shared = not copied and is_shared_kind(kind)
            self._kinds[kind] = copied, shared, of_its_module(kind)
        copied, shared, of_modules = self._kinds[kind]
        if copied or not (shared or is_shared(value, kind, of_modules)):
            return False
        if is_reported(kind):
            name = with_article(kind.__name__)
            self.notes[f"{name} is shared with the notebook, not copied"] = None
        return True


def _once(originals: Memo, number: int, make: Callable[..., Any], *args: Any) -> Any:
    """Return the first result of `make`: in a cycle, pickle builds an object twice."""
    if number not in originals.copies:
        originals.copies[number] = make(originals[number], *args)
    return originals.copies[number]
