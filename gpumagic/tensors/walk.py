"""Find the tensors that a value holds: in modules, optimizers and containers, each once."""

import dataclasses
import types
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

# A module's own dictionaries, which parameters(), buffers() and modules() already cover.
_MODULE_STATE = {"_parameters", "_buffers", "_modules"}
_SEQUENCES = (list, tuple, set, frozenset, deque)


@dataclass(frozen=True)
class Found:
    """A tensor, the variable through which it was found, and its path from there.

    `home` is a device that the tensor must be on whatever is asked for: an optimizer keeps its step
    counters on the CPU.
    """

    tensor: Tensor
    root: str
    path: str
    home: torch.device | None = None


@dataclass(frozen=True)
class Left:
    """A variable, or a part of one, that was not moved, and why."""

    name: str
    reason: str


class Walk:
    """Yields each tensor once, under the name of the variable that it was first found through.

    Attributes
    ----------
    left : list of Left
        Objects that must stay as a whole.
    recurrent : list of torch.nn.RNNBase
        The recurrent modules that were met.
    """

    def __init__(self) -> None:
        self.left: list[Left] = []
        self.recurrent: list[nn.RNNBase] = []
        self._seen: dict[int, object] = {}  # keeps what it met alive, so that an id stays its own

    def variables(self, variables: Iterable[tuple[str, object]]) -> Iterator[Found]:
        """Walk named values: optimizers last, so that modules lend their names to parameters."""
        later = []
        for name, value in variables:
            if isinstance(value, Optimizer):
                later.append((name, value))
            else:
                yield from self.value(value, name, name)
        for name, optimizer in later:
            yield from self.optimizer(optimizer, name)

    def _first_time(self, value: object) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def value(self, value: Any, root: str, path: str) -> Iterator[Found]:
        if isinstance(value, Tensor):
            yield from self.tensor(value, root, path)
        elif isinstance(value, nn.Module):
            yield from self.module(value, root, path)
        elif isinstance(value, Optimizer):
            yield from self.optimizer(value, root)
        elif isinstance(value, PackedSequence):
            if self._first_time(value):
                # batch_sizes stays: pack_padded_sequence's contract keeps it on the CPU.
                for name in ("data", "sorted_indices", "unsorted_indices"):
                    yield from self.value(getattr(value, name), root, f"{path}.{name}")
        elif isinstance(value, Mapping):
            if self._first_time(value) and _may_hold_tensors(value.values()):
                for key, item in list(value.items()):
                    yield from self.value(item, root, f"{path}[{key!r}]")
        elif isinstance(value, _SEQUENCES):
            if self._first_time(value) and _may_hold_tensors(value):
                fields = getattr(value, "_fields", None)
                for n, item in enumerate(list(value)):
                    name = f"{path}.{fields[n]}" if fields else f"{path}[{n}]"
                    yield from self.value(item, root, name)
        elif (
            dataclasses.is_dataclass(value)
            and not isinstance(value, type)
            and self._first_time(value)
        ):
            for data_field in dataclasses.fields(value):
                item = getattr(value, data_field.name, None)
                yield from self.value(item, root, f"{path}.{data_field.name}")

    def tensor(
        self, tensor: Tensor, root: str, path: str, home: torch.device | None = None
    ) -> Iterator[Found]:
        if self._first_time(tensor):
            yield Found(tensor, root, path, home)
            if tensor.is_leaf and tensor.grad is not None:
                yield from self.tensor(tensor.grad, root, f"{path}.grad", home)

    def module(self, module: nn.Module, root: str, path: str) -> Iterator[Found]:
        reason = _stays(module)
        if reason:
            if self._first_time(module):
                self.left.append(Left(path, reason))
            return
        for name, part in module.named_modules():
            if not self._first_time(part):
                continue
            where = f"{path}.{name}" if name else path
            if isinstance(part, nn.RNNBase):
                self.recurrent.append(part)
            own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            for key, tensor in own:
                yield from self.tensor(tensor, root, f"{where}.{key}")
            # Module.to() would leave behind a tensor that is neither parameter nor buffer.
            for key, item in list(vars(part).items()):
                if key not in _MODULE_STATE and not isinstance(item, nn.Module):
                    yield from self.value(item, root, f"{where}.{key}")

    def optimizer(self, optimizer: Optimizer, root: str) -> Iterator[Found]:
        if not self._first_time(optimizer):
            return
        for group in optimizer.param_groups:
            for n, parameter in enumerate(group["params"]):
                yield from self.tensor(parameter, root, f"{root}.params[{n}]")
        yield from self.state(optimizer, root)

    def state(
        self, optimizer: Optimizer, root: str, only: Container[int] | None = None
    ) -> Iterator[Found]:
        """Walk an optimizer's state; with `only`, that of parameters with these ids."""
        for group in optimizer.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                if only is not None and id(parameter) not in only:
                    continue
                for key, item in optimizer.state.get(parameter, {}).items():
                    path = f"{root}.state.{key}"
                    if key == "step" and isinstance(item, Tensor) and not on_device:
                        # As Optimizer.load_state_dict has it: the step counter is the host's.
                        yield from self.tensor(item, root, path, torch.device("cpu"))
                    else:
                        yield from self.value(item, root, path)


def _may_hold_tensors(items: Iterable[object]) -> bool:
    # A list of a million numbers is passed over at C speed.
    return any(not issubclass(kind, _PLAIN) for kind in set(map(type, items)))


_PLAIN = (int, float, complex, str, bytes, type(None), types.FunctionType, types.ModuleType)


def _stays(module: nn.Module) -> str:
    spread = getattr(module, "hf_device_map", None)
    if isinstance(spread, dict) and len(set(map(str, spread.values()))) > 1:
        return "its layers are spread over several devices (device_map)"
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return f"{type(module).__name__} keeps its own devices"
    return ""
