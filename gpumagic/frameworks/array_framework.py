"""Move arrays by replacing them with copies, and find the operands of a failed expression.

Lists, dicts and objects are changed in place. No variable changes before all copies are made.
"""

import ast
import re
import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from gpumagic.device import CPU, Device, devices_changed
from gpumagic.device import here as devices_here
from gpumagic.device.where import there_is
from gpumagic.errors import GpuError
from gpumagic.faults import first_line
from gpumagic.frameworks.framework import Counting, Framework, Split, too_late, wholes
from gpumagic.frameworks.watching import CopyCounting
from gpumagic.ledger.entry import Tally
from gpumagic.moving.moved import Left, Moved, Moves, Origin, Origins, keep_origins
from gpumagic.usercode.frames import OWN_SCOPES, FailedFrame, errors, failed_frames
from gpumagic.usercode.values import MISSING, PLAIN, defined_in, own

_IN_PLACE = (list, deque, dict, defaultdict, OrderedDict)
_CAPTURED = "a function captures it; pass it as an argument, or create it in this cell"
_LITERALS = (ast.List, ast.Tuple, ast.Dict)
_origins: dict[str, dict[Any, Origin]] = defaultdict(dict)
"""Origins of moved variables, by framework name, then by (framework name, variable name)."""


class ArrayFramework(Framework):
    """Move variables of a framework by replacing their arrays with copies."""

    copies: CopyCounting | None = None  # None if the framework makes no implicit copies
    virtual = 0  # the number of virtual GPUs

    def __init__(self) -> None:
        self._patches = ExitStack()
        devices_changed.append(self._changed)
        self._changed()

    def _changed(self) -> None:
        before, self.virtual = self.virtual, sum(gpu.virtual for gpu in devices_here(memory=False))
        if not self.virtual:
            self._patches.close()
        elif not before:
            self.patch(self._patches)

    def patch(self, stack: ExitStack) -> None:
        """Patch the framework's functions to support virtual GPUs, until `stack` is closed."""

    def missing(self, device: Device, cpus: int, build: str) -> GpuError:
        """Return the error for a missing device; the framework has `cpus` CPU devices."""
        if device.kind != "cuda":
            return GpuError(f"{self.name} has no device {device}; type cpu, or a GPU's number")
        if cpus > self.virtual > 0:
            return GpuError(f"{self.name} has no {device}: {there_is(devices_here(memory=False))}")
        if self.virtual:
            return GpuError(too_late(self.name, cpus, self.virtual))
        return GpuError(f"{self.name} has no {device}; for GPU support: pip install {build}")

    def count(self, tally: Tally, strict: bool, *, warn: bool = False) -> Counting:
        return nullcontext() if self.copies is None else self.copies.count(tally, strict)

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        """Return `array` if it is on `device`, else a copy on `device`; GpuError if impossible."""
        raise NotImplementedError

    def move(
        self,
        variables: Iterable[tuple[str, Any]],
        device: Device,
        namespace: dict[str, Any],
        origins: Origins,
        line: Any = None,
    ) -> Moves:
        """Copy the arrays of these variables to `device`; rebind the variables in `namespace`."""
        moving, there = _Moving(self, namespace), str(device)
        for name, value in variables:
            if arrays := moving.copy(name, value, there, lambda array: self.bring(array, device)):
                committed = any(getattr(array, "committed", True) for array in arrays)
                originals, home = moving.originals(arrays), self.where(arrays[0])
                origin = Origin(name, home, there, "", type(value), committed, originals)
                origins.append(((self.name, name), origin))
        return moving.finish()

    def allocated(self, device: Device) -> tuple[int, int | None]:
        """Return the bytes of live arrays on `device`. Memory that arrays share counts once.
        The second item is None, because the peak is unknown."""
        every = wholes(place for array in self.live() for place in self.places(array))
        return sum(place.nbytes for place in {*every.values()} if place.device == str(device)), None

    def remember(self, origins: Origins, cell: str) -> None:
        """Record the origins of variables that `cell` moved, so that `home` can move them back."""
        keep_origins(_origins[self.name], origins, cell)

    def home(self, namespace: dict[str, Any], origins: Origins | None = None) -> Moves:
        devices = {str(device): device for device in [CPU, *devices_here(memory=False)]}
        moving = _Moving(self, namespace)
        if origins is None:
            origins = [*_origins.pop(self.name, {}).items()]
        known = [origin for _, origin in origins if origin.device in devices]
        # By a copy's id: a weak reference to the copy, the original array, and the origin.
        copies = {key: (*pair, o) for o in known for key, pair in o.originals.items()}

        def bring(array: Any, origin: Origin | None) -> Any:
            copy, original, moved = copies.get(id(array), (None, None, None))
            if copy is None or copy() is not array:
                original, moved = None, origin
            if original is not None or moved is None:
                return array if original is None else original
            return self.bring(array, devices[moved.device], committed=moved.committed)

        for origin in known:
            if type(value := namespace.get(origin.name)) is origin.kind:
                moving.copy(origin.name, value, origin.device, partial(bring, origin=origin))
        for name, value in [*namespace.items()] if copies else ():
            if any(id(array) in copies for array in arrays_in(value, self)):
                moving.copy(name, value, "", partial(bring, origin=None))
        return moving.finish()

    def away(self, namespace: Mapping[str, Any]) -> dict[str, set[str]]:
        held = {name: arrays_in(value, self, "cpu") for name, value in namespace.items()}
        return {
            name: {device for array in arrays for device in self.where(array).split(" + ")}
            for name, arrays in held.items()
            if arrays
        }


