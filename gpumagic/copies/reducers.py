"""Recreate the notebook's functions, classes and objects, without calling their methods.

A copied function has the same code, with copies as its globals, closure and defaults. A copied
class has copies of the methods. No `__init_subclass__` and no metaclass of the notebook runs again.
"""

import functools
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from gpumagic.copies import memo
from gpumagic.copies.memo import Memo
from gpumagic.usercode.program import own_code
from gpumagic.usercode.values import comes_from, globals_of, own, torch_here

# With one of these a function can reach any variable by its name in a string.
_BY_NAME = {"eval", "exec", "globals", "vars", "locals", "get_ipython"}


# -- functions
def _reduce_function(originals: Memo, function: types.FunctionType) -> Any:
    read = _read_by(function) if originals.is_notebooks(function) else {}
    if function.__globals__ is originals.namespace:
        originals.met.update(read)
    made = originals.recreate(function, _new_function, originals, function.__closure__)
    state = (function.__defaults__, function.__kwdefaults__, vars(function), read)
    return *made, state, None, None, _set_function


def _read_by(function: types.FunctionType) -> dict[str, Any]:
    names = set(globals_of(function.__code__))
    if names & _BY_NAME:
        names |= set(_words(function.__code__))
    space = function.__globals__
    return {name: space[name] for name in names if name in space and name != "__builtins__"}


def _words(code: types.CodeType) -> Iterator[str]:
    """Return the names in the strings of a function."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield from re.findall(r"\w+", constant)
        elif isinstance(constant, types.CodeType):
            yield from _words(constant)


def _new_function(old: types.FunctionType, originals: Memo, cells: Any) -> Any:
    space = originals.space(old.__globals__)
    code = old.__code__ if space is old.__globals__ else own_code(old.__code__)
    new = types.FunctionType(code, space, old.__name__, None, cells)
    annotations = "__annotate__" if hasattr(old, "__annotate__") else "__annotations__"
    for name in ("__qualname__", "__doc__", "__module__", "__type_params__", annotations):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    return new


def _set_function(function: types.FunctionType, state: Any) -> None:
    function.__defaults__, function.__kwdefaults__, held, read = state
    vars(function).update(held)
    if read:
        function.__globals__.update(read)


def _reduce_cell(originals: Memo, cell: types.CellType) -> Any:
    made = originals.recreate(cell, lambda old: types.CellType())
    try:
        contents = cell.cell_contents
    except ValueError:  # not bound yet
        return made
    originals.met[f"(closure {len(originals.met)})"] = contents
    return *made, (contents,), None, None, _set_cell


def _set_cell(cell: types.CellType, state: tuple[Any]) -> None:
    (cell.cell_contents,) = state


def _reduce_cached(originals: Memo, cached: Any) -> Any:
    held = dict(vars(cached))
    originals.notes[f"{cached.__name__}: copied with an empty cache"] = None
    made = originals.recreate(cached, _new_cached, held.pop("__wrapped__"))
    return *made, held


def _new_cached(old: Any, function: Any) -> Any:
    return functools.lru_cache(**old.cache_parameters())(function)


def reduce_jitted(originals: Memo, function: Any) -> Any:
    """Return how pickle recreates a compiled function of JAX: it is compiled again."""
    made = originals.recreate(function, _new_jitted)
    return *made, (function.__getstate__(), vars(function)), None, None, _set_jitted


def _new_jitted(old: Any) -> Any:
    kind: Any = type(old)
    return kind.__new__(kind)


def _set_jitted(function: Any, state: Any) -> None:
    made, held = state
    function.__setstate__(made)
    vars(function).update(held)


# -- classes
def reduce_class(originals: Memo, kind: type) -> Any:
    """Return how pickle recreates a class."""
    held = {
        name: item
        for name, item in vars(kind).items()
        if name not in ("__module__", "__qualname__", "__slots__", "_abc_impl")
        and getattr(item, "__objclass__", None) is not kind  # created by type.__new__
    }
    made = originals.recreate(kind, _new_class, originals, type(kind), kind.__bases__)
    return *made, (originals, held), None, None, _set_class


def _new_class(old: type, originals: Memo, meta: Any, bases: tuple[type, ...]) -> Any:
    space = {"__module__": old.__module__, "__qualname__": old.__qualname__}
    for name in ("__slots__", "__orig_bases__"):  # required by type.__new__ and Generic
        if name in vars(old):
            space[name] = vars(old)[name]
    maker: Any = next(m for m in meta.__mro__ if not originals.is_ours(m) and "__new__" in vars(m))
    return maker.__new__(meta, old.__name__, bases, space)


def _set_class(kind: type, state: Any) -> None:
    originals, held = state
    for name, item in held.items():
        if name == "__init_subclass__":
            originals.later.append(functools.partial(type.__setattr__, kind, name, item))
        else:
            type.__setattr__(kind, name, item)


# -- other objects
# Read by the base's methods: the notebook's are not called.
_ITEMS: dict[type, Callable[[Any], Any]] = {
    object: lambda value: None,
    list: lambda value: list(list.__iter__(value)),
    set: lambda value: list(set.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: tuple(frozenset.__iter__(value)),
}


def reduce_instance(originals: Memo, value: Any, kind: type) -> Any:
    """Return how pickle recreates an object; NotImplemented for the class's own way."""
    if memo.is_generator(kind):
        return originals.recreate(value, _new_generator)
    base, held = memo.solid_base(kind), own(value)
    given: tuple[Any, ...] = ()
    slots: dict[tuple[type, str], Any] = {}
    items, ours = None, originals.is_ours(kind)
    if comes_from(kind, "torch.utils.data.DataLoader"):
        # Running workers stay the notebook's; a copy starts its own.
        base, held = object, {**held, "_iterator": None}
    elif issubclass(kind, BaseException):
        given = value.args
    elif base in _ITEMS and memo.by_attributes(kind, ours):
        slots, items = memo.slots_of(value), _ITEMS[base](value)
        if base in (tuple, frozenset):
            given, items = (items,), None
    else:
        return NotImplemented
    made = originals.recreate(value, _new_instance, kind, base, *given)
    return *made, (originals, held, slots, items), None, None, _set_instance


