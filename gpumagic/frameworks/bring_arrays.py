"""Bring arrays to a device, wherever variables hold them; most must be copied.

Guarantees: names and containers that shared an array share the copy; lists, dicts and objects stay
the same objects; nothing changes before all copies are made. torch's tensors are moved in place.
"""

import sys
import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from gpumagic import faults
from gpumagic.device import CPU, Device
from gpumagic.device import here as devices_here
from gpumagic.display.units import size
from gpumagic.errors import GpuError
from gpumagic.faults import first_line
from gpumagic.frameworks.framework import Framework, device_of, library_of, nbytes_of
from gpumagic.frameworks.known import imported
from gpumagic.frameworks.own_devices import needed_in
from gpumagic.moving.moved import Left, Moved, Moves, all_of
from gpumagic.usercode.values import defined_in, is_tensor, own

_DICTS = (dict, defaultdict, OrderedDict)
_CAPTURED = "a function has captured it: give it as an argument, or make it in this cell"


@dataclass
class _Found:
    """Keep the arrays of one variable that are on other devices, and these devices."""

    name: str
    arrays: list[Any] = field(default_factory=list)
    sources: dict[str, None] = field(default_factory=dict)


Originals = dict[int, tuple["weakref.ref[Any]", Any]]
"""The copy and its original, by the copy's id; the copy weakly, because its id may be reused."""


@dataclass(frozen=True)
class Home:
    """Record the device and the class of a variable before a cell moved it."""

    device: str
    kind: type
    committed: bool  # of JAX's arrays: to their device, so that JAX does not move them by itself


def bring_all(
    framework: Framework,
    variables: Iterable[tuple[str, Any]],
    device: Device,
    namespace: dict[str, Any],
    origins: dict[str, Home] | None = None,
    originals: Originals | None = None,
) -> Moves:
    """Copy the arrays of these variables to `device`, and rebind their names in `namespace`.

    `origins` receives each variable's former device, `originals` each copy's original.
    """
    start = time.perf_counter()
    there, copies, moved = str(device), dict[int, Any](), list[Moved]()
    left: list[Left] = []
    kept: list[tuple[str, Any]] = []
    for name, value in variables:
        found = _look(name, value, framework, there)
        elsewhere = {id(array): array for array in found.arrays}
        if not elsewhere:
            continue
        if name not in namespace:
            left.append(Left(name, _CAPTURED))
            continue
        new = {key: array for key, array in elsewhere.items() if key not in copies}
        try:
            copies |= {key: (array, framework.bring(array, device)) for key, array in new.items()}
        except Exception as error:  # noqa: BLE001  it is to stay, or the framework has no room
            left.append(Left(name, first_line(error)))
            continue
        kept.append((name, value))
        if origins is not None:
            committed = any(getattr(array, "committed", True) for array in found.arrays)
            origins[name] = Home(next(iter(found.sources)), type(value), committed)
        if new:  # bytes that two variables share count once, for the first
            nbytes = sum(framework.nbytes(array) for array in new.values())
            moved.append(Moved(name, nbytes, tuple(found.sources)))
    _bind(kept, framework, copies, namespace)
    if originals is not None:
        originals |= {id(new): (weakref.ref(new), old) for old, new in copies.values()}
    if copies:
        framework.wait()
    return Moves(tuple(moved), tuple(left), time.perf_counter() - start if moved else 0.0)


def _bind(
    variables: list[tuple[str, Any]],
    framework: Framework,
    copies: dict[int, Any],
    namespace: dict[str, Any],
) -> None:
    """Replace the arrays in the variables by their copies."""
    seen: dict[int, Any] = {}
    for name, value in variables:
        made = _replaced(value, framework, lambda a: copies.get(id(a), (a, a))[1], seen)
        if made is not value:
            namespace[name] = made


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


homes: dict[tuple[str, str], Home] = {}
"""Homes of variables that cells moved for good, by the framework's and the variable's name."""


def remember(framework: Framework, origins: Mapping[str, Home]) -> None:
    """Keep the device of each variable from before the first cell that moved it."""
    for name, home in origins.items():
        first = homes.get((framework.name, name))
        if first is None or first.kind is not home.kind:
            homes[framework.name, name] = home


