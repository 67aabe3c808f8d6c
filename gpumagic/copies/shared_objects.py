"""Tell which objects are shared, which are copied by their attributes, and which have no copy.

What belongs to the process or cannot change is shared; what a pickle would copy into something else
is refused. Anything else is copied, a plot as a list.
"""

import contextvars
import functools
import io
import sys
import threading
import types
import weakref
from collections.abc import Container
from typing import Any

from gpumagic.usercode.values import comes_from, torch_here

CACHED = type(functools.lru_cache(str))
LOCKS = (type(threading.Lock()), type(threading.RLock()))
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)

MADE_IN_PYTHON = 1 << 9
"""Py_TPFLAGS_HEAPTYPE, among a class's flags."""

# What is looked at no further: saved as it is, at C speed.
INLINE = frozenset({int, float, bool, complex, type(None), tuple, list, dict, set, frozenset})
# Texts from this length on are not written out and read back.
LONG = 4096

_SHARED_KINDS = frozenset(
    (
        *(object, type(Ellipsis), type(NotImplemented), types.CodeType),
        *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType),
        *(types.WrapperDescriptorType, types.ClassMethodDescriptorType),
        contextvars.ContextVar,
    )
)
# Instances of these and of their classes: what cannot change, and what belongs to the process.
_SHARED_ROOMS = (
    *("datetime", "decimal", "fractions", "uuid", "pathlib", "re"),
    *("builtins.range", "builtins.slice"),
    *("IPython", "ipykernel", "logging", "typing", "inspect", "importlib", "contextvars", "zmq"),
    *("tornado", "asyncio", "concurrent", "gpumagic", "torch._dynamo", "torch._inductor"),
    *("torch._ops", "torch._library", "torch.distributed", "torch.cuda.streams", "triton"),
    *("torch.device", "torch.dtype", "torch.layout", "torch.memory_format", "torch.Size"),
    *("torch.jit.ScriptFunction", "jaxlib._jax.Device", "jaxlib._jax.Sharding"),
)
# Shared too, and worth a line: the code may change them.
_SHARED_ALOUD = ("ipywidgets", "traitlets", "tqdm", "threading.Thread", "multiprocessing.pool")
_WHOLE = (
    *("torch.nn.Module", "torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler"),
    *("torch.amp.GradScaler", "jax.custom_jvp", "jax.custom_vjp"),
    "equinox.Module",  # it holds what its __new__ made for ever, unless its metaclass asked
)
SCRIPT_MODULE = "torch.jit.ScriptModule"


class Uncopied(Exception):
    """An object that has no copy, and in words what it is."""

    def __init__(self, kind: str, value: object) -> None:
        super().__init__(kind)
        self.value = value


def is_shared_kind(kind: type) -> bool:
    """Whether every object of a class stands for itself in the copies."""
    if kind in _SHARED_KINDS or issubclass(kind, types.ModuleType):
        return True
    # Also a module that torch.compile made, and a generator of a virtual GPU.
    if comes_from(kind, "torch.nn.Module") or is_generator(kind):
        return False
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        return not issubclass(kind, numpy.void)  # a number cannot change
    return within(kind, _SHARED_ROOMS) or is_aloud(kind)


def is_shared(value: Any, kind: type, of_modules: Container[int]) -> bool:
    """Whether this object, no function and no class, is shared whatever others of its class are."""
    if kind is types.BuiltinFunctionType:
        owner = value.__self__
        # As older versions of pybind11 bind the functions of torch.
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
    """The ids of the objects of a class that its library keeps by name, as sentinels."""
    name = kind.__module__
    if name in ("__main__", "builtins") or name not in sys.modules:
        return frozenset()
    return frozenset(id(item) for item in list(vars(sys.modules[name]).values()))


def is_aloud(kind: type) -> bool:
    """Whether the user should hear that such an object is shared."""
    return any(within(base, _SHARED_ALOUD) for base in kind.__mro__)


def within(kind: type, rooms: tuple[str, ...]) -> bool:
    """Whether a class is of one of these packages, or is one of them."""
    name = f"{kind.__module__}.{kind.__qualname__}."
    return any(name.startswith(f"{room}.") for room in rooms)


def is_generator(kind: type) -> bool:
    """Whether it is torch's class of generators, or one of virtual GPUs, which replaces that."""
    return any(b.__name__ == "Generator" and b.__module__ == "torch._C" for b in kind.__mro__)


def is_default_generator(generator: Any) -> bool:
    """Whether torch's own functions draw from it."""
    torch = torch_here()
    defaults: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
    return any(generator._cdata == default._cdata for default in defaults)


def refuse(value: Any, kind: type) -> None:
    """Raise `Uncopied` for what a pickle would copy, but into something else."""
    if issubclass(kind, io.IOBase) and kind not in (io.StringIO, io.BytesIO):
        raise Uncopied("an open file", value)
    if within(kind, ("subprocess.Popen", "multiprocessing.process.BaseProcess")):
        raise Uncopied("a process", value)
    if comes_from(kind, "torch.utils.data.dataloader._BaseDataLoaderIter"):
        raise Uncopied("an iterator over a DataLoader", value)
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
    """Whether a copy has copies of the attributes, whatever the class does when it is pickled."""
    if comes_from(kind, SCRIPT_MODULE):
        return False
    if comes_from(kind, *_WHOLE):
        return True
    if not ours and kind.__module__ != "threading":
        return False
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return False
    # Whoever wrote both says how a copy is made.
    return not (defines(kind, "__getstate__") and defines(kind, "__setstate__"))


def defines(kind: type, name: str) -> bool:
    """Whether a class, or one that it comes from except object, has a method of this name."""
    return any(name in vars(base) for base in kind.__mro__ if base is not object)


def solid_base(kind: type) -> type:
    """The class in C that an object's memory begins with (found as `copyreg._reduce_ex` does)."""
    for base in kind.__mro__:
        made_in_python = base.__flags__ & MADE_IN_PYTHON
        new = vars(base).get("__new__")
        if not made_in_python or type(new) is types.BuiltinFunctionType:
            return base
    return object


def slots_of(value: Any) -> dict[tuple[type, str], Any]:
    """What the slots of an object hold, by class and name."""
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
