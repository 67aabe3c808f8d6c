"""Move existing tensors and objects to a device in place.

Guarantees: a tensor keeps its identity, so aliases, containers, modules and optimizers still
agree; tensors that share memory still share it; a leaf that requires a gradient stays a leaf;
tensors that are there already are not touched. Either everything moves or, when memory runs out or
the user interrupts, nothing. A library's object that has its own `to` is moved by that, last, and
replaced by the result.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from gpumagic.device import cuda_state
from gpumagic.display.units import size
from gpumagic.errors import GpuError, as_typed
from gpumagic.faults import first_line
from gpumagic.moving.find_tensors import DEVICE_NAMES, FoundTensor, Held, TensorFinder
from gpumagic.moving.moved import Left, Moved, Moves, Origin, all_of, keep_origins
from gpumagic.moving.plan import MovePlan, bytes_of
from gpumagic.usercode.values import defined_in, own, written


def move_all(
    variables: Iterable[tuple[str, object]],
    device: torch.device,
    *,
    followers: Iterable[tuple[str, Optimizer]] = (),
    namespace: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    origins: list[tuple[Any, Origin]] | None = None,
    check_room: bool = True,
    line: Callable[[], Any] | None = None,
) -> Moves:
    """Move tensors, modules, optimizers, and containers of them, to `device`; or raise `GpuError`.

    The state of `followers` follows the parameters that move. `Moves.left` names the tensors and
    arrays in `namespace` that shared memory with a moved one, and its names may be rebound.
    `origins` receives each moved tensor and its former device. Without `check_room`, which is for
    tensors without data, more may move than the device can hold. A long move has a `line`.
    """
    start = clock()
    origins = [] if origins is None else origins
    finder = TensorFinder()
    finder.variables(variables)
    by_to = [held for held in finder.movable if held.must_move(device)]
    staying = [held for held in finder.staying if held.must_move(device)]
    moving = finder.elsewhere(device)
    if moving:
        for name, optimizer in followers:
            finder.state(optimizer, (name,), only=moving)
    left = [*finder.left, *(Left(written(h.steps), h.reason) for h in staying)]
    moves = Moves(left=tuple(left))
    if moving:
        wanted = [found for found in finder.found if found.must_move(device)]
        # Filled as things move: an interrupt after that loses no origin.
        plan = MovePlan(device, wanted, origins)
        if check_room:  # else there are no addresses to compare
            plan.note_bystanders(tensors_in(namespace or {}))
            plan.note_arrays(_arrays_in(namespace or {}))
        # Before the first copy; and raised out here: a chained exception would keep copies alive.
        if (check_room and not _has_room(device, plan, by_to)) or not plan.copy(line):
            raise GpuError(_no_room(device, finder.tensors))
        plan.carry_out()
        for module in finder.recurrent:
            # cuDNN wants a recurrent layer's weights in one piece, as Module.to leaves them.
            module.flatten_parameters()
        for held in by_to:
            _bring(held, device, plan, namespace or {})
        wait_for(device)
        moved = tuple(Moved(n, count, tuple(plan.sources[n])) for n, count in plan.nbytes.items())
        moves = Moves(moved, (*left, *plan.left), clock() - start if moved else 0.0)
    for value, name in finder.naming:
        if named := _name_device(value, device):
            former = next((torch.device(n) for n in named.values() if type(n) is not int), device)
            origins.append((value, Origin(name, former, device, named=named)))
    return moves


def _has_room(device: torch.device, plan: MovePlan, by_to: list[Held]) -> bool:
    if device.type != "cuda":
        return True
    wanted = {id(f.tensor): f.tensor for held in by_to for f in held.tensors if f.must_move(device)}
    return plan.needed + sum(map(bytes_of, wanted.values())) <= cuda_state.room(device)


def _bring(held: Held, device: torch.device, plan: MovePlan, namespace: dict[str, Any]) -> None:
    """Move an object by its own `to`; if that returns a new object, rebind its name."""
    name = str(held.steps[0])
    moving = [found.tensor for found in held.tensors if found.must_move(device)]
    sources = [str(tensor.device) for tensor in moving]
    try:
        brought = held.value.to(device)
    except Exception as error:  # noqa: BLE001  a library's own, told in the report
        reason = f".to({str(device)!r}) raised {first_line(error)}"
        plan.left.append(Left(written(held.steps), reason))
        return
    if brought is not held.value:
        if len(held.steps) > 1 or namespace.get(name) is not held.value:
            reason = f"its .to({str(device)!r}) makes another object: bind that where it is used"
            plan.left.append(Left(written(held.steps), reason))
            return
        namespace[name] = brought
    if not moving:  # all that it holds came along with another variable
        return
    plan.nbytes[name] = plan.nbytes.get(name, 0) + sum(map(bytes_of, moving))
    plan.sources.setdefault(name, {}).update(dict.fromkeys(sources))
    plan.origins.append((brought, Origin(name, moving[0].device, device)))


def _name_device(value: Any, device: torch.device) -> dict[str, Any]:
    """Set the device that an object names, such as `pipe.device`; return the former attributes.

    A name is set where the object's tensors are on `device`. A GPU that an object without tensors
    names is the one that its library took for itself: TrainingArguments, Lightning's strategies.
    """
    held = own(value)
    found = [value] if issubclass(type(value), nn.Module) else held.values()
    parts = [item for item in found if issubclass(type(item), (Tensor, nn.Module))]
    devices = {
        tensor.device
        for part in parts
        for tensor in (part.parameters() if isinstance(part, nn.Module) else [part])
    }
    former: dict[str, Any] = {}
    for name, named in list(held.items()) if devices <= {device} else ():
        is_device = issubclass(type(named), torch.device)
        if is_device and named.type == "cuda" and named.index is not None:
            here: Any = device
        elif parts and name in DEVICE_NAMES and (is_device or type(named) is str):
            here = device if is_device else str(device)
        elif name == "_n_gpu" and type(named) is int and named > 1:
            here = 1  # TrainingArguments counted the GPUs: a cell has one
        else:
            continue
        if here != named:
            held[name], former[name] = here, named
    return former


def tensors_in(namespace: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Yield the variables that are tensors, by name; IPython's own names are left out."""
    for name, value in list(namespace.items()):
        if type(value) is Tensor and not name.startswith("_"):
            yield name, value


