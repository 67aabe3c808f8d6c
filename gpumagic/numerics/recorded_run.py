"""Record a run of torch code: each operation, the user's line, and a copy of its results.

A dispatch mode sees what autograd calls too. Random numbers are drawn by the CPU's generator in
float32, so that all devices and dtypes get the same. Memory that the code does not write has other
values in the second run, so that reading it shows.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gpumagic import faults
from gpumagic.ledger.attribute import uncounted
from gpumagic.usercode.files import user_frame

# Bytes of host memory for the results of one run.
_MOST = 2**29
# Fused kernels, which the CPU does not have.
_FUSED = ("attention", "rnn", "lstm", "gru")


@dataclass(eq=False)
class RecordedOperation:
    """One operation of a run, or a variable that the code has assigned."""

    name: str  # "aten.mm", or the variable's
    inputs: list["RecordedOperation"]  # the writers of what it reads
    shapes: tuple[torch.Size, ...] = ()  # of its inputs
    at: tuple[CodeType, int] | None = None  # the user's instruction; for a backward, the forward's
    backward: bool = False
    numbers: list[Any] = field(default_factory=list)  # that it is called with
    results: list[Tensor] = field(default_factory=list)  # copies on the host
    rows: Tensor | None = None  # from which argmax and argmin choose
    random: bool = False
    empty: bool = False  # it allocates memory that it does not write
    gap: Any = None  # to the same operation of the other run
    block: Any = None  # the different operations of both runs, if there is no same one


class Recorder(TorchDispatchMode):
    """Record what runs within; memory that the code does not write is filled with `unwritten`."""

    def __init__(self, unwritten: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[RecordedOperation] = []
        self.left_out = 0  # operations for whose results there was no room
        self._unwritten, self._room = unwritten, _MOST
        # The writers of each storage; the reference keeps its address from being used again.
        self._storages: dict[int, tuple[StorageWeakRef, list[RecordedOperation]]] = {}
        self._forward: dict[int, Any] = {}  # the user's instruction, by autograd's sequence number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        draws = torch.Tag.nondeterministic_seeded in func.tags
        draws = draws and not any(word in name for word in _FUSED)
        result = _draw(func, args, kwargs) if draws else func(*args, **kwargs)
        with faults.kept("recording an operation"), _unseen():
            parameters = func._schema.arguments
            given = dict(zip((p.name for p in parameters), args, strict=False)) | kwargs
            written = [
                given.get(p.name) for p in parameters if p.alias_info and p.alias_info.is_write
            ]
            self._record(func, given, _tensors(written), _tensors(result), draws)
        return result

    def add_variables(self, variables: Iterable[tuple[str, Any]]) -> None:
        """Record what the code has assigned."""
        for name, value in variables:
            is_module = isinstance(value, torch.nn.Module)
            leaves = tree_leaves(list(value.parameters()) if is_module else value)
            tensors = _tensors([torch.tensor(x) if type(x) is float else x for x in leaves])
            if tensors:
                self._keep(RecordedOperation(name, self._writers(tensors)), tensors)

    def _record(
        self,
        func: Any,
        given: dict[str, Any],
        writes: list[Tensor],
        makes: list[Tensor],
        draws: bool,
    ) -> None:
        at, backward = self._line()
        name, reads = str(func).removesuffix(".default"), _tensors(given)
        # A view of an input has no numbers of its own.
        old = {_storage(each) for each in reads if name != "aten.lift_fresh"}
        makes = [each for each in makes if _storage(each) not in old]
        if not makes and not writes:
            return
        shapes = tuple(each.shape for each in reads)
        made = RecordedOperation(name, self._writers(reads), shapes, at, backward)
        made.numbers = [x for x in tree_leaves(given) if isinstance(x, (int, float, complex))]
        made.random = draws or any(given[key] for key in given if key.startswith("dropout"))
        made.empty = name.startswith(("aten.empty", "aten.new_empty"))
        if name in ("aten.argmax", "aten.argmin"):
            made.rows = _rows(reads[0].to("cpu", copy=True), given.get("dim"))
        for each in (*makes, *writes):
            storage = each.untyped_storage()
            is_whole = each.numel() * each.element_size() == storage.nbytes()
            before = [] if is_whole else self._writers([each])
            self._storages[_storage(each)] = StorageWeakRef(storage), [*before, made]
        if made.empty:
            for each in makes:
                each.fill_(self._unwritten)
        self._keep(made, [] if made.empty else [*writes, *makes])

    def _keep(self, made: RecordedOperation, results: list[Tensor]) -> None:
        self.operations.append(made)
        self._room -= sum(each.numel() * each.element_size() for each in results)
        self.left_out += self._room < 0
        if self._room >= 0:
            made.results = [each.detach().to("cpu", copy=True) for each in results]

    def _line(self) -> tuple[Any, bool]:
        """Return the user's instruction, and whether it runs backward."""
        frame = user_frame(sys._getframe(3))
        at = None if frame is None else (frame.f_code, frame.f_lasti)
        node: Any = torch._C._current_autograd_node()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return at, False  # a backward of the user's own
        if node is not None:
            return self._forward.get(node._sequence_nr(), at), True
        # Autograd has just numbered the node of this operation.
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
    """Return the tensors with numbers in one storage."""
    found = (each for each in tree_leaves(value) if isinstance(each, Tensor))
    return [t for t in found if t.layout is torch.strided and not (t.is_meta or t.is_quantized)]


def _rows(tensor: Tensor, dim: int | None) -> Tensor:
    moved = tensor.reshape(1, -1) if dim is None else tensor.movedim(dim, -1)
    return moved.reshape(-1, moved.shape[-1])


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, and replace its random numbers by the CPU's."""
    generator = kwargs.get("generator") or torch.default_generator
    if generator.device.type != "cpu":
        return func(*args, **kwargs)
    state = generator.get_state()
    # Before the operation writes to its arguments.
    host_args, host_kwargs = tree_map(_on_host, (args, kwargs))
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


def _on_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    kind = torch.float32 if value.is_floating_point() else value.dtype
    return value.detach().to("cpu", kind, copy=True)
