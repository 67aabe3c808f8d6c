"""Replace values that depend on data, and end the dry run where one would decide.

Guarantees: an unknown value never becomes a number by itself. It can be stored, shown and computed
with.
"""

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gpumagic.dryrun.result import Assigned
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.usercode.lines import UserLine, innermost

raised: list["Stopped"] = []
"""Of the dry run that is under way: a bare `except:` must not hide them."""


class Stopped(BaseException):
    """End a dry run; no `except Exception` of the user's may take it for an error."""

    def __init__(self, reason: str, where: UserLine | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = where or innermost(sys._getframe(1))
        raised.append(self)


# Of the kernel's answers, as libraries in C put them: C's own, and SQLite's.
_REFUSED = (os.strerror(errno.EACCES), "disk I/O error")


def is_refusal(error: BaseException) -> bool:
    """Whether an error is the kernel's answer to a writer that Python does not see."""
    number = error.errno if isinstance(error, OSError) else None
    told = any(words in str(error) for words in _REFUSED)
    if number not in (errno.EACCES, errno.EBADF, errno.ENOTSOCK) and not told:
        return False
    path = getattr(error, "filename", None)
    if not isinstance(path, (str, bytes)):
        return True
    # Not where it may not be written anyway: that is the user's own error.
    return os.access(path if os.path.lexists(path) else os.path.dirname(path) or ".", os.W_OK)


_HOSTS: tuple[tuple[str, float | None], ...] = (
    ("torch.optim.lbfgs", None),  # how often it goes on, the data decide
    ("torch.optim", 2.0),  # steps: 1 less something, such as NAdam's products, may divide
    ("torch.nn.modules.transformer", 1.0),  # whether a mask is the causal one
    ("torch.amp", 0.0),
    ("torch.cuda.amp", 0.0),
    ("torch.utils.data", 0),
    ("transformers.trainer", 0.0),  # whether a loss is not finite
    ("torch.distributions", 1.0),  # that arguments are what they must be
)


def host_value(frame: FrameType | None) -> float | None:
    """Return a number that library code on the host only counts or scales with; None for others."""
    name = str(frame.f_globals.get("__name__")) if frame is not None else ""
    return next((value for start, value in _HOSTS if name.startswith(start)), None)


class NotKnown:
    """Represent a number that depends on data, such as ``loss.item()``.

    Arithmetic with it gives another; `torch` takes it wherever a number only scales values. A
    comparison, a conversion or a use as a size ends the dry run.
    """

    __slots__ = ("what", "whole")

    def __init__(self, what: str = "a value of a tensor", *, whole: bool = False) -> None:
        self.what = what
        self.whole = whole  # an integer: torch's type promotion asks

    def __repr__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        return "?"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that ask first: numpy, copy, pickle
            raise AttributeError(name)
        raise Stopped(f".{name} of {self.what} depends on data")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise Stopped(f"{getattr(func, '__name__', func)} needs a number that depends on data")


def _computes(name: str) -> Callable[..., Any]:
    def compute(self: NotKnown, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return NotImplemented  # a tensor knows what its result looks like
        parts = (getattr(other, "whole", isinstance(other, int)) for other in others)
        return NotKnown(self.what, whole=self.whole and "truediv" not in name and all(parts))

    return compute


def _decides(does: str) -> Callable[..., Any]:
    def decide(self: NotKnown, *others: Any) -> Any:
        raise Stopped(f"{does} {self.what} depends on data")

    return decide


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "pos", "abs", "round"):
    setattr(NotKnown, f"__{_name}__", _computes(f"__{_name}__"))
for _name, _does in {
    **dict.fromkeys(("bool", "lt", "le", "gt", "ge", "eq", "ne"), "a condition on"),
    **dict.fromkeys(("int", "float", "index", "complex", "trunc", "floor", "ceil"), "the value of"),
    "hash": "a key that is",
    **dict.fromkeys(("iter", "len", "getitem", "contains", "call"), "the contents of"),
}.items():
    setattr(NotKnown, f"__{_name}__", _decides(_does))


def describe(name: str, value: Any) -> Assigned:
    """A variable's kind, device and bytes."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape = tuple(int(n) for n in value.shape)
        return Assigned(
            name, f"{dtype}{list(shape)}", str(value.device), value.nbytes, shape, value.dtype
        )
    if isinstance(value, NotKnown):
        return Assigned(name, "a value that depends on data")
    finder = TensorFinder()
    finder.variables([(name, value)])
    tensors = [found.tensor for found in finder.tensors]
    devices = dict.fromkeys(str(t.device) for t in tensors)
    nbytes = sum(t.nbytes for t in tensors)
    return Assigned(name, _words(value, tensors), ", ".join(devices), nbytes)


def _words(value: Any, tensors: list[Tensor]) -> str:
    kind = type(value).__name__
    if isinstance(value, nn.Module):
        count = sum(1 for _ in value.parameters())
        return f"{kind}, {_many(count, 'parameter')}"
    if isinstance(value, Optimizer):
        count = sum(len(group["params"]) for group in value.param_groups)
        return f"{kind} of {_many(count, 'parameter')}"
    if isinstance(value, (list, tuple, dict, set)):
        return f"{kind} of {len(value)}" + (f", {_many(len(tensors), 'tensor')}" * bool(tensors))
    if isinstance(value, (bool, int, float, str)) and len(repr(value)) <= 40:
        return f"{kind} {value!r}"
    if is_dataclass(value) and tensors:
        return f"{kind}, {_many(len(tensors), 'tensor')}"
    return kind


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