def _arrays_in(namespace: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield the variables that are NumPy arrays, with the addresses of their bytes."""
    kind = getattr(sys.modules.get("numpy"), "ndarray", None)
    for name, value in list(namespace.items()):
        if kind is not None and type(value) is kind and value.size and not name.startswith("_"):
            start = value.__array_interface__["data"][0]
            yield name, start, start + value.nbytes


def optimizers_in(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Optimizer]]:
    """Yield a notebook's optimizers by name: also in small containers and own objects."""
    for name, value in list(namespace.items()):
        for path, item in _near(name, value):
            if issubclass(type(item), Optimizer):
                yield path, item


def _near(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if type(value) in (list, tuple, dict) and len(value) <= 100:
        yield from ((name, item) for item in (value.values() if type(value) is dict else value))
    elif defined_in(type(value)) == "__main__":
        for attribute, item in own(value).items():
            yield f"{name}.{attribute}", item


def wait_for(device: torch.device) -> None:
    """Wait until `device` has finished what it was given."""
    kind = device.type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "xpu":
        torch.xpu.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def _no_room(device: torch.device, tensors: list[FoundTensor]) -> str:
    needed: dict[str, int] = {}
    for found in tensors:
        if found.must_move(device):
            needed[found.root] = needed.get(found.root, 0) + bytes_of(found.tensor)
    largest = sorted(needed.items(), key=lambda item: -item[1])[:3]
    names = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in largest)
    free = size(cuda_state.room(device)) if device.type == "cuda" else "too little"
    return (
        f"{device} has {free} free, and the cell's variables need {size(sum(needed.values()))} "
        f"({names}); nothing was moved; free some ({as_typed('%gpus')} shows who holds it) or type "
        "--no-move"
    )


_origins: Any = WeakIdKeyDictionary()
"""Origins of objects that cells moved for good, by identity."""


def remember(origins: Iterable[tuple[Any, Origin]], cell: str) -> None:
    """Keep the device of each moved object from before the first cell that moved it."""
    keep_origins(_origins, origins, cell)


def origin_of(value: object) -> Origin | None:
    """Return the origin of an object that a cell moved; None if no cell has."""
    try:
        found: Origin | None = _origins.get(value)
    except TypeError:  # what cannot be referred to weakly
        return None
    # A tensor may have been moved since, by the user; of another object nothing is asked.
    moved_since = isinstance(value, Tensor) and found and value.device != found.there
    return None if moved_since else found


def forget_origins() -> None:
    """Forget all origins: moved objects count as at home where they are."""
    _origins.clear()


def brought_away() -> list[Origin]:
    """Return the origins of all live objects that cells moved and that are still there."""
    return [origin for value in list(_origins) if (origin := origin_of(value))]


def bring_home(namespace: dict[str, Any], origins: list[tuple[Any, Origin]] | None = None) -> Moves:
    """Move the objects that cells moved, or only those of `origins`, back to where they were."""
    by_device: dict[torch.device, list[tuple[str, Any]]] = {}
    away = [(value, origin) for value in list(_origins) if (origin := origin_of(value))]
    for value, origin in away if origins is None else origins:
        if origin.named:
            own(value).update(origin.named)
            _origins.pop(value, None)
        else:
            by_device.setdefault(origin.device, []).append((origin.name, value))
    made: list[Moves] = []
    for device, values in by_device.items():
        followers = optimizers_in(namespace)
        made.append(move_all(values, device, followers=followers, namespace=namespace))
        for _, value in values if origins is None else ():
            _origins.pop(value, None)
    return all_of(made)
