"""Record a tensor that a variable holds, the way to it, and what was left."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The path to a value: the variable's name, then a step for each part on the way.
Path = tuple[Any, ...]


@dataclass(frozen=True)
class FoundTensor:
    """A tensor, its path from a variable, and a device that it must be on whatever is asked for."""

    tensor: Tensor
    steps: Path
    home: torch.device | None = None  # the CPU for an optimizer's step counters

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


@dataclass(frozen=True)
class Held:
    """An object of a library, its path, the tensors that were found in it, and why they stay."""

    value: Any
    steps: Path
    tensors: list[FoundTensor]
    reason: str = ""

    def must_move(self, device: torch.device) -> bool:
        """Whether a tensor of it is elsewhere, when `device` is asked for."""
        return any(found.must_move(device) for found in self.tensors)


def written(steps: Path) -> str:
    """A path as a person would write it."""
    text = str(steps[0])
    for kind, key in steps[1:]:
        try:
            text += f".{key}" if kind == "." else f"[{key!r}]"
        except Exception:  # noqa: BLE001  the repr of a user's key
            text += "[…]"
    return text
