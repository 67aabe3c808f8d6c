"""Find the tensors in modules, optimizers, containers and objects, each tensor once."""

import gc
import sys
import types
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from inspect import CO_VARARGS
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpumagic.moving.moved import DATASET_STAYS, Left
from gpumagic.usercode.values import (
    CONTAINERS,
    PLAIN,
    Path,
    attributes,
    defined_in,
    is_open,
    items,
    members_of,
    own,
    written,
)

_MODULE_STATE = ("_parameters", "_buffers", "_modules")
_EVERY_MODULES = vars(nn.Module()).keys()  # attributes of every module, such as hooks
_DEPTH, _OBJECTS = 4, 500  # limits for objects of libraries: nesting, and number per variable
_MANY = 1000  # containers of plain data with this many items or more are not searched
DEVICE_NAMES = ("device", "_device")  # attributes that may name a device

NUMPY_STAYS = "its library uses NumPy, which reads only tensors on the CPU"


@dataclass(frozen=True)
class FoundTensor:
    """A tensor, and the path from a variable to the tensor."""

    tensor: Tensor
    steps: Path
    home: torch.device | None = None  # the CPU for an optimizer's step counter, else None

    @property
    def root(self) -> str:
        """The variable through which the tensor was found."""
        return str(self.steps[0])

    @property
    def path(self) -> str:
        """The tensor's path as code: ``net.layer.weight``, ``batch['x']``."""
        return written(self.steps)

    def must_move(self, device: torch.device) -> bool:
        """Whether the tensor must be copied for a move to `device`."""
        return self.tensor.device != (self.home or device)


@dataclass(frozen=True)
class Held:
    """An object with its path and tensors; if the tensors stay where they are, also the reason."""

    value: Any
    steps: Path
    tensors: list[FoundTensor]
    reason: str = ""

    def must_move(self, device: torch.device) -> bool:
        """Whether any tensor in the object must be copied for a move to `device`."""
        return any(found.must_move(device) for found in self.tensors)

    @property
    def left(self) -> Left:
        """The report that the object stays on its device."""
        return Left(written(self.steps), self.reason, str(self.tensors[0].tensor.device))


