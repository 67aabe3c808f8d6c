"""Move arrays that cannot move in place: copy them, and replace them wherever variables hold them.

Guarantees: names and containers that shared an array share the copy; lists, dicts and objects stay
the same objects; nothing changes before all copies are made.
"""

import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from gpumagic.device import CPU, Device
from gpumagic.device import here as devices_here
from gpumagic.faults import first_line
from gpumagic.frameworks.framework import Framework
from gpumagic.moving.moved import Left, Moved, Moves, Origin, keep_origins
from gpumagic.usercode.values import defined_in, own

_DICTS = (dict, defaultdict, OrderedDict)
_CAPTURED = "a function has captured it: give it as an argument, or make it in this cell"

_origins: dict[tuple[str, str], Origin] = {}
"""Origins of variables that cells moved for good, by the framework's and the variable's name."""


def forget_origins() -> None:
    """Forget all origins: moved variables count as at home where they are."""
    _origins.clear()


class ArrayFramework(Framework):
    """Move variables of a framework by replacing their arrays with copies."""

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        """Return a copy on another device, the array itself if it is there, or GpuError.

        JAX itself may move an array that is not `committed`.
        """
        raise NotImplementedError

    def move(
        self,
        variables: Iterable[tuple[str, Any]],
        device: Device,
        namespace: dict[str, Any],
        origins: list[tuple[Any, Origin]],
        *,
        back: bool = False,
        line: Callable[[], Any] | None = None,
    ) -> Moves:
        """Copy the arrays of these variables to `device`, and rebind their names in `namespace`.

        An array that cannot be copied stays, with the others of its variable.
        """
        moving = _Moving(self)
        for name, value in variables:
            found = _look(name, value, self, str(device))
            if found.arrays and name not in namespace:
                moving.left.append(Left(name, _CAPTURED))
            elif found.arrays and moving.copy(found, lambda array: self.bring(array, device)):
                committed = any(getattr(array, "committed", True) for array in found.arrays)
                originals = moving.originals(found, kept=back)
                source = next(iter(found.sources))
                origin = Origin(name, source, str(device), "", type(value), committed, originals)
                origins.append(((self.name, name), origin))
                moving.found.append((name, value))
        return moving.finish(moving.found, namespace)

    def remember(self, origins: Iterable[tuple[Any, Origin]], cell: str) -> None:
        """Keep the origin of each variable from before the first cell that moved it."""
        keep_origins(_origins, origins, cell)

    def home(
        self, namespace: dict[str, Any], origins: list[tuple[Any, Origin]] | None = None
    ) -> Moves:
        """Move the present values of the moved variables, also new ones, back to where they were.

        So are the copies of a moved variable that others hold. An unchanged copy is replaced by
        its original, if its origin has that.
        """
        devices = {str(device): device for device in [CPU, *devices_here(memory=False)]}
        wanted = [(k, o) for k, o in _origins.items() if k[0] == self.name]
        wanted = [(k, o) for k, o in origins or wanted if o.device in devices]
        known: dict[int, tuple[Any, Any, Any]]
        known = {key: (*pair, o) for _, o in wanted for key, pair in o.originals.items()}
        moving = _Moving(self)

        def bring(array: Any, origin: Origin) -> Any:
            copy, original, _ = known.get(id(array), (None, None, origin))
            if original is not None and copy() is array:
                return original
            return self.bring(array, devices[origin.device], committed=origin.committed)

        for (_, name), origin in wanted:
            value = namespace.get(name)
            if type(value) is origin.kind:
                found = _look(name, value, self, origin.device)
                moving.copy(found, partial(bring, origin=origin))
        variables = [(n, v) for n, v in namespace.items() if n[0] != "_"]
        for name, value in variables:
            for array in _look(name, value, self, "").arrays:
                copy, _, came = known.get(id(array), (None, None, None))
                if copy is not None and copy() is array:
                    one = _Found(name, [array], {self.where(array): None})
                    moving.copy(one, partial(bring, origin=came))
        moves = moving.finish(variables, namespace)
        for key, _ in wanted if origins is None else ():
            del _origins[key]
        return moves

    def away(self, namespace: Mapping[str, Any]) -> list[str]:
        """Return the variables that are, or hold, arrays on a GPU."""
        variables = [(name, value) for name, value in namespace.items() if name[0] != "_"]
        return [name for name, value in variables if _look(name, value, self, "cpu").arrays]


