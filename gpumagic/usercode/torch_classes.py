"""Ask whether a value is torch's, which may not be installed: nothing is imported for that."""

import sys
from typing import Any


def torch_here() -> Any:
    """The module `torch` if this process has imported it, else None."""
    return sys.modules.get("torch")


def comes_from(kind: type, *names: str) -> bool:
    """Whether a class is one of these, or comes from one: ``"torch.nn.Module"``."""
    for name in names:
        module, _, word = name.rpartition(".")
        known = getattr(sys.modules.get(module), word, None)
        if known is not None and issubclass(kind, known):
            return True
    return False


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of torch's, by its type."""
    return comes_from(type(value), "torch.Tensor")


def is_module(value: object) -> bool:
    """Whether it is a module of torch's, by its type."""
    return comes_from(type(value), "torch.nn.Module")
