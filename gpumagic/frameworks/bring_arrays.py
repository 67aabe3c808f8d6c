"""Bring arrays that variables hold to a device: each is copied, for most cannot move themselves.

Guarantees: what two names or containers share they share afterwards; lists, dicts and objects stay
the objects that they are; and nothing is changed before all copies have been made.
"""

import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpumagic.device import CPU, Device
from gpumagic.device import here as devices_here
from gpumagic.errors import GpuError
from gpumagic.frameworks.framework import Framework
from gpumagic.moving.moved import Left, Moved, Moves, all_of
from gpumagic.usercode.values import defined_in, own

_DICTS = (dict, defaultdict, OrderedDict)
_CAPTURED = "a function has captured it: give it as an argument, or make it in this cell"


@dataclass
class _Found:
    """The arrays of one variable that are elsewhere, and where."""

    name: str
    arrays: list[Any] = field(default_factory=list)
    sources: dict[str, None] = field(default_factory=dict)


def bring_all(
    framework: Framework,
    variables: Iterable[tuple[str, Any]],
    device: Device,
    namespace: dict[str, Any],
    wanted: Callable[[Any], bool] = lambda array: True,
    brought: list[Any] | None = None,
) -> Moves:
    """Bring the arrays of these variables to `device`, binding names of `namespace` anew.

    Only those that are `wanted`. The copies are put into `brought`.
    """
    start = time.perf_counter()
    there, copies, moved = str(device), dict[int, Any](), list[Moved]()
    left: list[Left] = []
    kept: list[tuple[str, Any]] = []
    for name, value in variables:
        found = _Found(name)
        _replaced(value, framework, partial(_note, framework, there, found), {})
        elsewhere = {id(array): array for array in found.arrays if wanted(array)}
        if not elsewhere:
            continue
        if name not in namespace:
            left.append(Left(name, _CAPTURED))
            continue
        new = {key: array for key, array in elsewhere.items() if key not in copies}
        try:
            copies |= {key: (array, framework.bring(array, device)) for key, array in new.items()}
        except GpuError as error:  # what is to stay, such as an array in parts on several devices
            left.append(Left(name, str(error)))
            continue
        kept.append((name, value))
        if new:  # bytes that two variables share count once, for the first
            nbytes = sum(framework.nbytes(array) for array in new.values())
            moved.append(Moved(name, nbytes, tuple(found.sources)))
    _bind(kept, framework, copies, namespace)
    for old, new in copies.values():
        _remember(framework, old, new)
    if brought is not None:
        brought += [new for _, new in copies.values()]
    if copies:
        framework.wait()
    return Moves(tuple(moved), tuple(left), time.perf_counter() - start if moved else 0.0)


def _bind(
    variables: list[tuple[str, Any]],
    framework: Framework,
    copies: dict[int, Any],
    namespace: dict[str, Any],
) -> None:
    """Have variables hold the copies."""
    seen: dict[int, Any] = {}
    for name, value in variables:
        made = _replaced(value, framework, lambda a: copies.get(id(a), (a, a))[1], seen)
        if made is not value:
            namespace[name] = made


def _note(framework: Framework, there: str, found: _Found, array: Any) -> Any:
    if (where := framework.where(array)) != there:
        found.arrays.append(array)
        found.sources.setdefault(where)
    return array


def _replaced(
    value: Any, framework: Framework, new: Callable[[Any], Any], seen: dict[int, Any]
) -> Any:
    """`value` with `new` of each array in it: the same object, unless it cannot be changed.

    `seen` has what became of each object, so that what was shared stays so, and circles end.
    """
    if id(value) in seen:
        return seen[id(value)][1]
    kind = type(value)
    if framework.is_array(value):
        made = new(value)
    elif kind is list or kind in _DICTS:
        seen[id(value)] = value, value
        made = _in_place(value, framework, new, seen)
    elif issubclass(kind, tuple):
        parts = [_replaced(part, framework, new, seen) for part in value]
        made = value if _same(parts, value) else _tuple_of(kind, parts)
    elif (split := framework.parts(value)) is not None:
        seen[id(value)] = value, value  # what is changed in place may hold itself
        parts = [_replaced(part, framework, new, seen) for part in split[0]]
        made = value if _same(parts, split[0]) else split[1](parts)
    elif defined_in(kind) == "__main__" and not issubclass(kind, type):
        seen[id(value)] = value, value
        _in_place(own(value), framework, new, seen)
        made = value
    else:
        return value
    seen[id(value)] = value, made  # the value too, so that its id stays its own
    return made


def _in_place(
    held: Any, framework: Framework, new: Callable[[Any], Any], seen: dict[int, Any]
) -> Any:
    for key, part in list(held.items() if isinstance(held, dict) else enumerate(held)):
        made = _replaced(part, framework, new, seen)
        if made is not part:
            held[key] = made
    return held


def _same(parts: Iterable[Any], before: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(parts, before, strict=True))


def _tuple_of(kind: type, parts: list[Any]) -> Any:
    return kind._make(parts) if hasattr(kind, "_make") else kind(parts)


# By the id of a copy that a cell brought: the copy, and where what it was made of was.
_origins: dict[int, tuple["weakref.ref[Any]", str]] = {}


def _remember(framework: Framework, old: Any, new: Any) -> None:
    key, source = id(new), framework.where(old)
    if (before := _origins.pop(id(old), None)) and before[0]() is old:
        source = before[1]  # brought on: at home is where it was first
    if source != framework.where(new):
        with suppress(TypeError):  # an array that cannot be referred to weakly
            _origins[key] = weakref.ref(new, lambda _: _origins.pop(key, None)), source


def bring_home(
    framework: Framework, namespace: dict[str, Any], only: Iterable[Any] | None = None
) -> Moves:
    """Bring what cells brought elsewhere, or `only` these arrays, back to where they were."""
    ids = None if only is None else {id(array) for array in only}
    devices = {str(device): device for device in [CPU, *devices_here(memory=False)]}
    made: list[Moves] = []
    for source in dict.fromkeys(where for _, where in list(_origins.values())):
        if source not in devices:
            continue

        def is_away(array: Any, source: str = source) -> bool:
            held = _origins.get(id(array))
            away = held is not None and held[0]() is array and held[1] == source
            return away and (ids is None or id(array) in ids)

        variables = [(n, value) for n, value in list(namespace.items()) if n[0] != "_"]
        made.append(bring_all(framework, variables, devices[source], namespace, is_away))
    return all_of(made)
