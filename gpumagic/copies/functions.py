"""How functions and classes of the notebook are made anew.

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
from typing import TYPE_CHECKING, Any

from cloudpickle import cloudpickle  # type: ignore[import-untyped]

from gpumagic.copies import shared_objects
from gpumagic.usercode.variables import globals_of

if TYPE_CHECKING:
    from gpumagic.copies.copier import Copier

# With one of these a function can reach any variable by its name in a text.
_BY_NAME = {"eval", "exec", "globals", "vars", "locals", "get_ipython"}


def is_notebook(space: dict[str, Any]) -> bool:
    """Whether globals are a notebook's, or a script's that %run ran: those keep their own."""
    return space.get("__name__") == "__main__"


def is_importable(value: Any) -> bool:
    """Whether a function or class is found by its name in its module."""
    found: Any = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def own_code(code: types.CodeType) -> types.CodeType:
    """The same code as an object of its own, with that of the functions which it defines.

    torch.compile keeps what it makes with the code, and writes its names into the globals of the
    function that it met first: any other with the same code would look for them in vain.
    """
    consts = (own_code(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=tuple(consts))


def reduce_function(copier: "Copier", function: types.FunctionType) -> Any:
    """How a pickle makes a function anew; the variables that it reads come along."""
    read = _read_by(function) if copier.is_notebooks(function) else {}
    if function.__globals__ is copier.namespace:
        copier.met.update(read)
    state = (function.__defaults__, function.__kwdefaults__, vars(function), read)
    args = (copier, copier.keep(function), function.__closure__)
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


def _new_function(copier: "Copier", index: int, cells: Any) -> Any:
    old = copier.original(index)

    def make() -> types.FunctionType:
        space = copier.space(old.__globals__)
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

    return copier.once(index, make)


def _set_function(function: types.FunctionType, state: Any) -> None:
    function.__defaults__, function.__kwdefaults__, held, read = state
    vars(function).update(held)
    if read:
        function.__globals__.update(read)


def _reduce_cell(copier: "Copier", cell: types.CellType) -> Any:
    args = (copier, copier.keep(cell))
    try:
        contents = cell.cell_contents
    except ValueError:  # not bound yet
        return _new_cell, args
    copier.met[f"(closure {len(copier.met)})"] = contents
    return _new_cell, args, (contents,), None, None, _set_cell


def _new_cell(copier: "Copier", index: int) -> Any:
    return copier.once(index, types.CellType)


def _set_cell(cell: types.CellType, state: tuple[Any]) -> None:
    (cell.cell_contents,) = state


def _reduce_cached(copier: "Copier", cached: Any) -> Any:
    held = dict(vars(cached))
    inner = held.pop("__wrapped__")
    copier.notes[f"{cached.__name__}: copied with an empty cache"] = None
    args = (copier, copier.keep(cached), inner)
    return _new_cached, args, held, None, None, _set_attributes


def _new_cached(copier: "Copier", index: int, inner: Any) -> Any:
    options = copier.original(index).cache_parameters()
    return copier.once(index, lambda: functools.lru_cache(**options)(inner))


def _set_attributes(value: Any, held: dict[str, Any]) -> None:
    vars(value).update(held)


def reduce_class(copier: "Copier", kind: type) -> Any:
    """How a pickle makes a class anew."""
    if issubclass(kind, enum.Enum):
        make, args, state, *rest, fill = cloudpickle._dynamic_class_reduce(kind)
        # cloudpickle hands back the original class to who passes its identity.
        identity = cloudpickle._get_or_create_tracker_id(kind)
        args = tuple(None if a == identity else a for a in args)
        return _new_enum, (copier, copier.keep(kind), make, *args), state, *rest, fill
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
    args = (copier, copier.keep(kind), type(kind), kind.__bases__)
    return _new_class, args, (copier, held, registered), None, None, _set_class


def _new_enum(copier: "Copier", index: int, make: Callable[..., type], *args: Any) -> Any:
    return copier.once(index, lambda: make(*args))


def _new_class(copier: "Copier", index: int, meta: Any, bases: tuple[type, ...]) -> Any:
    old = copier.original(index)

    def make() -> type:
        space = {"__module__": old.__module__, "__qualname__": old.__qualname__}
        for name in ("__slots__", "__orig_bases__"):  # what type.__new__ and Generic ask for
            if name in vars(old):
                space[name] = vars(old)[name]
        maker: Any = next(m for m in meta.__mro__ if not copier.is_ours(m) and "__new__" in vars(m))
        made: type = maker.__new__(meta, old.__name__, bases, space)
        return made

    return copier.once(index, make)


def _set_class(kind: type, state: Any) -> None:
    copier, held, registered = state
    for name, item in held.items():
        if name == "__init_subclass__":
            copier.later.append(functools.partial(type.__setattr__, kind, name, item))
        else:
            type.__setattr__(kind, name, item)
    for subclass in registered:
        abc.ABCMeta.register(kind, subclass)  # type: ignore[arg-type]


REDUCERS: dict[type, Callable[["Copier", Any], Any]] = {
    types.FunctionType: reduce_function,
    types.CellType: _reduce_cell,
    shared_objects.CACHED: _reduce_cached,
}
