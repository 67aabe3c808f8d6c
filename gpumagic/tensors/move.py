"""Bring what exists to a device, keeping every object the object it is.

Guarantees: a tensor keeps its identity, so aliases, containers, modules and optimizers still
agree; tensors that share memory still share it; a leaf that requires a gradient stays a leaf; what
is there already is not touched; and either all of it moves or, when memory runs out or the user
interrupts, none of it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpumagic.display.units import size
from gpumagic.errors import GpuError
from gpumagic.tensors.devices import torch_device
from gpumagic.tensors.walk import Found, Left, Walk


@dataclass(frozen=True)
class Moved:
    """What one variable brought along.

    Attributes
    ----------
    name : str
        The variable, as the user calls it.
    nbytes : int
        Bytes copied. Memory that two variables share counts once, for the first.
    sources : tuple of str
        The devices it came from, such as ``("cpu",)``.
    """

    name: str
    nbytes: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Moves:
    """The outcome of `move`: what moved, what did not and why, and the seconds it took."""

    moved: tuple[Moved, ...] = ()
    left: tuple[Left, ...] = ()
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes copied in all."""
        return sum(m.nbytes for m in self.moved)


class _Plan:
    """New bytes for old tensors: made in full before the first tensor is changed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.assignments: list[tuple[Tensor, Tensor]] = []
        self.nbytes: dict[str, int] = {}
        self.sources: dict[str, dict[str, None]] = {}
        self.left: list[Left] = []

    def add(self, found: Found, new: Tensor, nbytes: int) -> None:
        self.assignments.append((found.tensor, new))
        self.nbytes[found.root] = self.nbytes.get(found.root, 0) + nbytes
        self.sources.setdefault(found.root, {}).setdefault(str(found.tensor.device))

    def copy_alone(self, found: Found) -> None:
        """Plan a tensor by its own `to`: the way of subclasses and of layouts without strides."""
        try:
            new = found.tensor.data.to(found.home or self.device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            self.left.append(Left(found.path, str(error).strip().splitlines()[0]))
        else:
            if torch._has_compatible_shallow_copy_type(found.tensor, new):
                self.add(found, new, _bytes_of(found.tensor))
            else:
                self.left.append(Left(found.path, "it cannot be moved in place; use .to()"))

    def copy_storage(self, group: list[Found]) -> None:
        """Plan tensors that share memory, so that they share it there too."""
        storage = group[0].tensor.untyped_storage()
        if 2 * sum(f.tensor.nbytes for f in group) < storage.nbytes():
            # Small views of something large that the cell does not name: the rest of it stays.
            for found in group:
                self.copy_alone(found)
            return
        copies: dict[torch.device, torch.UntypedStorage] = {}
        for found in group:
            old, home = found.tensor, found.home or self.device
            copied = 0
            if home not in copies:
                flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                copies[home] = flat.to(home).untyped_storage()
                copied = storage.nbytes()
            new = torch.empty(0, dtype=old.dtype, device=home)
            new.set_(copies[home], old.storage_offset(), old.size(), old.stride())
            self.add(found, new, copied)

    def carry_out(self) -> None:
        before = [(tensor, tensor.data) for tensor, _ in self.assignments]
        try:
            for tensor, new in self.assignments:
                tensor.data = new
        except BaseException:  # an interrupt between two tensors: all or none
            for tensor, old in before:
                tensor.data = old
            raise


def move_all(
    variables: Iterable[tuple[str, object]],
    device: torch.device,
    *,
    followers: Iterable[tuple[str, Optimizer]] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Moves:
    """Bring tensors, modules, optimizers, and containers of them, to `device`.

    Parameters
    ----------
    variables : iterable of (name, value)
    device : torch.device
        With an index where its kind has several.
    followers : iterable of (name, torch.optim.Optimizer)
        Optimizers that were not named: their state follows those parameters that move.
    clock : callable
        Seconds.

    Returns
    -------
    Moves

    Raises
    ------
    GpuError
        The device has not enough free memory. Nothing was moved.
    """
    start = clock()
    plan = _Plan(device)
    walk = Walk()
    wanted = [f for f in walk.variables(variables) if f.tensor.device != (f.home or device)]
    moving = {id(found.tensor) for found in wanted}
    for name, optimizer in followers:
        states = walk.state(optimizer, name, only=moving)
        wanted += [f for f in states if f.tensor.device != (f.home or device)]
    alone: list[Found] = []
    shared: dict[int, list[Found]] = {}
    for found in wanted:
        if reason := _immovable(found.tensor):
            plan.left.append(Left(found.path, reason))
        elif _has_plain_storage(found.tensor):
            shared.setdefault(found.tensor.untyped_storage()._cdata, []).append(found)
        else:
            alone.append(found)
    out_of_memory = False
    try:
        for group in shared.values():
            plan.copy_storage(group)
        for found in alone:
            plan.copy_alone(found)
    except torch.OutOfMemoryError:
        out_of_memory = True
    if out_of_memory:  # raised out here: a chained exception would keep the copies alive
        raise GpuError(_no_room(plan, wanted))
    if plan.assignments:
        plan.carry_out()
        for module in walk.recurrent:
            # cuDNN wants a recurrent layer's weights in one piece, as Module.to leaves them.
            module.flatten_parameters()
        wait_for(device)
    moved = tuple(
        Moved(name, nbytes, tuple(plan.sources[name])) for name, nbytes in plan.nbytes.items()
    )
    return Moves(moved, (*walk.left, *plan.left), clock() - start if moved else 0.0)


def wait_for(device: torch.device) -> None:
    """Wait until `device` has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _immovable(tensor: Tensor) -> str:
    if tensor.grad_fn is not None:
        # Its graph expects a gradient on the device where it was computed.
        return "it is the result of a computation that autograd tracks; use .detach() or .to()"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data"
    return ""


def _has_plain_storage(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
    )


def _bytes_of(tensor: Tensor) -> int:
    try:
        return tensor.nbytes
    except (RuntimeError, NotImplementedError, ValueError):  # no shape yet, or no strides
        return 0


def _no_room(plan: _Plan, wanted: list[Found]) -> str:
    # The copies made so far would count as used.
    plan.assignments.clear()
    needed: dict[str, int] = {}
    for found in wanted:
        needed[found.root] = needed.get(found.root, 0) + _bytes_of(found.tensor)
    largest = sorted(needed.items(), key=lambda item: -item[1])[:3]
    names = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in largest)
    device = plan.device
    free = size(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else "too little"
    return (
        f"{device} has {free} free, and the cell's variables need {size(sum(needed.values()))} "
        f"({names}); nothing was moved; free some (%gpus shows who holds it) or type --no-move"
    )


def move(value: object, where: object) -> Moves:
    """Bring `value` to a device in place: every object keeps its identity.

    Parameters
    ----------
    value : torch.Tensor, torch.nn.Module, torch.optim.Optimizer, or a container of them
        Lists, tuples, named tuples, dicts and dataclasses are followed to any depth.
    where : str, int or torch.device
        Any spelling of one device: ``1``, ``"cuda:1"``, ``"cpu"``, ``"free"`` …

    Returns
    -------
    Moves
        What moved, in bytes, what did not and why, and the seconds it took.

    Raises
    ------
    GpuError
        There is no such device, or it has not enough free memory. Nothing was moved.

    Examples
    --------
    >>> moves = gpumagic.move((net, optimizer, batch), 1)
    >>> moves.nbytes
    1234944
    """
    return move_all([("value", value)], torch_device(where))
