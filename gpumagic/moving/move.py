"""Move existing tensors and objects to a device in place.

A tensor keeps its identity, tensors that share memory still share memory, and a leaf stays a leaf.
All copies are made before the first tensor changes, so nothing moves if memory runs out or the user
interrupts. Libraries' objects move last. If `to` returns a new object, the variable is rebound.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda import synchronize  # torch.cuda.synchronize may be patched later
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from gpumagic.device import cuda_state
from gpumagic.display.units import size
from gpumagic.errors import GpuError, as_typed
from gpumagic.faults import first_line
from gpumagic.moving.find_tensors import DEVICE_NAMES, FoundTensor, Held, TensorFinder
from gpumagic.moving.moved import Left, Moved, Moves, Origin, Origins, all_of, keep_origins
from gpumagic.usercode.values import CONTAINERS, Step, own, parts_of, walk, written

_ALIGNMENT = 64  # bytes; a copied range starts at a multiple of this, so never within an element
_MANY = 2**28  # bytes; a larger move shows its progress
_FEW = 100  # items; larger containers are not searched for optimizers and modules
_Family = tuple[int, int, list[FoundTensor]]  # a storage's byte range, and the tensors in it


def move_all(
    variables: Iterable[tuple[str, Any]],
    device: torch.device,
    namespace: dict[str, Any] | None = None,
    *,
    origins: Origins | None = None,
    check_room: bool = True,
    line: Any = None,
) -> Moves:
    """Move tensors, modules, optimizers and containers; raise `GpuError` if they do not fit.
    The state of optimizers in `namespace` moves with their parameters. Variables in `namespace` may
    be rebound. `origins` receives the origins of moved objects. `line` creates a progress line."""
    start = time.perf_counter()
    origins = [] if origins is None else origins
    namespace = {} if namespace is None else namespace
    finder = TensorFinder(variables)
    moving = {id(found.tensor) for found in finder.tensors if found.must_move(device)}
    for name, optimizer in instances_in(namespace, Optimizer) if moving else ():
        finder.state(optimizer, (name,), only=moving)
    left = finder.left + [held.left for held in finder.staying if held.must_move(device)]
    moved: tuple[Moved, ...] = ()
    if moving:
        # The plan itself adds to `origins`, so that an interrupt loses no moved tensor's origin.
        plan = MovePlan(device, finder, origins)
        plan.run(namespace, check_room, line)
        left += plan.left
        moved = tuple(plan.moved.values())
    origins += _name_devices(finder.naming, device)
    return Moves(moved, tuple(left), time.perf_counter() - start if moved else 0.0)


@dataclass(frozen=True)
class Copying:
    """Progress of a long move's copies, in bytes."""

    done: int
    total: int
    device: torch.device

    @property
    def share(self) -> float:
        """The completed share, from 0 to 1."""
        return self.done / self.total

    def __str__(self) -> str:
        """Return ``"moving to cuda:1: 3.0 GiB of 4.2 GiB"``."""
        return f"moving to {self.device}: {size(self.done)} of {size(self.total)}"