class _Moving:
    """Copy each array of several variables once; then replace the array in all these variables."""

    def __init__(self, framework: Framework, namespace: dict[str, Any]) -> None:
        self._framework, self._namespace = framework, namespace
        self._start = time.perf_counter()
        self._left: list[Left] = []
        self._moved: list[Moved] = []
        self._variables: list[tuple[str, Any]] = []
        self._copies: dict[int, tuple[Any, Any]] = {}  # each array and its copy, by the array's id

    def copy(self, name: str, value: Any, there: str, bring: Callable[[Any], Any]) -> Sequence[Any]:
        """Copy a variable's arrays to device `there`; return these arrays, or () if none moves."""
        if not (arrays := arrays_in(value, self._framework, there)):
            return ()
        if name not in self._namespace:
            self._left.append(Left(name, _CAPTURED))
            return ()
        new = [array for array in arrays if id(array) not in self._copies]
        try:
            made = {id(array): (array, bring(array)) for array in new}
        except Exception as error:  # noqa: BLE001  an array cannot move, or the device is full
            self._left.append(Left(name, first_line(error)))
            return ()
        made = {key: (array, copy) for key, (array, copy) in made.items() if copy is not array}
        self._copies |= made
        if made:  # an array in two variables counts only for the first variable
            nbytes = sum(self._framework.nbytes(array) for array, _ in made.values())
            sources = dict.fromkeys(map(self._framework.where, arrays))
            self._moved.append(Moved(name, nbytes, tuple(sources)))
        self._variables.append((name, value))
        return arrays

    def originals(self, arrays: Iterable[Any]) -> dict[int, tuple[Any, Any]]:
        """Map each copy's id to a pair: a weak reference to the copy, and the original array."""
        pairs = [self._copies[id(array)] for array in arrays if id(array) in self._copies]
        return {id(copy): (weakref.ref(copy), array) for array, copy in pairs}

    def finish(self) -> Moves:
        """Replace the arrays in the variables by the copies; wait until the copies are complete."""
        if not self._copies:
            return Moves(left=tuple(self._left))
        seen: dict[int, Any] = {}
        for name, value in self._variables:
            if (made := _replaced(value, self._framework, self._copied, seen)) is not value:
                self._namespace[name] = made
        self._framework.wait()
        return Moves(tuple(self._moved), tuple(self._left), time.perf_counter() - self._start)

    def _copied(self, array: Any) -> Any:
        return self._copies.get(id(array), (array, array))[1]


def arrays_in(value: Any, framework: Framework, there: str = "") -> list[Any]:
    """Return the arrays that `value` is or contains, except arrays on the device `there`."""
    found: list[Any] = []

    def look(array: Any) -> Any:
        if framework.where(array) != there:
            found.append(array)
        return array

    _replaced(value, framework, look, {})
    return found


def _replaced(
    value: Any, framework: Framework, new: Callable[[Any], Any], seen: dict[int, Any]
) -> Any:
    """Replace each array in `value` by `new(array)`, in place if possible; return the new value."""
    if type(value) in PLAIN:
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    if framework.is_array(value):
        made = new(value)
    else:
        seen[id(value)] = value, value  # the value may contain itself
        if (split := _split(value) or framework.parts(value)) is not None:
            held, rebuild = split
            parts = [_replaced(part, framework, new, seen) for part in held]
            same = all(a is b for a, b in zip(parts, held, strict=True))
            made = value if same else rebuild(parts)
        else:
            made, held = value, _changeable(value)
            for key, part in list(held.items() if isinstance(held, dict) else enumerate(held)):
                if (put := _replaced(part, framework, new, seen)) is not part:
                    held[key] = put
    seen[id(value)] = value, made  # keeps `value` alive, so its id stays unique
    return made


def _split(value: Any) -> Split | None:
    kind: Any = type(value)
    if issubclass(kind, tuple):
        return value, getattr(kind, "_make", kind)
    if kind is partial:
        parts = value.func, value.args, value.keywords
        return parts, lambda new: partial(new[0], *new[1], **new[2])
    return None


def _changeable(value: Any) -> Any:
    """Return the items or attributes of `value` that can be changed in place; () if none can."""
    kind = type(value)
    if kind in _IN_PLACE:
        return value
    of_user = defined_in(kind) == "__main__" and not issubclass(kind, type)
    return own(value) if of_user or kind is SimpleNamespace else ()


def failures(
    error: BaseException, namespace: Mapping[str, Any], pattern: re.Pattern[str]
) -> Iterator[tuple[re.Match[str], FailedFrame, ast.AST]]:
    """If an error's text matches `pattern`, yield (match, user frame, failed expression)."""
    for each in errors(error):
        said = pattern.search(str(each))
        for frame in failed_frames(each.__traceback__) if said else ():
            if said is not None and frame.failed is not None:
                frame.scope.outer = {**namespace, **frame.scope.outer}
                yield said, frame, frame.failed


def operands(
    node: ast.AST, frame: FailedFrame, held: Callable[[Any], Sequence[Any]]
) -> Iterator[tuple[ast.expr, Sequence[Any]]]:
    """Yield the outermost operands in `node` that contain arrays, each with its arrays."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, OWN_SCOPES):
            continue
        whole = isinstance(child, ast.expr) and not isinstance(child, _LITERALS)
        value = frame.scope.value(child) if whole else MISSING
        arrays = () if value is MISSING else held(value)
        if isinstance(child, ast.expr) and arrays:
            yield child, arrays
            continue
        inner = [*operands(child, frame, held)]
        # The value of `x[0]` no longer exists. Use the arrays of `x`: they are on the same device.
        if isinstance(child, ast.Subscript) and [part for part, _ in inner] == [child.value]:
            inner = [(child, inner[0][1])]
        yield from inner