def _new_instance(old: Any, kind: type, base: Any, *args: Any) -> Any:
    return base.__new__(kind, *args)


def _set_instance(value: Any, state: Any) -> None:
    originals, held, slots, items = state
    if items is not None:
        base: Any = memo.solid_base(type(value))
        (list.extend if base is list else base.update)(value, items)
    if held:
        object.__getattribute__(value, "__dict__").update(held)
    for (owner, name), item in slots.items():
        vars(owner)[name].__set__(value, item)
    if comes_from(type(value), "torch.nn.RNNBase"):
        # cuDNN needs a recurrent layer's weights contiguous, as after Module.to.
        originals.later.append(value.flatten_parameters)


def _new_generator(old: Any) -> Any:
    made = torch_here().Generator(old.device)
    made.set_state(old.get_state())
    return made


def _reduce_reference(originals: Memo, reference: Any) -> Any:
    target, callback = reference(), reference.__callback__
    return originals.recreate(reference, _new_reference, originals, target, callback)


def _new_reference(old: Any, originals: Memo, target: Any, callback: Any) -> Any:
    originals.alive.append(target)
    return old if target is None else weakref.ref(target, callback)


def _reduce_lock(originals: Memo, lock: Any) -> Any:
    if getattr(lock, "_is_owned", bool)() or not lock.acquire(blocking=False):
        raise memo.Uncopied("a lock that is held", lock)
    lock.release()
    return (threading.Lock if type(lock) is memo.LOCKS[0] else threading.RLock), ()


REDUCERS: dict[type, Callable[[Memo, Any], Any]] = {
    types.FunctionType: _reduce_function,
    types.CellType: _reduce_cell,
    memo.CACHED: _reduce_cached,
    weakref.ref: _reduce_reference,
    **dict.fromkeys(memo.LOCKS, _reduce_lock),
}