@dataclass
class _Found:
    """Keep the arrays of one variable that are on other devices, and these devices."""

    name: str
    arrays: list[Any] = field(default_factory=list)
    sources: dict[str, None] = field(default_factory=dict)


class _Moving:
    """Copy the arrays of several variables, each once; then replace them everywhere."""

    def __init__(self, framework: Framework) -> None:
        self.left: list[Left] = []
        self.found: list[tuple[str, Any]] = []
        self._framework = framework
        self._start = time.perf_counter()
        self._moved: list[Moved] = []
        self._copies: dict[int, tuple[Any, Any]] = {}  # each array and its copy, by the array's id

    def copy(self, found: _Found, bring: Callable[[Any], Any]) -> bool:
        """Copy the arrays of one variable; return whether all of them were."""
        new = {id(array): array for array in found.arrays if id(array) not in self._copies}
        try:
            self._copies |= {key: (array, bring(array)) for key, array in new.items()}
        except Exception as error:  # noqa: BLE001  it is to stay, or the framework has no room
            self.left.append(Left(found.name, first_line(error)))
            return False
        if new:  # bytes that two variables share count once, for the first
            nbytes = sum(self._framework.nbytes(array) for array in new.values())
            self._moved.append(Moved(found.name, nbytes, tuple(found.sources)))
        return True

    def originals(self, found: _Found, kept: bool) -> dict[int, tuple[Any, Any]]:
        """Return each copy by its id, weakly because that may be reused; if `kept` its original."""
        pairs = [self._copies[id(array)] for array in found.arrays]
        return {id(copy): (weakref.ref(copy), array if kept else None) for array, copy in pairs}

    def finish(self, variables: Iterable[tuple[str, Any]], namespace: dict[str, Any]) -> Moves:
        """Replace the arrays in the variables by their copies, and wait for these."""
        if not self._copies:
            return Moves(left=tuple(self.left))
        seen: dict[int, Any] = {}
        for name, value in variables:
            made = _replaced(value, self._framework, self._copied, seen)
            if made is not value:
                namespace[name] = made
        self._framework.wait()
        return Moves(tuple(self._moved), tuple(self.left), time.perf_counter() - self._start)

    def _copied(self, array: Any) -> Any:
        return self._copies.get(id(array), (array, array))[1]


def _look(name: str, value: Any, framework: Framework, there: str) -> _Found:
    """Find the arrays of a variable that are on other devices; change nothing."""
    found = _Found(name)

    def note(array: Any) -> Any:
        if (where := framework.where(array)) != there:
            found.arrays.append(array)
            found.sources.setdefault(where)
        return array

    _replaced(value, framework, note, {})
    return found


def _replaced(
    value: Any, framework: Framework, new: Callable[[Any], Any], seen: dict[int, Any]
) -> Any:
    """Replace each array in `value`, in place if possible; return `value` or its replacement.

    `seen` has each object's replacement, so that shared objects stay shared and cycles end.
    """
    if id(value) in seen:
        return seen[id(value)][1]
    kind = type(value)
    if framework.is_array(value):
        made = new(value)
    elif kind in (list, deque) or kind in _DICTS:
        seen[id(value)] = value, value
        made = _in_place(value, framework, new, seen)
    elif issubclass(kind, tuple):
        parts = [_replaced(part, framework, new, seen) for part in value]
        made = value if _same(parts, value) else _tuple_of(kind, parts)
    elif (split := _of_partial(value) or framework.parts(value)) is not None:
        seen[id(value)] = value, value  # what is changed in place may hold itself
        parts = [_replaced(part, framework, new, seen) for part in split[0]]
        made = value if _same(parts, split[0]) else split[1](parts)
    elif kind is SimpleNamespace or (defined_in(kind) == "__main__" and not issubclass(kind, type)):
        seen[id(value)] = value, value
        _in_place(own(value), framework, new, seen)
        made = value
    else:
        return value
    seen[id(value)] = value, made  # the value too, so that its id stays its own
    return made


def _of_partial(call: Any) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
    """Split a `functools.partial` into its function and arguments, as `Framework.parts` does."""
    if type(call) is not partial:
        return None

    def change(parts: Sequence[Any]) -> Any:
        call.__setstate__((*parts, vars(call)))  # type: ignore[attr-defined]
        return call

    return (call.func, call.args, call.keywords), change


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
