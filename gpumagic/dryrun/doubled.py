"""Which of the user's objects can change, and which are the process's own."""

import enum
import functools
import types

import torch

ATOMS = (
    *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.MappingProxyType),
    *(type, property, staticmethod, classmethod, torch.device, torch.dtype, torch.Size),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType),
    *(BaseException, enum.Enum),
)
RESTARTED: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})))
# Plain Python objects of these are the process's own: a copy would be another process's.
SHARED = (
    *("threading", "asyncio", "logging", "IPython", "ipykernel", "ipywidgets", "traitlets", "zmq"),
    *("tornado", "concurrent", "multiprocessing", "socket", "selectors", "enum", "typing", "abc"),
    *("pathlib", "re", "inspect", "importlib", "contextvars", "weakref", "matplotlib", "tqdm"),
    *("builtins", "types", "_thread", "gpumagic", "warnings", "decimal", "datetime", "uuid"),
)
SMALL_ARRAY = 16 * 2**20
CACHED = type(functools.lru_cache(str))


ATOM_SET = frozenset(ATOMS)


def is_plain(kind: type) -> bool:
    """Whether an object's state is its attributes, and its items as a list, dict, set or tuple."""
    base = next((b for b in (list, dict, set, tuple) if issubclass(kind, b)), object)
    try:
        base.__new__(kind)  # refused where C code keeps a state of its own
    except TypeError:
        return False
    return True
