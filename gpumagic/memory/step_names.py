"""Name the step from an object to each that it refers to: ``.weight``, ``[3]``, ``: frame step``.

Only what C keeps is read: no property and no other code of the user's runs.
"""

import asyncio
import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from inspect import CO_OPTIMIZED
from typing import Any

from gpumagic.memory.references import References, ndarray, objects_in
from gpumagic.usercode.values import bases_of, class_name, members_of, own

Named = Iterable[tuple[Any, str]]
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))
_MODULE_STATE = ("_parameters", "_buffers", "_modules")
_CACHED = type(functools.lru_cache(str))
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
KeyName = Callable[[Any], str]


class StepNames:
    """Names the steps from objects of a walk."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._known: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}

    def of(self, obj: Any, owner: Any, key_name: KeyName) -> dict[int, str]:
        """Return the step to each object that `obj` refers to, by id. `owner` refers to `obj`;
        `key_name` writes a key that is no plain value, such as a parameter."""
        found: dict[int, str] = {}
        for child, step in self._named(obj, owner, key_name):
            found.setdefault(id(child), step)
        return found

    def _named(self, obj: Any, owner: Any, key_name: KeyName) -> Iterator[tuple[Any, str]]:
        kind = type(obj)
        if id(kind) not in self._known:
            self._known[id(kind)] = _named_by(kind, self._references), _members(kind)
        named, members = self._known[id(kind)]
        if named is _items:
            yield from _items(obj, owner, key_name)
        elif named is not None:
            yield from named(obj, owner)
        if not _is_one_of(kind, _WHOLE):
            yield from _attributes(obj, kind, members)
        if kind is _CACHED:
            yield from ((child, ".<cache>") for child in gc.get_referents(obj))


def _is_one_of(kind: type, kinds: tuple[type, ...]) -> bool:
    return any(kind is each for each in kinds)  # a metaclass may define what is equal


def _members(kind: type) -> list[tuple[str, Any]]:
    """Return the slots of a class, and C's own members."""
    # Not what C computes when it is asked: a node of a graph would unpack what it saved.
    return [
        (name, member.__get__)
        for base in bases_of(kind)
        for name, member in members_of(base).items()
        if type(member) is types.MemberDescriptorType
    ]


def _items(items: dict[Any, Any], owner: Any, key_name: KeyName) -> Iterator[tuple[Any, str]]:
    kind = type(owner)
    attributes = _is_own(owner, items)
    part = issubclass(kind, dict) and _is_module_state(owner, items)
    for key, value in dict.items(items):
        if attributes:
            yield value, "" if _is_module_state(items, value) else f".{key}"
        elif part:
            yield value, f"[{key}]" if str.isdigit(key) else f".{key}"
        elif issubclass(kind, types.FunctionType) and owner.__kwdefaults__ is items:
            yield value, f".<default> {key}"
        else:
            yield value, f"[{_key(key, key_name)}]"
    for key in dict.keys(items):
        if not _is_one_of(type(key), _PLAIN_KEYS):
            yield key, ".<key>"


def _key(key: Any, key_name: KeyName) -> str:
    parts = key if type(key) is tuple else (key,)
    if all(_is_one_of(type(part), _PLAIN_KEYS) for part in parts):
        return repr(key)
    return key_name(key)


def _is_own(owner: Any, items: dict[Any, Any]) -> bool:
    """Whether a dictionary is where `owner` keeps its attributes."""
    kind = type(owner)
    if issubclass(kind, type):
        return any(child is items for child in gc.get_referents(members_of(owner)))
    return own(owner) is items


def _is_module_state(attributes: Any, items: Any) -> bool:
    return any(dict.get(attributes, name) is items for name in _MODULE_STATE)


def _sequence(items: Any, owner: Any) -> Iterator[tuple[Any, str]]:
    base = next(base for base in (list, tuple, deque) if issubclass(type(items), base))
    values: list[Any] = list(base.__iter__(items))
    if issubclass(type(owner), types.FunctionType):
        code = owner.__code__
        if items is owner.__closure__:
            names = [f".<closure> {name}" for name in code.co_freevars]
        else:
            arguments = code.co_varnames[: code.co_argcount]
            names = [f".<default> {name}" for name in arguments[-len(values) :]]
    else:
        fields: Any = members_of(type(items)).get("_fields")
        named = base is tuple and type(fields) is tuple and len(fields) == len(values)
        names = (
            [f".{field}" for field in fields] if named else [f"[{n}]" for n in range(len(values))]
        )
    yield from zip(values, names, strict=False)