class TensorFinder:
    """Collect each tensor of variables once, under the variable through which it was first found.
    With `every_path`, collect a tensor once for each path to it.
    The limits `_DEPTH` and `_OBJECTS` do not apply to objects of classes in `module`."""

    def __init__(
        self,
        variables: Iterable[tuple[str, object]] = (),
        module: str = "__main__",
        *,
        every_path: bool = False,
    ) -> None:
        self.found: list[FoundTensor] = []
        self.left: list[Left] = []  # values that do not move, or could not be searched
        self.modules: list[nn.Module] = []
        self.staying: list[Held] = []
        self.movable: list[Held] = []  # objects with a method `to`
        self.naming: list[tuple[Any, str]] = []  # (object that names a device, variable's name)
        self._module, self._every_path = module, every_path
        self._depth = self._objects = 0
        self._seen: dict[int, object] = {}  # keeps visited objects alive, so that ids stay unique
        # Optimizers come last, so that parameters are found in modules first.
        for name, value in sorted(variables, key=lambda item: issubclass(type(item[1]), Optimizer)):
            self._depth = self._objects = 0
            try:
                self.value(value, (name,))
            except Exception as error:  # noqa: BLE001  the user's own containers may raise anything
                self.left.append(Left(name, f"searching it raised {type(error).__name__}"))

    @property
    def tensors(self) -> list[FoundTensor]:
        """All found tensors, including those in `movable` objects."""
        return [*self.found, *(found for held in self.movable for found in held.tensors)]

    def _first_time(self, value: object) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def value(self, value: Any, steps: Path) -> None:
        """Search one value of any type."""
        look = _look_into[type(value)]
        if look is not None and (look is TensorFinder.tensor or self._first_time(value)):
            look(self, value, steps)

    def _container(self, container: Any, steps: Path) -> None:
        if len(gc.get_referents(container)) < _MANY or not self._is_plain([container]):
            for step, item in items(container):
                self.value(item, (*steps, step))

    def _is_plain(self, values: list[Any]) -> bool:
        """Whether these containers, and objects of the notebook in them, hold only plain data."""
        # gc.get_referents follows references in C, so this is ten times faster than a search.
        # An object that the collector does not track cannot refer to a tensor.
        seen = set[int]()
        while values := [*filter(gc.is_tracked, values)]:
            looks = {kind: look for kind in set(map(type, values)) if (look := _look_into[kind])}
            if not all(map(self._is_followed, looks, looks.values())):
                return False
            values = [value for value in values if type(value) in looks]
            new = dict(zip(map(id, values), values, strict=True))
            for number in seen & new.keys():
                del new[number]
            seen.update(new)
            values = self._referents(new.values(), {k for k in looks if issubclass(k, type)})
        return True

    def _referents(self, values: Iterable[Any], of_types: set[type]) -> list[Any]:
        """Return the objects to which `values` refer; skip classes outside `self._module`."""
        classes = [value for value in values if type(value) in of_types]
        found = gc.get_referents(*(value for value in values if type(value) not in of_types))
        found += (v for c in classes if defined_in(c) == self._module for v in own(c).values())
        return found

    def _is_followed(self, kind: type, look: Any) -> bool:
        ours = issubclass(kind, type) or defined_in(kind) == self._module
        return look is TensorFinder._container or (ours and look is TensorFinder._object)

    def _packed(self, packed: PackedSequence, steps: Path) -> None:
        for name in ("data", "sorted_indices", "unsorted_indices"):  # batch_sizes stays
            self.value(getattr(packed, name), (*steps, (".", name)))

    def _object(self, value: Any, steps: Path) -> None:
        is_class = issubclass(type(value), type)  # isinstance would evaluate a proxy's __class__
        if defined_in(value if is_class else type(value)) == self._module:
            self._attributes(value, steps)
            if not is_class and self._first_time(type(value)):
                self._attributes(type(value), steps)
        elif not is_class and self._depth < _DEPTH and self._objects < _OBJECTS:
            self._objects += 1
            self._depth += 1
            self._library_object(value, steps)
            self._depth -= 1

    def _library_object(self, value: Any, steps: Path) -> None:
        if _has_to(type(value)):
            finder = TensorFinder((), self._module, every_path=self._every_path)
            finder._depth, finder._objects = self._depth, self._objects
            finder._first_time(value)
            finder._attributes(value, steps)
            self._objects = finder._objects
            self.movable += [Held(value, steps, finder.tensors)] if finder.tensors else []
            return
        for name, item in attributes(value).items():
            if name.endswith("dataset") and issubclass(type(item), CONTAINERS):
                self._first_time(item)  # do not search it later, because a dataset stays
        imports = vars(sys.modules.get(defined_in(type(value)), types)).values()
        stays = "numpy" in sys.modules and any(one is sys.modules["numpy"] for one in imports)
        held = self._attributes(value, steps, tensors=not stays)
        if stays:
            tensors = [FoundTensor(t, steps) for t in held.values() if issubclass(type(t), Tensor)]
            self.staying.append(Held(value, steps, tensors, NUMPY_STAYS))
        if torch.device in map(type, held.values()) or not held.keys().isdisjoint(DEVICE_NAMES):
            self.naming.append((value, str(steps[0])))

    def _dataset(self, dataset: Any, steps: Path) -> None:
        held = [*attributes(dataset).values()]
        held += [first for value in held for _, first in items(value, 1)]
        tensors = [FoundTensor(value, steps) for value in held if issubclass(type(value), Tensor)]
        self.staying.append(Held(dataset, steps, tensors, DATASET_STAYS))

    def _attributes(self, value: Any, steps: Path, *, tensors: bool = True) -> dict[str, Any]:
        held = attributes(value)
        for name, item in held.items():
            if tensors or not issubclass(type(item), Tensor):
                self.value(item, (*steps, (".", name)))
        return held

    def tensor(self, tensor: Tensor, steps: Path, home: torch.device | None = None) -> None:
        """Record a tensor and its gradient."""
        if self._first_time(tensor) or self._every_path:
            self.found.append(FoundTensor(tensor, steps, home))
            if tensor.is_leaf and tensor.grad is not None:
                self.tensor(tensor.grad, (*steps, (".", "grad")), home)

    def _network(self, module: nn.Module, steps: Path) -> None:
        if reason := _stays(module):
            self.left.append(Left(written(steps), reason))
            return
        self.modules.append(module)
        if "_device" in vars(module):  # as in Lightning's modules and torchmetrics
            self.naming.append((module, str(steps[0])))
        for part in _MODULE_STATE:
            for name, item in getattr(module, part).items():
                self.value(item, (*steps, (".", name)))
        # Also search other attributes, which Module.to() does not move. Skip results of forward().
        for name, item in list(vars(module).items()):
            if name in _EVERY_MODULES and (name in _MODULE_STATE or not item):
                continue
            if not issubclass(type(item), Tensor) or item.grad_fn is None:
                self.value(item, (*steps, (".", name)))

    def _optimizer(self, optimizer: Optimizer, steps: Path) -> None:
        for group in optimizer.param_groups:
            for key, item in group.items():
                self.value(item, (*steps, (".", key)))
        self.state(optimizer, steps)

    def state(self, optimizer: Optimizer, steps: Path, only: Container[int] | None = None) -> None:
        """Search an optimizer's state, or only the state of parameters with the ids in `only`."""
        for group in optimizer.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                if only is not None and id(parameter) not in only:
                    continue
                for key, item in optimizer.state.get(parameter, {}).items():
                    path = (*steps, (".", "state"), (".", key))
                    if key == "step" and isinstance(item, Tensor) and not on_device:
                        # As in Optimizer.load_state_dict, the step counter stays on the CPU.
                        self.tensor(item, path, torch.device("cpu"))
                    else:
                        self.value(item, path)


