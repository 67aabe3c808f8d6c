"""Record each operation that torch code runs, with its line and a copy of its results.

Random numbers are drawn by the CPU's generator in float32, so that all devices and dtypes get the
same numbers. Fused kernels and calls with a GPU's generator are exceptions. Uninitialized memory is
filled with a different value in each run. If the code reads this memory, the results differ.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gpumagic import faults
from gpumagic.ledger.attribute import uncounted
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.moved import Left
from gpumagic.usercode.files import expression, line_at, user_frame

_MOST = 2**29  # maximum bytes of host memory for the results of one run
_FUSED = ("attention", "rnn", "lstm", "gru")  # operators whose random numbers are not replaced


@dataclass(eq=False)
class RecordedOperation:
    """One operation of a run, or a variable's tensor at the end of the run."""

    name: str  # "aten.mm"; empty for a variable
    inputs: list["RecordedOperation"]  # the operations that computed the inputs
    shapes: tuple[torch.Size, ...] = ()  # shapes of the inputs
    # The user's code object and bytecode offset; for a backward operation, the forward operation's.
    at: tuple[CodeType, int] | None = None
    backward: bool = False
    variable: str = ""  # the path to the variable's tensor: "net.weight.grad"
    results: list[tuple[int, Tensor | None]] = field(default_factory=list)  # (storage's id, copy)
    gap: Any = None  # the difference from the paired operation of the other run
    instead: Any = None  # unpaired operations of both runs that may explain a difference
    depth: int = 0  # number of operations in the longest chain that ends here

    def __post_init__(self) -> None:
        self.depth = 1 + max((each.depth for each in self.inputs), default=0)

    @property
    def empty(self) -> bool:
        """Whether the operation allocates memory without writing it."""
        return self.name.startswith(("aten.empty", "aten.new_empty"))

    @property
    def is_noise(self) -> bool:
        """Whether the results may consist of rounding errors alone."""
        return bool(self.gap and self.gap.noise)

    def place(self) -> tuple[str, int | None]:
        """Return ``"In [3], line 7: `x.softmax(-1)` (aten._softmax)"``, and the line's number."""
        if not self.at:
            return f"`{self.variable}`" if self.variable else f"({self.name})", None
        line = line_at(*self.at)
        label = "" if line.label.startswith("<") else f"{line.label}, "
        code = f"{'backward of ' * self.backward}`{expression(*self.at)}`"
        return f"{label}line {line.line}: {code} ({self.name})", line.line