def _cell(cell: types.CellType, owner: Any) -> Named:
    try:
        return [(cell.cell_contents, "")]
    except ValueError:  # not bound yet
        return []


def _frame(frame: types.FrameType, owner: Any) -> Iterator[tuple[Any, str]]:
    for name, value in local_variables(frame).items():
        yield value, f", {name}"
    if frame.f_back is not None:
        yield frame.f_back, _frame_step(frame.f_back)


def _frame_step(frame: types.FrameType) -> str:
    return f": frame {frame.f_code.co_name}"


def _generator(generator: Any, owner: Any) -> Iterator[tuple[Any, str]]:
    prefix = next(p for p in ("gi", "cr", "ag") if hasattr(type(generator), f"{p}_frame"))
    frame = getattr(generator, f"{prefix}_frame")
    if frame is not None:
        for name, value in local_variables(frame).items():
            yield value, f"{_frame_step(frame)}, {name}"
        inner = "yieldfrom" if prefix == "gi" else "await"
        yield getattr(generator, f"{prefix}_{inner}"), ""


def _exception(obj: Any, owner: Any) -> Iterator[tuple[Any, str]]:
    if type(obj) is types.TracebackType:
        yield obj.tb_frame, _frame_step(obj.tb_frame)
        yield obj.tb_next, ""
        return
    base = vars(BaseException)
    yield base["__traceback__"].__get__(obj), ""
    for name in ("__cause__", "__context__"):
        origin = base[name].__get__(obj)
        yield origin, f", from the {class_name(type(origin))}"
    yield base["args"].__get__(obj), ".args"


def _function(function: Any, owner: Any) -> Named:
    # Their items are named by what they are to the function.
    return [
        (getattr(function, name), "") for name in ("__closure__", "__defaults__", "__kwdefaults__")
    ]


def _array(array: Any, owner: Any) -> Named:
    return [(child, f".flat[{n}]") for n, child in enumerate(objects_in(array))]


def _attributes(obj: Any, kind: type, members: list[tuple[str, Any]]) -> Iterator[tuple[Any, str]]:
    """Yield an object's attributes: from its dictionary, its slots, and C's own members."""
    if issubclass(kind, type):
        for held in gc.get_referents(members_of(obj)):
            yield held, ""
    else:
        yield kind, ".__class__"
        held = own(obj)
        yield held, ""
        for name, value in held.items():
            yield value, f".{name}"
    for name, get in members:
        try:
            yield get(obj), f".{name}"
        except AttributeError:  # not set
            continue


_NAMED: tuple[tuple[Any, Any], ...] = (
    (dict, _items),
    ((list, tuple, deque), _sequence),
    (types.CellType, _cell),
    (types.FrameType, _frame),
    (types.FunctionType, _function),
    (asyncio.Task, lambda task, owner: [(asyncio.Task.get_coro(task), "")]),
    (_GENERATORS, _generator),
    ((BaseException, types.TracebackType), _exception),
)


def _named_by(kind: type, references: References) -> Any:
    """Return the function that names a class's references other than attributes, if any."""
    if (edges := references.edges(kind)) is not None:
        return lambda obj, owner: edges(obj)
    named = (*_NAMED, (ndarray(), _array))
    return next((name for base, name in named if issubclass(kind, base)), None)


# These have no attributes.
_WHOLE = (dict, list, tuple, deque, types.CellType, types.FrameType)


def local_variables(frame: types.FrameType) -> dict[str, Any]:
    """Return the names of a frame, without making the frame keep more than before."""
    seen = frame.f_locals
    names = dict(seen)
    # Until Python 3.13 a frame keeps the dictionary that it was asked for; `locals()` of the
    # user's own is that dictionary, too, and is then held by somebody else.
    if type(seen) is dict and frame.f_code.co_flags & CO_OPTIMIZED:
        held_by_frame_and_us = 3
        if sys.getrefcount(seen) <= held_by_frame_and_us:
            seen.clear()
    return names
