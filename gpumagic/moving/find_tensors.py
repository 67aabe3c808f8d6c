"""Find the tensors that a value holds, each once: in modules, optimizers, containers and objects.

It goes by types and calls no code of an object's: a proxy stays as it is, a file that acts as a
mapping is not read, and an object whose every attribute raises does no harm.
"""

import types
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils.data import Dataset

# A module's own dictionaries, which parameters(), buffers() and modules() already cover.
_MODULE_STATE = {"_parameters", "_buffers", "_modules"}
_PLAIN = {int, float, complex, bool, str, bytes, type(None), types.ModuleType, torch.device}
# The module of a class, whatever its metaclass answers.
module_of = vars(type)["__module__"].__get__
# The path to a value: the variable's name, then a step for each part on the way.
Path = tuple[Any, ...]


@dataclass(frozen=True)
class FoundTensor:
    """A tensor, its path from a variable, and a device that it must be on whatever is asked for.

    An optimizer keeps its step counters on the CPU: those have a `home`.
    """

    tensor: Tensor
    steps: Path
    home: torch.device | None = None

    @property
    def root(self) -> str:
        """The variable through which it was found."""
        return str(self.steps[0])

    @property
    def path(self) -> str:
        """How a person would write it: ``net.layer.weight``, ``batch['x']``."""
        return written(self.steps)

    def must_move(self, device: torch.device) -> bool:
        """Whether it is elsewhere, when `device` is asked for."""
        return self.tensor.device != (self.home or device)


@dataclass(frozen=True)
class Left:
    """A variable, or a part of one, that was not moved, and why."""

    name: str
    reason: str


def written(steps: Path) -> str:
    """A path as a person would write it."""
    text = str(steps[0])
    for kind, key in steps[1:]:
        try:
            text += f".{key}" if kind == "." else f"[{key!r}]"
        except Exception:  # noqa: BLE001  the repr of a user's key
            text += "[…]"
    return text


class TensorFinder:
    """Collects each tensor once, under the variable that it was first found through.

    Of plain objects, those are looked into whose class is of the module `module`.
    """

    def __init__(self, module: str = "__main__") -> None:
        self.found: list[FoundTensor] = []
        self.left: list[Left] = []  # what stays as a whole, or could not be looked into
        self.recurrent: list[nn.RNNBase] = []
        self._module = module
        self._seen: dict[int, object] = {}  # keeps what it met alive, so that an id stays its own

    def variables(self, variables: Iterable[tuple[str, object]]) -> None:
        """Look into named values: optimizers last, so that modules name the parameters."""
        later = []
        for name, value in variables:
            if issubclass(type(value), Optimizer):
                later.append((name, value))
            else:
                self._guarded(name, value)
        for name, optimizer in later:
            self._guarded(name, optimizer)

    def _guarded(self, name: str, value: object) -> None:
        try:
            self.value(value, (name,))
        except Exception as error:  # noqa: BLE001  what the user's own containers may raise
            self.left.append(Left(name, f"looking into it raised {type(error).__name__}"))

    def _first_time(self, value: object) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def value(self, value: Any, steps: Path) -> None:
        """Look into one value, whatever it is."""
        look = _look_into[type(value)]
        if look is not None and (look is TensorFinder.tensor or self._first_time(value)):
            look(self, value, steps)

    def _sequence(self, items: Any, steps: Path) -> None:
        if _may_hold_tensors(items):
            names = getattr(type(items), "_fields", None)
            for n, item in enumerate(list(items)):
                self.value(item, (*steps, (".", names[n]) if names else ("[]", n)))

    def _mapping(self, mapping: Any, steps: Path) -> None:
        if _may_hold_tensors(mapping.values()):
            for key, item in list(mapping.items()):
                self.value(item, (*steps, ("[]", key)))

    def _packed(self, packed: PackedSequence, steps: Path) -> None:
        # batch_sizes stays: pack_padded_sequence's contract keeps it on the CPU.
        for name in ("data", "sorted_indices", "unsorted_indices"):
            self.value(getattr(packed, name), (*steps, (".", name)))

    def _partial(self, call: Any, steps: Path) -> None:
        self.value([call.func, call.args, call.keywords], steps)

    def _method(self, method: types.MethodType, steps: Path) -> None:
        self.value(method.__self__, (*steps, (".", "__self__")))

    def _object(self, value: Any, steps: Path) -> None:
        kind = value if _is_class(value) else type(value)
        if module_of(kind) == self._module:
            self._attributes(value, steps)

    def _attributes(self, value: Any, steps: Path) -> None:
        """Of a dataclass, or of an object or a class of the notebook itself."""
        held = dict(vars(value) if _is_class(value) else own_attributes(value))
        for base in type(value).__mro__:
            for name, slot in vars(base).items():
                if type(slot) is types.MemberDescriptorType and "__slots__" in vars(base):
                    with suppress(AttributeError):  # never set
                        held[name] = slot.__get__(value)
        for name, item in held.items():
            self.value(item, (*steps, (".", name)))

    def tensor(self, tensor: Tensor, steps: Path, home: torch.device | None = None) -> None:
        """Note a tensor, and its gradient."""
        if self._first_time(tensor):
            self.found.append(FoundTensor(tensor, steps, home))
            if tensor.is_leaf and tensor.grad is not None:
                self.tensor(tensor.grad, (*steps, (".", "grad")), home)

    def _network(self, module: nn.Module, steps: Path) -> None:
        if reason := _stays(module):
            self.left.append(Left(written(steps), reason))
            return
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            self.tensor(tensor, (*steps, (".", name)))
        if isinstance(module, nn.RNNBase):
            self.recurrent.append(module)
        for name, child in module.named_children():
            self.value(child, (*steps, (".", name)))
        # Module.to() would leave behind a tensor that is neither parameter nor buffer. One that
        # autograd tracks is what forward() keeps of its last run, and will make anew.
        for name, item in list(vars(module).items()):
            kept = issubclass(type(item), Tensor) and item.grad_fn is not None
            if name not in _MODULE_STATE and not kept:
                self.value(item, (*steps, (".", name)))

    def _optimizer(self, optimizer: Optimizer, steps: Path) -> None:
        for group in optimizer.param_groups:
            for key, item in group.items():
                self.value(item, (*steps, (".", key)))
        self.state(optimizer, steps)

    def state(self, optimizer: Optimizer, steps: Path, only: Container[int] | None = None) -> None:
        """Look into an optimizer's state; with `only`, that of parameters with these ids."""
        for group in optimizer.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                if only is not None and id(parameter) not in only:
                    continue
                for key, item in optimizer.state.get(parameter, {}).items():
                    path = (*steps, (".", "state"), (".", key))
                    if key == "step" and isinstance(item, Tensor) and not on_device:
                        # As Optimizer.load_state_dict has it: the step counter is the host's.
                        self.tensor(item, path, torch.device("cpu"))
                    else:
                        self.value(item, path)