class Recorder(TorchDispatchMode):
    """Record the operations of a `with` block; fill uninitialized memory with `unwritten`."""

    def __init__(self, unwritten: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[RecordedOperation] = []
        self.variables: dict[str, dict[str, RecordedOperation]] = {}  # by name, then by path
        self.devices: set[torch.device] = set()  # of the tensors that operations used
        self.idle = False  # whether the run used no tensor on the device that it was given
        self.left: list[Left] = []  # variables whose tensors stayed on their devices
        self.read: set[int] = set()  # ids of storages that a later operation or a variable used
        self.full = False  # whether results were not saved for lack of room
        self._room = _MOST  # bytes left for results
        self._unwritten = unwritten
        # By storage id: a weak reference, which keeps the id unique, and the storage's writers.
        self._storages: dict[int, tuple[StorageWeakRef, list[RecordedOperation]]] = {}
        self._forward: dict[int, Any] = {}  # `at` of forward operations, by sequence number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        __tracebackhide__ = True
        kwargs, name = kwargs or {}, func.__name__
        draws = torch.Tag.nondeterministic_seeded in func.tags
        draws = draws and not any(word in name for word in _FUSED)
        result = _draw(func, args, kwargs) if draws else func(*args, **kwargs)
        with faults.kept("recording an operation"), _unseen():
            parameters = func._schema.arguments
            given = dict(zip((p.name for p in parameters), args, strict=False)) | kwargs
            names = [p.name for p in parameters if p.alias_info and p.alias_info.is_write]
            written = _tensors([given.get(name) for name in names])
            self._record(str(func).removesuffix(".default"), given, written, result)
        return result

    def add_variables(self, variables: dict[str, Any], module: str, copied: list[Any]) -> None:
        """Record the variables' tensors after the run; `copied` has pairs (original, copy)."""
        # For an unchanged copy, use the original, which has the same numbers and needs no new copy.
        unchanged = (pair for pair in copied if not self._writers(_tensors(pair[1])))
        saved: dict[int, list[Any]] = {id(copy): [(0, original)] for original, copy in unchanged}
        self._room, counts = _MOST, Counter[str]()
        for name, value in variables.items():
            paths = self.variables[name] = dict[str, RecordedOperation]()
            finder = TensorFinder([(name, value)], module, every_path=True)
            for found in (each for each in finder.tensors if _tensors(each.tensor)):
                # The text of any other key may contain an address, which differs between runs.
                plain = all(type(key) in (int, str) for _, key in found.steps[1:])
                path = found.path if plain else name
                counts[path] += 1
                path += f", tensor {counts[path]}" * (counts[path] > 1)
                made = RecordedOperation("", self._writers([found.tensor]), variable=path)
                self.read.update(_storage(found.tensor) for _ in made.inputs)
                if id(found.tensor) not in saved:
                    self._keep(made, [found.tensor])
                paths[path], made.results = made, saved.setdefault(id(found.tensor), made.results)

    def _record(self, name: str, given: Any, writes: list[Tensor], result: Any) -> None:
        reads = _tensors(given)
        self.devices.update(each.device for each in (*reads, *_tensors(result)))
        # A view of an input is not a new result.
        old = {_storage(each) for each in reads if name != "aten.lift_fresh"}
        makes = [each for each in _tensors(result) if _storage(each) not in old]
        at, backward = self._line()
        for each in reads:
            # A forward output that only a backward pass reads is a buffer and does not count.
            if any(writer.backward >= backward for writer in self._writers([each])):
                self.read.add(_storage(each))
        if not (changed := [*writes, *makes]):
            return
        shapes = tuple(each.shape for each in reads)
        made = RecordedOperation(name, self._writers(reads), shapes, at, backward)
        for each in changed:
            self._set_writer(each, made)
        self.operations.append(made)
        if not made.empty:
            self._keep(made, changed)

    def _set_writer(self, tensor: Tensor, made: RecordedOperation) -> None:
        """Record `made` as the writer of a tensor. Fill the tensor if `made` only allocated it."""
        storage = tensor.untyped_storage()
        is_whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        before = [] if is_whole else self._writers([tensor])
        self._storages[_storage(tensor)] = StorageWeakRef(storage), [*before, made]
        if made.empty:
            tensor.fill_(self._unwritten)

    def _keep(self, made: RecordedOperation, results: list[Tensor]) -> None:
        self._room -= sum(each.numel() * each.element_size() for each in results)
        self.full |= self._room < 0
        if self._room >= 0:
            hosts = (each.detach().to("cpu", copy=True) for each in results)
            made.results = [*zip(map(_storage, results), hosts, strict=True)]

    def _line(self) -> tuple[Any, bool]:
        """Return `at` and `backward` for the operation that is running."""
        frame = user_frame(sys._getframe(3))
        at = None if frame is None else (frame.f_code, frame.f_lasti)
        node: Any = torch._C._current_autograd_node()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return at, False  # the user wrote this `backward`, so `at` is a line of that code
        if node is not None:
            return self._forward.get(node._sequence_nr(), at), True
        # Autograd has just given this operation a sequence number, so the counter is one ahead.
        self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, at)
        return at, False

    def _writers(self, tensors: Iterable[Tensor]) -> list[RecordedOperation]:
        known = (self._storages.get(_storage(each)) for each in tensors)
        return [writer for entry in known if entry for writer in entry[1]]


@contextmanager
def _unseen() -> Iterator[None]:
    with uncounted(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> list[Tensor]:
    found = (each for each in tree_leaves(value) if isinstance(each, Tensor))
    return [t for t in found if t.layout is torch.strided and not (t.is_meta or t.is_quantized)]


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, then overwrite its random numbers with float32 numbers from the CPU."""
    generator = kwargs.get("generator") or torch.default_generator
    if generator.device.type != "cpu":
        return func(*args, **kwargs)
    state = generator.get_state()
    # Copy the arguments before the operation writes to them.
    host_args, host_kwargs = tree_map_only(Tensor, _on_host, (args, kwargs))
    result = func(*args, **kwargs)
    generator.set_state(state)
    with _unseen():
        made = _tensors(result)
        floats = any(each.is_floating_point() for each in made)
        wanted = {"device": "cpu"} | ({"dtype": torch.float32} if floats else {})
        names = {parameter.name for parameter in func._schema.arguments}
        host_kwargs |= {name: wanted[name] for name in names & wanted.keys()}
        for mine, drawn in zip(made, _tensors(func(*host_args, **host_kwargs)), strict=True):
            mine.copy_(drawn)
    return result


def _on_host(tensor: Tensor) -> Tensor:
    kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kind, copy=True)
