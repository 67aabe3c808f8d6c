"""Record a run of torch code: each operation, the user's line, and a copy of its results.

A dispatch mode sees what autograd calls too. Random numbers are drawn by the CPU's generator in
float32, so that all devices and dtypes get the same. Memory that the code does not write has other
values in the second run, so that reading it shows.
"""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from gpumagic import faults
from gpumagic.ledger.attribute import uncounted
from gpumagic.usercode.files import user_frame

# Bytes of host memory for the results of one run.
_MOST = 2**29
# Fused kernels, which the CPU does not have.
_FUSED = ("attention", "rnn", "lstm", "gru")


@dataclass(eq=False)
class Operation:
    """One operation of a run, or a variable that the code has assigned."""

    name: str  # "aten.mm", or the variable's
    shapes: tuple[tuple[int, ...], ...] = ()  # of its inputs
    at: tuple[CodeType, int] | None = None  # the user's instruction; for a backward, the forward's
    backward: bool = False
    inputs: list["Operation"] = field(default_factory=list)  # the writers of what it reads
    scalars: list[Any] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)  # copies on the host
    rows: Tensor | None = None  # from which argmax and argmin choose
    random: bool = False
    gap: Any = None  # to the same operation of the other run
    block: Any = None  # the different operations of both runs, if there is no same one

    @property
    def is_empty(self) -> bool:
        """Whether it allocates memory that it does not write."""
        return self.name.startswith(("aten.empty", "aten.new_empty"))


class Recorder(TorchDispatchMode):
    """Record what runs within; memory that the code does not write is filled with `unwritten`."""

    def __init__(self, unwritten: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.left_out = 0  # operations for whose results there was no room
        self._unwritten, self._room = unwritten, _MOST
        # The writers of each storage; the reference keeps its address from being used again.
        self._storages: dict[int, tuple[StorageWeakRef, list[Operation]]] = {}
        self._forward: dict[int, Any] = {}  # the user's instruction, by autograd's sequence number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        run = _draw if _draws(func) else _call
        result = run(func, args, kwargs)
        with faults.kept("recording an operation"), _unseen():
            self._record(func, args, kwargs, result)
        return result

    def add_variables(self, variables: Iterable[tuple[str, Any]]) -> None:
        """Record what the code has assigned."""
        for name, value in variables:
            is_module = isinstance(value, torch.nn.Module)
            leaves = tree_leaves(list(value.parameters()) if is_module else value)
            leaves = [torch.tensor(x) if type(x) is float else x for x in leaves]
            if tensors := list(filter(_is_plain, leaves)):
                self._keep(Operation(name, inputs=self._writers(tensors)), tensors)

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        arguments, name = func._schema.arguments, func.__name__
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        at, backward = self._line()
        reads = list(filter(_is_plain, tree_leaves(given)))
        written = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        writes = list(filter(_is_plain, tree_leaves(written)))
        # A view of an input has no numbers of its own.
        old = {t.untyped_storage()._cdata for t in reads if name != "lift_fresh.default"}
        makes = list(filter(_is_plain, tree_leaves(result)))
        makes = [t for t in makes if t.untyped_storage()._cdata not in old]
        if not makes and not writes:
            return
        made = Operation(
            str(func).removesuffix(".default"),
            tuple(tuple(t.shape) for t in reads),
            at,
            backward,
            self._writers(reads),
            [x for x in tree_leaves(given) if isinstance(x, (bool, int, float, complex))],
        )
        made.random = _draws(func) or any(given[key] for key in given if key.startswith("dropout"))
        if name.startswith(("argmax", "argmin")):
            dim = given.get("dim")
            rows = args[0].reshape(1, -1) if dim is None else args[0].movedim(dim, -1)
            made.rows = rows.detach().to("cpu", copy=True).reshape(-1, rows.shape[-1])
        for tensor in (*makes, *writes):
            storage = tensor.untyped_storage()
            whole = tensor.numel() * tensor.element_size() == storage.nbytes()
            before = [] if whole else self._writers([tensor])
            self._storages[storage._cdata] = StorageWeakRef(storage), [*before, made]
        if made.is_empty:
            for tensor in makes:
                tensor.fill_(self._unwritten)
        self._keep(made, [] if made.is_empty else [*writes, *makes])

    def _keep(self, made: Operation, results: list[Tensor]) -> None:
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

    def _writers(self, tensors: Iterable[Tensor]) -> list[Operation]:
        known = (self._storages.get(each.untyped_storage()._cdata) for each in tensors)
        return [writer for entry in known if entry for writer in entry[1]]


def _unseen() -> ExitStack:
    with ExitStack() as stack:
        for mode in (uncounted(), torch._C.DisableTorchFunction(), torch.no_grad()):
            stack.enter_context(mode)
        return stack.pop_all()


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor with numbers in one storage."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    return not (value.is_quantized or is_traceable_wrapper_subclass(value))


def _draws(func: Any) -> bool:
    fused = any(word in func.__name__ for word in _FUSED)
    return torch.Tag.nondeterministic_seeded in func.tags and not fused


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


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
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        wanted: dict[str, Any] = {"device": "cpu"}
        if any(each.is_floating_point() for each in made):
            wanted["dtype"] = torch.float32
        names = {argument.name for argument in func._schema.arguments}
        host_kwargs |= {name: wanted[name] for name in names & wanted.keys()}
        for mine, drawn in zip(made, tree_leaves(func(*host_args, **host_kwargs)), strict=True):
            mine.copy_(drawn)
    return result


def _on_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    kind = torch.float32 if value.is_floating_point() else value.dtype
    return value.detach().to("cpu", kind, copy=True)
