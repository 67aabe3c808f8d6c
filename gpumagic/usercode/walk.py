"""Walk what the user's values hold, by the types of the objects: no code of theirs runs.

A proxy stays as it is, a file or a database that acts as a mapping is not read, and an object whose
every attribute raises does no harm.
"""

import sys
import types
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from gpumagic.usercode.values import bases_of, defined_in, members_of, own

Step = tuple[str, Any]
"""From a value to one that it holds: ``(".", name)`` or ``("[]", key)``."""
Path = tuple[Any, ...]
"""The path to a value: the variable's name, then a step for each part on the way."""

# Objects without data.
PLAIN = {int, float, complex, bool, str, bytes, type(None), types.ModuleType}
_SEQUENCES = (list, tuple, set, frozenset, deque)
CONTAINERS = (
    *_SEQUENCES,
    # In memory, and no other: to ask a file for its values would read it.
    *(dict, UserDict, ChainMap, types.MappingProxyType),
    *(partial, types.MethodType),
)
# Objects of these libraries hold locks, threads and the notebook itself.
_CLOSED = {*sys.stdlib_module_names, "IPython", "ipykernel", "gpumagic"}


def written(path: Path) -> str:
    """Return a path as a person would write it: ``net.layer.weight``, ``batch['x']``."""
    text = str(path[0])
    for kind, key in path[1:]:
        try:
            text += f".{key}" if kind == "." else f"[{key!r}]"
        except Exception:  # noqa: BLE001  the repr of a user's key
            text += "[…]"
    return text


def items(value: Any, most: int | None = None) -> list[tuple[Step, Any]]:
    """Return what a container holds, or its first parts; empty if all of it is plain."""
    kind = type(value)
    if issubclass(kind, UserDict):
        return items(own(value).get("data"), most)
    if issubclass(kind, ChainMap):
        return [found for each in own(value).get("maps", ()) for found in items(each, most)]
    if issubclass(kind, (dict, types.MappingProxyType)):
        mapping = dict.items(value) if issubclass(kind, dict) else value.items()
        pairs = list(islice(mapping, most))
        return [] if _all_plain(v for _, v in pairs) else [(("[]", k), v) for k, v in pairs]
    for base in _SEQUENCES:
        if issubclass(kind, base):
            held: list[Any] = list(islice(base.__iter__(value), most))
            if _all_plain(held):
                return []
            if names := getattr(kind, "_fields", None):
                return [((".", name), item) for name, item in zip(names, held, strict=False)]
            return [(("[]", n), item) for n, item in enumerate(held)]
    if kind is partial:
        return [((".", name), getattr(value, name)) for name in ("func", "args", "keywords")]
    return [((".", "__self__"), value.__self__)] if kind is types.MethodType else []


def _all_plain(values: Iterable[object]) -> bool:
    # A list of a million numbers is passed over at C speed.
    return set(map(type, values)) <= PLAIN


def attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes: its `__dict__`, and its `__slots__` that are set."""
    held = dict(own(value))
    for slot in slots_of(type(value)):
        with suppress(AttributeError):  # never set
            held[slot.__name__] = slot.__get__(value)
    return held


def slots_of(kind: type) -> list[types.MemberDescriptorType]:
    """Return the `__slots__` of a class and its bases."""
    held = [members_of(base) for base in bases_of(kind)]
    members = [slot for names in held if "__slots__" in names for slot in names.values()]
    return [slot for slot in members if type(slot) is types.MemberDescriptorType]


def is_open(kind: type) -> bool:
    """Whether to look into the attributes of a class's objects."""
    if issubclass(kind, types.SimpleNamespace):
        return True
    # A library may have `abc` make its classes: then their bases tell whose they are.
    homes = [str(defined_in(base)).partition(".")[0] for base in bases_of(kind)]
    home = next((name for name in homes if name not in sys.stdlib_module_names), homes[0])
    return home not in _CLOSED and bool(kind.__dictoffset__ or slots_of(kind))


def walk(
    values: Iterable[tuple[Path, Any]],
    into: Callable[[Any], Iterable[tuple[Step, Any]]],
    *,
    most: int = sys.maxsize,
    depth: int = sys.maxsize,
) -> Iterator[tuple[Path, Any]]:
    """Yield each value once with its path, level by level; at most so many, and so many steps away.

    `into` returns what to go on to: most often `parts_of`, or nothing.
    """
    seen: dict[int, Any] = {}  # keeps what it met alive, so that an id stays its own
    todo = deque(values)
    while todo and len(seen) < most:
        path, value = todo.popleft()
        if id(value) in seen or type(value) in PLAIN:
            continue
        seen[id(value)] = value
        yield path, value
        if len(path) <= depth:
            todo.extend(((*path, step), item) for step, item in into(value))


def parts_of(value: Any) -> list[tuple[Step, Any]]:
    """Return what a container holds, and the attributes of an object that is open."""
    kind = type(value)
    found = items(value) if issubclass(kind, CONTAINERS) else []
    if not issubclass(kind, type) and is_open(kind):
        found += [((".", name), item) for name, item in attributes(value).items()]
    return found