def nbytes_held(variables: Iterable[tuple[str, Any]], device: str) -> int:
    """Return the bytes of the variables' storages on `device`. Each storage counts once."""
    storages = {}
    for found in TensorFinder(variables).tensors:
        if str(found.tensor.device) == device:
            with suppress(RuntimeError, NotImplementedError):  # a sparse tensor has no storage
                storage = found.tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


_Look = Callable[[TensorFinder, Any, Path], object]
_LOOKS: tuple[tuple[_Look | None, Any], ...] = (
    (TensorFinder.tensor, Tensor),
    (TensorFinder._packed, PackedSequence),
    (TensorFinder._network, nn.Module),
    (TensorFinder._optimizer, Optimizer),
    (TensorFinder._dataset, Dataset),  # stays, because DataLoader workers read datasets
    (None, (*PLAIN, torch.device, DataLoader, Sampler, _BaseDataLoaderIter)),
    (TensorFinder._container, CONTAINERS),
    (TensorFinder._attributes, types.SimpleNamespace),
)


class _LookInto(dict[type, _Look | None]):
    """Cache the search function of each type; None for a type without tensors to move."""

    def __missing__(self, kind: type) -> _Look | None:
        looks = TensorFinder._object if issubclass(kind, type) or is_open(kind) else None
        look = next((look for look, kinds in _LOOKS if issubclass(kind, kinds)), looks)
        if defined_in(kind) != "__main__":  # a cell's class may be redefined, so do not cache
            self[kind] = look
        return look


_look_into = _LookInto()


def _has_to(kind: type) -> bool:
    """Whether objects of class `kind` have a method `to` that accepts a device."""
    to = next((members_of(b)["to"] for b in kind.__mro__ if "to" in members_of(b)), None)
    if type(to) is not types.FunctionType:
        return False
    code = to.__code__
    return "device" in code.co_varnames[: code.co_argcount] or bool(code.co_flags & CO_VARARGS)


def _stays(module: nn.Module) -> str:
    spread = vars(module).get("hf_device_map")
    if isinstance(spread, dict) and len(set(map(str, spread.values()))) > 1:
        return "its layers are spread over several devices (device_map)"
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return f"{type(module).__name__} keeps its own devices"
    return ""