_Look = Callable[[TensorFinder, Any, Path], None]
_LOOKS: tuple[tuple[_Look | None, Any], ...] = (
    (TensorFinder.tensor, Tensor),
    (TensorFinder._packed, PackedSequence),
    (TensorFinder._sequence, (list, tuple, set, frozenset, deque)),
    # In memory, and no other: to ask a file or a database for its values would read it.
    (TensorFinder._mapping, (dict, UserDict, ChainMap, types.MappingProxyType)),
    (TensorFinder._network, nn.Module),
    (TensorFinder._optimizer, Optimizer),
    # Data stays with its workers on the host; a loader's batches are delivered.
    (None, (*_PLAIN, Dataset)),
    (TensorFinder._partial, partial),
    (TensorFinder._method, types.MethodType),
    (TensorFinder._attributes, types.SimpleNamespace),
)


class _LookInto(dict[type, _Look | None]):
    """How each type is looked into; None where it holds no tensors to move."""

    def __missing__(self, kind: type) -> _Look | None:
        otherwise = TensorFinder._object
        if any("__dataclass_fields__" in vars(base) for base in kind.__mro__):
            otherwise = TensorFinder._attributes
        look = next((look for look, kinds in _LOOKS if issubclass(kind, kinds)), otherwise)
        if module_of(kind) != "__main__":  # a class that a cell defines anew must be free to go
            self[kind] = look
        return look


_look_into = _LookInto()


def _is_class(value: object) -> bool:
    return issubclass(type(value), type)  # isinstance would ask a proxy for its __class__


def own_attributes(value: object) -> Mapping[str, Any]:
    """An object's `__dict__`, without asking its `__getattr__`."""
    try:
        held: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held


def optimizers_in(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers that a notebook holds, by name: also in small containers and own objects."""
    for name, value in list(namespace.items()):
        for path, item in _near(name, value):
            if issubclass(type(item), Optimizer):
                yield path, item


def _near(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if type(value) in (list, tuple, dict) and len(value) <= 100:
        yield from ((name, item) for item in (value.values() if type(value) is dict else value))
    elif module_of(type(value)) == "__main__":
        for attribute, item in own_attributes(value).items():
            yield f"{name}.{attribute}", item


def _may_hold_tensors(items: Iterable[object]) -> bool:
    # A list of a million numbers is passed over at C speed.
    return not set(map(type, items)) <= _PLAIN


def _stays(module: nn.Module) -> str:
    spread = vars(module).get("hf_device_map")
    if isinstance(spread, dict) and len(set(map(str, spread.values()))) > 1:
        return "its layers are spread over several devices (device_map)"
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return f"{type(module).__name__} keeps its own devices"
    return ""
