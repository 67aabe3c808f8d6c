"""Ask whether a value is torch's, which may not be installed: nothing is imported for that."""

import sys
from typing import Any


def torch_here() -> Any:
    """The module `torch` if this process has imported it, else None."""
    return sys.modules.get("torch")


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of torch's, by its type."""
    kind = getattr(torch_here(), "Tensor", None)
    return kind is not None and issubclass(type(value), kind)


def is_module(value: object) -> bool:
    """Whether it is a module of torch's, by its type."""
    kind = getattr(getattr(torch_here(), "nn", None), "Module", None)
    return kind is not None and issubclass(type(value), kind)
