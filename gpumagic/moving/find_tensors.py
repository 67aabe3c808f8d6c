"""Find the tensors that a value holds: in modules, optimizers, containers and the notebook's own
objects, each tensor once.

Looks at types and never asks an object: a proxy is not woken, a file that acts as a mapping is not
read, and an object that answers every question with an error does no harm.
"""

import dataclasses
import types
from collections import ChainMap, UserDict, deque
from collections.abc import Container, Iterable, Mapping
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
# The path to a value: the variable's name, then a step for each part on the way.
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Found:
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


class Walk:
    """Collects each tensor once, under the variable that it was first found through.

    Parameters
    ----------
    module : str
        Plain objects whose class has this `__module__` are looked into; others are not.

    Attributes
    ----------
    found : list of Found
    left : list of Left
        Objects that must stay as a whole, and variables that could not be looked into.
    recurrent : list of torch.nn.RNNBase
        The recurrent modules that were met.
    """

    def __init__(self, module: str = "__main__") -> None:
        self.found: list[Found] = []
        self.left: list[Left] = []
        self.recurrent: list[nn.RNNBase] = []
        self._module = module
        self._seen: dict[int, object] = {}  # keeps what it met alive, so that an id stays its own

    def variables(self, variables: Iterable[tuple[str, object]]) -> None:
        """Walk named values: optimizers last, so that modules lend their names to parameters."""
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
        """Walk one value, whatever it is."""
        role = _role_of[type(value)]
        if role == "plain":
            return
        if role == "tensor":
            self.tensor(value, steps)
        elif not self._first_time(value):
            return
        elif role == "sequence":
            if _may_hold_tensors(value):
                names = getattr(type(value), "_fields", None)
                for n, item in enumerate(list(value)):
                    self.value(item, (*steps, (".", names[n]) if names else ("[]", n)))
        elif role == "mapping":
            if _may_hold_tensors(value.values()):
                for key, item in list(value.items()):
                    self.value(item, (*steps, ("[]", key)))
        elif role == "module":
            self._network(value, steps)
        elif role == "optimizer":
            self._optimizer(value, steps)
        elif role == "packed":
            # batch_sizes stays: pack_padded_sequence's contract keeps it on the CPU.
            for name in ("data", "sorted_indices", "unsorted_indices"):
                self.value(getattr(value, name), (*steps, (".", name)))
        elif role == "partial":
            self.value([value.func, value.args, value.keywords], steps)
        elif role == "method":
            self.value(value.__self__, (*steps, (".", "__self__")))
        elif role == "record" or self._is_the_notebooks(value):
            self._attributes(value, steps)

    def _is_the_notebooks(self, value: Any) -> bool:
        return (value if _is_class(value) else type(value)).__module__ == self._module

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
            self.found.append(Found(tensor, steps, home))
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
        """Walk an optimizer's state; with `only`, that of parameters with these ids."""
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


_ROLES = (
    ("tensor", Tensor),
    ("packed", PackedSequence),
    ("sequence", (list, tuple, set, frozenset, deque)),
    # In memory, and no other: to ask a file or a database for its values would read it.
    ("mapping", (dict, UserDict, ChainMap, types.MappingProxyType)),
    ("module", nn.Module),
    ("optimizer", Optimizer),
    # Data stays with its workers on the host; a loader's batches are delivered.
    ("plain", (*_PLAIN, Dataset)),
    ("partial", partial),
    ("method", types.MethodType),
    ("record", types.SimpleNamespace),
)


class _Roles(dict[type, str]):
    def __missing__(self, kind: type) -> str:
        fits = (role for role, kinds in _ROLES if issubclass(kind, kinds))
        role = next(fits, "record" if dataclasses.is_dataclass(kind) else "object")
        if kind.__module__ != "__main__":  # a class that a cell defines anew must be free to go
            self[kind] = role
        return role


_role_of = _Roles()


def _is_class(value: object) -> bool:
    return issubclass(type(value), type)  # isinstance would ask a proxy for its __class__


def own_attributes(value: object) -> Mapping[str, Any]:
    """An object's `__dict__`, without asking its `__getattr__`."""
    try:
        held: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held


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