def bring_home(
    framework: Framework,
    namespace: dict[str, Any],
    wanted: Mapping[str, Home],
    originals: Originals | None = None,
) -> Moves:
    """Move the present values of these variables, also new ones, back to their former devices.

    An unchanged copy is replaced by its original, if `originals` has it.
    """
    start = time.perf_counter()
    devices = {str(device): device for device in [CPU, *devices_here(memory=False)]}
    copies: dict[int, Any] = {}
    moved, left = list[Moved](), list[Left]()
    for name, home in wanted.items():
        value = namespace.get(name)
        if type(value) is not home.kind or home.device not in devices:
            continue
        found = _look(name, value, framework, home.device)
        new = {id(array): array for array in found.arrays if id(array) not in copies}
        try:
            for key, array in new.items():
                copy, back = (originals or {}).get(key, (None, None))
                if copy is None or copy() is not array:
                    back = framework.bring(array, devices[home.device], committed=home.committed)
                copies[key] = array, back
        except Exception as error:  # noqa: BLE001  as above; the others go home
            left.append(Left(name, first_line(error)))
        if new:
            nbytes = sum(framework.nbytes(array) for array in new.values())
            moved.append(Moved(name, nbytes, tuple(found.sources)))
    if copies:
        variables = [(n, v) for n, v in namespace.items() if n[0] != "_"]
        _bind(variables, framework, copies, namespace)
        framework.wait()
    return Moves(tuple(moved), tuple(left), time.perf_counter() - start if moved else 0.0)


def still_there(framework: Framework, namespace: Mapping[str, Any]) -> list[str]:
    """Return the variables that are, or hold, arrays on a GPU."""
    variables = [(name, value) for name, value in namespace.items() if name[0] != "_"]
    return [name for name, value in variables if _look(name, value, framework, "cpu").arrays]


def left_alone(names: Iterable[str], namespace: Mapping[str, Any], device: Device) -> list[Left]:
    """List the variables that stay on another GPU: ``a: CuPy, on cuda:0, 1.2 GiB``."""
    found = []
    for name in names:
        value = namespace.get(name)
        if is_tensor(value) or any(each.is_array(value) for each in imported()):
            continue
        with faults.kept("asking another library's array where it is"):
            where = device_of(value)
            # What NumPy has is for the host, and stays there.
            if where not in (None, "cpu", str(device)):
                nbytes = nbytes_of(value) or None
                found.append(Left(name, f"{library_of(value)}, on {where}, {size(nbytes)}"))
    return found


def move(value: object, where: object) -> Moves:
    """Move `value` to a device in place: every object that can keeps its identity.

    An array of JAX, TensorFlow or CuPy cannot move: lists, dicts and objects then hold a copy. The
    replacement of an array, a tuple or a pytree is ``.value``.

    Parameters
    ----------
    value : torch.Tensor, torch.nn.Module, torch.optim.Optimizer, array, or a container of them
        Lists, tuples, named tuples, dicts and dataclasses are followed to any depth.
    where : str, int or torch.device
        Any spelling of one device: ``1``, ``"cuda:1"``, ``"cpu"``, ``"free"`` …

    Returns
    -------
    Moves
        The moved variables and bytes, the others with the reason, the seconds, and the value.

    Raises
    ------
    GpuError
        There is no such device, or it has not enough free memory. Nothing was moved.

    Examples
    --------
    >>> moves = gpumagic.move((net, optimizer, batch), 1)
    >>> moves.nbytes
    1234944
    >>> params = gpumagic.move(params, 1).value  # of JAX
    """
    names = {"value": value}
    needed = needed_in({**sys._getframe(1).f_globals, **names}, "gpumagic.move")
    device = needed.find(where)
    found: list[Moves] = []
    if (torchs := needed.of_torch(device)) is not None:
        from gpumagic.moving.move import move_all

        found.append(move_all(names.items(), torchs))
    for framework in needed.others:
        found.append(bring_all(framework, [*names.items()], device, names))
    moves = all_of(found)
    if moves.left and not moves.moved and not needed.torch:
        raise GpuError(f"move: {moves.left[0].reason}; nothing was moved")
    return replace(moves, value=names["value"])