class MovePlan:
    """Move the tensors that `finder` found. Copy all tensors before the first tensor changes."""

    def __init__(self, device: torch.device, finder: TensorFinder, origins: Origins) -> None:
        self.moved: dict[str, Moved] = {}  # by variable
        self.left: list[Left] = []
        self._device, self._finder, self._origins = device, finder, origins
        self._by_to = [held for held in finder.movable if held.must_move(device)]
        self._new: list[tuple[FoundTensor, Tensor]] = []
        self._alone: list[FoundTensor] = []
        self._families: list[_Family] = []
        shared: dict[int, list[FoundTensor]] = {}  # by storage
        for found in (each for each in finder.found if each.must_move(device)):
            if reason := immovable(found.tensor):
                self.left.append(Left(found.path, reason, str(found.tensor.device)))
            elif has_plain_storage(found.tensor):
                shared.setdefault(found.tensor.untyped_storage()._cdata, []).append(found)
            else:
                self._alone.append(found)
        for group in shared.values():
            self._families += _families(group)

    def _note_sharing(self, namespace: Mapping[str, Any]) -> None:
        """Report the notebook's values that no longer share memory with a moved tensor."""
        moving = {id(found.tensor) for _, _, family in self._families for found in family}
        for name, value in list(namespace.items()):
            if name.startswith("_") or id(value) in moving or not (bytes_ := _addresses(value)):
                continue
            roots = dict[str, None]()
            for start, stop, family in self._families:
                base = family[0].tensor.untyped_storage().data_ptr()
                if bytes_[0] < base + stop and base + start < bytes_[1]:
                    roots[family[0].root] = None
            self.left += [Left(name, f"not reached by later changes to {root}") for root in roots]

    def run(self, namespace: dict[str, Any], check_room: bool, line: Any) -> None:
        """Move all tensors; if they do not fit, move nothing and raise GpuError."""
        check_room &= self._device.type == "cuda"
        # Raise here, because the traceback of an error in `_copy` would keep the copies alive.
        full = check_room and self._needed > cuda_state.free_bytes(self._device)
        if full or not self._copy(line):
            raise GpuError(_no_room(self._device, self._finder.tensors))
        self._note_sharing(namespace)
        self._carry_out()
        for module in self._finder.modules:
            if isinstance(module, nn.RNNBase):
                # cuDNN needs a recurrent layer's weights contiguous; Module.to flattens them too.
                module.flatten_parameters()
        for held in self._by_to:
            self._bring(held, namespace)
        wait_for(self._device)

    @property
    def _needed(self) -> int:
        """The bytes that the copies take on the device to which tensors move."""
        each = (b - a for a, b, family in self._families if any(f.home is None for f in family))
        others = [*self._alone, *(found for held in self._by_to for found in held.tensors)]
        alone = {id(f.tensor): bytes_of(f.tensor) for f in others if f.must_move(self._device)}
        twice = {id(found.tensor) for *_, family in self._families for found in family}
        return sum(each) + sum(alone[key] for key in alone.keys() - twice)

    def _copy(self, line: Any) -> bool:
        """Copy all tensors; if the device runs out of memory, free the copies and return False."""
        done, total = 0, self._needed if line else 0
        try:
            with line() if line and total >= _MANY else nullcontext() as shown:
                for start, end, family in self._families:
                    if shown is not None:
                        shown.update(Copying(done, total, self._device))
                    done += end - start
                    self._copy_family(start, end, family)
            for found in self._alone:
                self._copy_alone(found)
        except torch.OutOfMemoryError:
            self._new.clear()
            return False
        return True

    def _copy_alone(self, found: FoundTensor) -> None:
        """Copy a tensor without plain storage, such as a sparse tensor, with the tensor's `to`."""
        try:
            data = found.tensor.data
            with torch.inference_mode(data.is_inference()):
                new = data.to(found.home or self._device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            self.left.append(Left(found.path, first_line(error)))
            return
        if torch._has_compatible_shallow_copy_type(found.tensor, new):
            self._add(found, new, bytes_of(found.tensor))
        else:
            self.left.append(Left(found.path, "it cannot be moved in place; use .to()"))

    def _copy_family(self, start: int, end: int, family: list[FoundTensor]) -> None:
        """Copy tensors that overlap in memory, so that the copies overlap too."""
        storage = family[0].tensor.untyped_storage()
        copies: dict[torch.device, torch.UntypedStorage] = {}
        for found in family:
            old, home = found.tensor, found.home or self._device
            copied = 0
            if home not in copies:
                flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
                flat.set_(storage, start, (end - start,), (1,))
                copies[home] = flat.to(home).untyped_storage()
                copied = end - start
            offset = old.storage_offset() - start // old.element_size()
            with torch.inference_mode(old.is_inference()):  # `old.data = new` copies this flag
                new = torch.empty(0, dtype=old.dtype, device=home)
                new.set_(copies[home], offset if old.numel() else 0, old.size(), old.stride())
            self._add(found, new, copied)

    def _add(self, found: FoundTensor, new: Tensor, nbytes: int) -> None:
        self._new.append((found, new))
        self._count(found.root, nbytes, [str(found.tensor.device)])

    def _count(self, name: str, nbytes: int, sources: list[str]) -> None:
        known = self.moved.get(name, Moved(name, 0, ()))
        every = tuple(dict.fromkeys((*known.sources, *sources)))
        self.moved[name] = Moved(name, known.nbytes + nbytes, every)

    def _carry_out(self) -> None:
        """Replace the data of all tensors; if interrupted, restore the old data."""
        before = [(found, found.tensor.data) for found, _ in self._new]
        noted = len(self._origins)
        # Skip variables that a cell moved before: they may have newer tensors, as after `half()`.
        away = {found.root for found in self._finder.found if origin_of(found.tensor)}
        for found in (each for each in self._finder.found if each.root not in away):
            first_found[found.tensor] = None
        try:
            self._origins += [
                (found.tensor, Origin(found.root, found.tensor.device, new.device))
                for found, new in self._new
            ]
            for found, new in self._new:
                found.tensor.data = new
        except BaseException:
            for found, old in before:
                found.tensor.data = old
            del self._origins[noted:]
            raise

    def _bring(self, held: Held, namespace: dict[str, Any]) -> None:
        """Move an object by its method `to`. If `to` returns a new object, rebind the variable."""
        name, device = str(held.steps[0]), self._device
        moving = [found.tensor for found in held.tensors if found.must_move(device)]
        sources = [str(tensor.device) for tensor in moving]
        reason = ""
        try:
            brought = held.value.to(device)
            brought = held.value if brought is None else brought
        except Exception as error:  # noqa: BLE001  the library's error goes into the report
            brought, reason = held.value, f".to({str(device)!r}) raised {first_line(error)}"
        if brought is not held.value:
            if len(held.steps) == 1 and namespace.get(name) is held.value:
                namespace[name] = brought
            else:
                reason = f".to({str(device)!r}) returned a new object: use that one instead"
        if reason:
            self.left.append(Left(written(held.steps), reason))
        elif moving:  # otherwise, the tensors moved with another variable
            self._count(name, sum(map(bytes_of, moving)), sources)
            self._origins.append((brought, Origin(name, torch.device(sources[0]), device)))


def _families(group: list[FoundTensor]) -> list[_Family]:
    """Group the tensors of one storage that overlap in memory. Each group is copied as a whole."""
    families: list[_Family] = []
    for found in sorted(group, key=lambda f: _span(f.tensor)):
        start, stop = _span(found.tensor)
        if not families or start >= families[-1][1]:
            families.append((start // _ALIGNMENT * _ALIGNMENT, stop, []))
        first, end, family = families[-1]
        families[-1] = first, max(end, stop), family
        family.append(found)
    return families


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the byte offsets at which a tensor begins and ends in its storage."""
    size, first = tensor.element_size(), tensor.storage_offset()
    steps = ((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    count = 1 + sum(steps) if tensor.numel() else 0
    return int(first * size), int((first + count) * size)


def _addresses(value: Any) -> tuple[int, int] | None:
    """Return the start and end address of a tensor or NumPy array; None if unknown."""
    if type(value) is Tensor and has_plain_storage(value) and value.numel():
        base, (first, stop) = value.untyped_storage().data_ptr(), _span(value)
        return base + first, base + stop
    if type(value) is getattr(sys.modules.get("numpy"), "ndarray", None) and value.size:
        first = value.__array_interface__["data"][0]
        return first, first + value.nbytes
    return None


def immovable(tensor: Tensor) -> str:
    """Return why a tensor cannot be moved in place; empty if it can be moved."""
    if tensor.grad_fn is not None:
        # The tensor's autograd graph expects a gradient on the device of the computation.
        return f"its graph is on {tensor.device}; compute it in this cell instead"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data"
    return ""


def has_plain_storage(tensor: Tensor) -> bool:
    """Whether a tensor is a strided `Tensor`, parameter or buffer without a special encoding."""
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
    )


def bytes_of(tensor: Tensor) -> int:
    """Return a tensor's bytes; 0 if it has no shape yet or no strides."""
    with suppress(RuntimeError, NotImplementedError, ValueError):
        return tensor.nbytes
    return 0


def _name_devices(naming: Iterable[tuple[Any, str]], device: torch.device) -> Origins:
    """Set device attributes of objects whose tensors are on `device`; return the origins."""
    origins: Origins = []  # also for objects without tensors, such as TrainingArguments
    for value, name in naming:
        held = own(value)
        found = [value] if issubclass(type(value), nn.Module) else held.values()
        parts = [item for item in found if issubclass(type(item), (Tensor, nn.Module))]
        if any(tensor.device != device for tensor in _tensors_of(parts)):
            continue
        named = dict[str, Any]()
        for key, item in held.items():
            if (new := _renamed(key, item, device, bool(parts))) not in (None, item):
                named[key], held[key] = item, new
        if named:
            former = next((torch.device(n) for n in named.values() if type(n) is not int), device)
            origins.append((value, Origin(name, former, device, named=named)))
    return origins


def _tensors_of(parts: Iterable[Any]) -> Iterator[Tensor]:
    """Yield tensors, and the parameters of modules."""
    for part in parts:
        yield from part.parameters() if isinstance(part, nn.Module) else [part]


def _renamed(name: str, value: Any, device: torch.device, has_tensors: bool) -> Any:
    """Return the new value of an attribute that names a device; None for any other attribute."""
    kind = type(value)
    if kind is torch.device and value.type == "cuda" and value.index is not None:
        return device
    if has_tensors and name in DEVICE_NAMES and kind in (torch.device, str):
        return kind(device)
    # `_n_gpu` of TrainingArguments is the number of all GPUs, but a cell uses only one.
    return 1 if name == "_n_gpu" and kind is int and value > 1 else None


def instances_in(namespace: Mapping[str, Any], kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each instance of `kind`, also in containers and objects."""
    variables = [((name,), value) for name, value in namespace.items()]
    for path, value in walk(variables, _parts_of, depth=1):
        if issubclass(type(value), kind):
            yield written(path), value


def _parts_of(value: Any) -> list[tuple[Step, Any]]:
    with suppress(Exception):  # the user's own class may raise anything
        count = length_hint(value) if issubclass(type(value), CONTAINERS) else 0
        return parts_of(value) if count <= _FEW else []
    return []


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        synchronize(device)
    else:
        getattr(torch, device.type).synchronize(*(() if device.type == "mps" else (device,)))


def _no_room(device: torch.device, tensors: list[FoundTensor]) -> str:
    needed = Counter[str]()
    for found in tensors:
        if found.must_move(device):
            needed[found.root] += bytes_of(found.tensor)
    names = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in needed.most_common(3))
    free = size(cuda_state.free_bytes(device)) if device.type == "cuda" else "too little"
    said = f"{device} has {free} free, and the cell's variables need {size(needed.total())}"
    cure = f"{as_typed('%gpufree')} frees what errors and outputs hold"
    rows = f"or add --no-move, and in the cell copy only some rows of the largest: .to('{device}')"
    return f"{said} ({names}); nothing was moved; {cure}; {rows}"


_origins: Any = WeakIdKeyDictionary()
"""The origin of each object that a cell moved, until the object is moved back."""
first_found: Any = WeakIdKeyDictionary()
"""The keys are the tensors that a variable had when a cell first moved the variable."""


def remember(origins: Origins, cell: str) -> None:
    """Store the origins of objects that `cell` moved."""
    keep_origins(_origins, origins, cell)


def origin_of(value: object) -> Origin | None:
    """Return the origin of an object that a cell moved; None if no cell moved it."""
    try:
        found: Origin | None = _origins.get(value)
    except TypeError:  # the value allows no weak references
        return None
    # A tensor that the user has moved since then has no origin. Other objects are not checked.
    return None if isinstance(value, Tensor) and found and value.device != found.there else found


def brought_away() -> Origins:
    """Return all live objects that are still where a cell moved them, with their origins."""
    return [(value, origin) for value in list(_origins) if (origin := origin_of(value))]


def _add_whole_modules(by_device: Any, namespace: dict[str, Any], away: Origins) -> None:
    """Add whole modules to `by_device`, because a buffer that code replaced, as `half()` does, has
    no origin. If a module has several homes, add its submodules instead."""
    homes = {id(value): origin.device for value, origin in away}
    done = set[int]()
    tops = instances_in(namespace, nn.Module)
    for name, module in ((name, each) for name, top in tops for each in top.modules()):
        if id(module) in done:
            continue
        tensors = [*module.parameters(), *module.buffers()]
        now = {tensor.device for tensor in tensors}
        home = {homes.get(id(t), t.device) for t in tensors if id(t) in homes or t in first_found}
        if len(home) == len(now) == 1 and home != now:
            by_device.setdefault(home.pop(), []).append((name, module))
        if len(home) < 2:
            done.update(map(id, module.modules()))


def bring_home(namespace: dict[str, Any], origins: Origins | None = None) -> Moves:
    """Move the objects in `origins` back; by default, all objects that cells moved."""
    by_device: dict[torch.device, list[tuple[str, Any]]] = {}
    away = brought_away() if origins is None else origins
    # Skip gradients and optimizer state, because both move back with the parameters.
    states = [[*each.state.values()] for _, each in instances_in(namespace, Optimizer)]
    leaves = [each for each, _ in away if isinstance(each, Tensor) and each.is_leaf]
    following = set(map(id, [*tree_leaves(states), *(leaf.grad for leaf in leaves)]))
    for value, origin in away:
        if origin.named:
            own(value).update(origin.named)
        elif id(value) not in following:
            by_device.setdefault(origin.device, []).append((origin.name, value))
    _add_whole_modules(by_device, namespace, away)
    made = [move_all(values, device, namespace) for device, values in by_device.items()]
    if origins is None:
        _origins.clear()
    return all_of(made)
