"""Make functions and classes of the notebook anew.

A copy of a function has the same code and copies as its globals, closure and defaults; a copy of a
class has copies of the methods. No `__init_subclass__` and no metaclass of the notebook runs again.
"""

import abc
import enum
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from cloudpickle import cloudpickle  # type: ignore[import-untyped]

from gpumagic.copies import shared_objects
from gpumagic.copies.originals import Originals
from gpumagic.usercode.compile import own_code
from gpumagic.usercode.variables import globals_of

# With one of these a function can reach any variable by its name in a text.
_BY_NAME = {"eval", "exec", "globals", "vars", "locals", "get_ipython"}


def reduce_function(originals: Originals, function: types.FunctionType) -> Any:
    """How a pickle makes a function anew; the variables that it reads come along."""
    read = _read_by(function) if originals.is_notebooks(function) else {}
    if function.__globals__ is originals.namespace:
        originals.met.update(read)
    state = (function.__defaults__, function.__kwdefaults__, vars(function), read)
    args = (originals, originals.number(function), function.__closure__)
    return _new_function, args, state, None, None, _set_function


def _read_by(function: types.FunctionType) -> dict[str, Any]:
    names = set(globals_of(function.__code__))
    if names & _BY_NAME:
        names |= set(_words(function.__code__))
    space = function.__globals__
    return {name: space[name] for name in names if name in space and name != "__builtins__"}


def _words(code: types.CodeType) -> Iterator[str]:
    """The names in the texts of a function."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield from re.findall(r"\w+", constant)
        elif isinstance(constant, types.CodeType):
            yield from _words(constant)


def _new_function(originals: Originals, number: int, cells: Any) -> Any:
    old = originals[number]

    def make() -> types.FunctionType:
        space = originals.space(old.__globals__)
        code = old.__code__ if space is old.__globals__ else own_code(old.__code__)
        new = types.FunctionType(code, space, old.__name__, None, cells)
        new.__qualname__, new.__doc__ = old.__qualname__, old.__doc__
        new.__module__ = old.__module__
        for name in ("__annotate__", "__type_params__"):
            if getattr(old, name, None):
                setattr(new, name, getattr(old, name))
        if sys.version_info < (3, 14):
            new.__annotations__ = dict(old.__annotations__)
        return new

    return originals.once(number, make)


def _set_function(function: types.FunctionType, state: Any) -> None:
    function.__defaults__, function.__kwdefaults__, held, read = state
    vars(function).update(held)
    if read:
        function.__globals__.update(read)


def _reduce_cell(originals: Originals, cell: types.CellType) -> Any:
    args = (originals, originals.number(cell))
    try:
        contents = cell.cell_contents
    except ValueError:  # not bound yet
        return _new_cell, args
    originals.met[f"(closure {len(originals.met)})"] = contents
    return _new_cell, args, (contents,), None, None, _set_cell


def _new_cell(originals: Originals, number: int) -> Any:
    return originals.once(number, types.CellType)


def _set_cell(cell: types.CellType, state: tuple[Any]) -> None:
    (cell.cell_contents,) = state


def _reduce_cached(originals: Originals, cached: Any) -> Any:
    held = dict(vars(cached))
    inner = held.pop("__wrapped__")
    originals.notes[f"{cached.__name__}: copied with an empty cache"] = None
    args = (originals, originals.number(cached), inner)
    return _new_cached, args, held, None, None, _set_attributes


def _new_cached(originals: Originals, number: int, inner: Any) -> Any:
    options = originals[number].cache_parameters()
    return originals.once(number, lambda: functools.lru_cache(**options)(inner))


def _set_attributes(value: Any, held: dict[str, Any]) -> None:
    vars(value).update(held)


def reduce_class(originals: Originals, kind: type) -> Any:
    """How a pickle makes a class anew."""
    if issubclass(kind, enum.Enum):
        make, args, state, *rest, fill = cloudpickle._dynamic_class_reduce(kind)
        # cloudpickle hands back the original class to who passes its identity.
        identity = cloudpickle._get_or_create_tracker_id(kind)
        args = tuple(None if a == identity else a for a in args)
        return _new_enum, (originals, originals.number(kind), make, *args), state, *rest, fill
    held = {
        name: item
        for name, item in vars(kind).items()
        if name not in ("__module__", "__qualname__", "__slots__", "_abc_impl")
        and getattr(item, "__objclass__", None) is not kind  # what type.__new__ makes by itself
    }
    registered = []
    if "_abc_impl" in vars(kind):
        references = abc._get_dump(kind)[0]  # type: ignore[attr-defined]
        registered = [r() for r in references if r() is not None]
    args = (originals, originals.number(kind), type(kind), kind.__bases__)
    return _new_class, args, (originals, held, registered), None, None, _set_class


def _new_enum(originals: Originals, number: int, make: Callable[..., type], *args: Any) -> Any:
    return originals.once(number, lambda: make(*args))


def _new_class(originals: Originals, number: int, meta: Any, bases: tuple[type, ...]) -> Any:
    old = originals[number]

    def make() -> type:
        space = {"__module__": old.__module__, "__qualname__": old.__qualname__}
        for name in ("__slots__", "__orig_bases__"):  # what type.__new__ and Generic ask for
            if name in vars(old):
                space[name] = vars(old)[name]
        maker: Any = next(
            m for m in meta.__mro__ if not originals.is_ours(m) and "__new__" in vars(m)
        )
        made: type = maker.__new__(meta, old.__name__, bases, space)
        return made

    return originals.once(number, make)


def _set_class(kind: type, state: Any) -> None:
    originals, held, registered = state
    for name, item in held.items():
        if name == "__init_subclass__":
            originals.later.append(functools.partial(type.__setattr__, kind, name, item))
        else:
            type.__setattr__(kind, name, item)
    for subclass in registered:
        abc.ABCMeta.register(kind, subclass)  # type: ignore[arg-type]


REDUCERS: dict[type, Callable[[Originals, Any], Any]] = {
    types.FunctionType: reduce_function,
    types.CellType: _reduce_cell,
    shared_objects.CACHED: _reduce_cached,
}
