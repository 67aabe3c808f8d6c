"""Turn real tensors into fakes (tensors without data); represent numbers that depend on data.

A tensor becomes a fake in place, so every name, container, view, module and optimizer now refers to
the fake. Tensors that share memory become fakes that share memory. The code can store a number that
depends on data, print it and compute with it. The dry run ends if the code branches on the number.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch

# `suspended` imports the next module. An import during a dry run would call `suspended` again.
import torch._subclasses.schema_check_mode
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from gpumagic.display.units import many
from gpumagic.dryrun.result import Assigned
from gpumagic.faults import first_line
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.move import bytes_of
from gpumagic.usercode.files import UserLine, innermost
from gpumagic.usercode.values import saved_by

raised: list["Stopped"] = []  # recorded, because a bare `except:` may swallow a `Stopped`


class Stopped(BaseException):
    """End a dry run. The class is no `Exception`, so a user's `except Exception` has no effect."""

    def __init__(self, reason: str, where: UserLine | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = where or innermost(sys._getframe(1))
        raised.append(self)


def refusing(reason: str) -> Callable[..., Any]:
    """Return a function whose call ends the dry run."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise Stopped(reason)

    return refuse


def is_refusal(error: BaseException) -> bool:
    """Whether an error arose because Linux refused a write by C or C++ code."""
    number = error.errno if isinstance(error, OSError) else None
    # Messages of libc and SQLite for a refused write.
    in_message = any(words in str(error) for words in (os.strerror(errno.EACCES), "disk I/O error"))
    if number not in (errno.EACCES, errno.EBADF, errno.ENOTSOCK) and not in_message:
        return False
    path = getattr(error, "filename", None)
    if not isinstance(path, (str, bytes)):
        return True
    # If this process may write to the path, a real run would not fail, so the error is a refusal.
    return os.access(path if os.path.lexists(path) else os.path.dirname(path) or ".", os.W_OK)


# Made-up values of the tensors that a library reads, by the start of the library's module name.
_HOSTS: tuple[tuple[str, float | None], ...] = (
    ("torch.optim.lbfgs", None),  # no value, because the data decide when LBFGS stops
    ("torch.optim", 2.0),  # a step count or NAdam's mu_product; with 1, torch would divide by 0
    ("torch.nn.modules.transformer", 1.0),  # the answer to "is the mask causal?" is yes
    ("torch.amp", 0.0),  # no gradient is infinite
    ("torch.utils.data", 0),
    ("transformers.trainer", 0.0),  # the answer to "is the loss NaN?" is no
    ("torch.distributions", 1.0),  # the answer to "are the arguments valid?" is yes
)


def host_value(frame: FrameType | None) -> float | None:
    """Return a made-up value if `frame` is in a library that needs no true value; else None."""
    name = str(frame.f_globals.get("__name__")) if frame is not None else ""
    return next((value for start, value in _HOSTS if name.startswith(start)), None)


class NotKnown:
    """Represent a number that depends on data, such as ``loss.item()``."""

    # Calls that scale or fill tensors get 1 or NaN (answers.py). Other calls end the dry run.
    __slots__ = ("what", "whole")

    def __init__(self, what: str = "a value of a tensor", *, whole: bool | None = False) -> None:
        self.what = what
        self.whole = whole  # whether the value is an integer; None if the type is unknown

    def __repr__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        return "?"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # optional protocols of numpy, copy and pickle
            raise AttributeError(name)
        if self.whole is not None and not (hasattr(0, name) or hasattr(0.0, name)):
            raise AttributeError(f"a number has no attribute {name!r}")
        raise Stopped(f".{name} of {self.what} depends on data")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise Stopped(f"{getattr(func, '__name__', func)} needs a number that depends on data")


def _computes(name: str) -> Callable[..., Any]:
    def compute(self: NotKnown, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return NotImplemented  # Python then tries the tensor's own operator
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
    "hash": "the hash of",
    **dict.fromkeys(("iter", "len", "getitem", "contains", "call"), "the contents of"),
}.items():
    setattr(NotKnown, f"__{_name}__", _decides(_does))


def describe(name: str, value: Any) -> Assigned:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape = tuple(int(n) for n in value.shape)
        return Assigned(
            name, f"{dtype}{list(shape)}", str(value.device), bytes_of(value), shape, value.dtype
        )
    if isinstance(value, NotKnown):
        return Assigned(name, "a value that depends on data")
    tensors = [found.tensor for found in TensorFinder([(name, value)]).tensors]
    kind = type(value).__name__
    if isinstance(value, (list, tuple, dict, set)):
        kind += f" of {len(value)}"
    elif isinstance(value, (bool, int, float, str)) and len(repr(value)) <= 40:
        kind += f" {value!r}"
    if tensors:
        kind += f", {many(len(tensors), 'tensor')}"
    devices = ", ".join(dict.fromkeys(str(t.device) for t in tensors))
    return Assigned(name, kind, devices, sum(map(bytes_of, tensors)))


class Fakes(FakeTensorMode):
    """Make fakes as torch does, but without device memory or a CUDA context."""

    with_graphs = True  # whether to count tensors that earlier autograd graphs saved

    def __init__(self, count: Callable[[Any], None], tracked: Callable[[], None]) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        # `count` is called with each new fake, `tracked` when a backward pass reaches a `_Cut`.
        self._count, self._tracked = count, tracked
        self._kept: list[Tensor] = []  # keeps real tensors: freeing one would call the driver
        self._without: dict[int, str] = {}  # why a tensor has no fake, by the tensor's id
        self._graphs: WeakValueDictionary[Any, _Graph] = WeakValueDictionary()

    @property
    def avoid_device_init(self) -> bool:
        return True

    def __deepcopy__(self, memo: object) -> "Fakes":
        return self  # copied modules must use the same mode

    def take_over(self, finder: TensorFinder) -> None:
        """Turn all tensors that `finder` has found into fakes."""
        scripted = [
            (module._c, name, tensor)
            for module in finder.modules
            if isinstance(module, torch.jit.ScriptModule)
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(recurse=False)
        ]
        for found in finder.tensors:
            if is_real(found.tensor):
                self._convert(found.tensor)
        for module, name, tensor in scripted:
            module.setattr(name, tensor)  # otherwise, C++ code would use the real tensor

    def fake(self, tensor: Tensor) -> None:
        """Turn a tensor that the code uses into a fake; raise `Stopped` if that is impossible."""
        if id(tensor) not in self._without:
            self._convert(tensor)
        if id(tensor) in self._without:
            raise Stopped(self._without[id(tensor)])

    def _convert(self, tensor: Tensor) -> None:
        gradient = tensor.grad if tensor.is_leaf else None
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
        try:
            fake = self._fake_of(tensor)
        except Exception as error:  # noqa: BLE001  reported if the code uses the tensor
            why = "it is nested" if tensor.is_nested else first_line(error)
            kind = f"{type(tensor).__name__} ({tensor.layout})"
            self._without[id(tensor)] = f"a dry run cannot follow a {kind}: {why}"
            self._kept.append(tensor)
            return
        new_gradient = fake.grad if fake.is_leaf else None
        self._become(tensor, fake)
        if tensor.grad_fn is None and tensor.requires_grad:
            tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks
        self._count(tensor)
        if gradient is not None and is_real(gradient):
            self._become(gradient, new_gradient)
            self._count(gradient)

    def _become(self, tensor: Any, fake: Any) -> None:
        kind, tensor.__class__ = tensor.__class__, fake.__class__
        fake.__class__ = kind
        vars(tensor).update(vars(fake))
        torch._C._swap_tensor_impl(tensor, fake)
        self._kept.append(fake)

    def _fake_of(self, tensor: Tensor) -> Any:
        if is_lazy(tensor):
            raise NotImplementedError("its shape is not known yet")
        if type(tensor) is not Tensor and not isinstance(tensor, (nn.Parameter, nn.Buffer)):
            raise NotImplementedError("it is not a plain tensor")
        with suspended():
            if _is_a_number(tensor):
                convert = self.fake_tensor_converter.from_real_tensor
                return convert(self, tensor.clone(), make_constant=True)
            fake: Any = self.from_tensor(tensor, static_shapes=True)
            if tensor.grad_fn is not None and fake.requires_grad:
                leaf = fake.detach().requires_grad_()
                graph = self._graph_of(tensor.grad_fn) if self.with_graphs else _Graph()
                fake = _Cut.apply(leaf, self._tracked, graph)  # type: ignore[no-untyped-call]
        return fake

    def _graph_of(self, root: Any) -> "_Graph":
        """Copy an autograd graph. For each node, the copy has fakes of the node's saved tensors."""
        whole = self._graphs.setdefault(root, _Graph())
        waiting = [] if whole else [(root, whole)]
        for node, graph in waiting:
            for _, saved in saved_by(node):
                if type(data := saved.detach()) is Tensor and data.layout is torch.strided:
                    graph.append(self.from_tensor(data, static_shapes=True))
                    self._count(graph[-1])
            for function in {function for function, _ in node.next_functions} - {None}:
                if function not in self._graphs:
                    waiting.append((function, self._graphs.setdefault(function, _Graph())))
                graph.append(self._graphs[function])
        return whole


@contextmanager
def suspended() -> Iterator[None]:
    """Suspend torch's modes in the block, so that code in the block can use real tensors."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has data. A tensor that `vmap` or `grad` wraps counts as a fake."""
    return not (is_functorch_wrapped_tensor(tensor) or isinstance(tensor, FakeTensor))


def _is_a_number(tensor: Tensor) -> bool:
    """Whether a tensor is one number on the host. The fake of such a tensor stores the number."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.numel() == 1
        and not tensor.requires_grad
        and tensor.layout is torch.strided
    )


class _Graph(list[Any]):
    """Hold fakes of the tensors that an autograd node saved, and the `_Graph` of each next node."""


class _Cut(torch.autograd.Function):
    """Mark the point where a backward pass would reach the graph of an earlier cell."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, tracked: Callable[[], None], graph: _Graph) -> Any:
        ctx.tracked, ctx.graph = tracked, graph
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.tracked()
        ctx.graph.clear()
        return None, None, None
