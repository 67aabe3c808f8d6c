"""Bring what exists to a device, keeping every object the object it is.

Guarantees: a tensor keeps its identity, so aliases, containers, modules and optimizers still
agree; tensors that share memory still share it; a leaf that requires a gradient stays a leaf; what
is there already is not touched; and either all of it moves or, when memory runs out or the user
interrupts, none of it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpumagic.display.units import size
from gpumagic.errors import GpuError
from gpumagic.moving.find_tensors import FoundTensor, Left, TensorFinder
from gpumagic.moving.plan import MovePlan, bytes_of
from gpumagic.placement.torch_devices import torch_device


@dataclass(frozen=True)
class Moved:
    """What one variable brought along."""

    name: str
    nbytes: int  # memory that two variables share counts once, for the first
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


def move_all(
    variables: Iterable[tuple[str, object]],
    device: torch.device,
    *,
    followers: Iterable[tuple[str, Optimizer]] = (),
    bystanders: Iterable[tuple[str, Tensor]] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Moves:
    """Bring tensors, modules, optimizers, and containers of them, to `device`; or raise `GpuError`.

    The state of `followers` follows those parameters that move; `bystanders` that share memory with
    a tensor that moves are told in `Moves.left`.
    """
    start = clock()
    finder = TensorFinder()
    finder.variables(variables)
    moving = {id(found.tensor) for found in finder.found if found.must_move(device)}
    if moving:
        for name, optimizer in followers:
            finder.state(optimizer, (name,), only=moving)
    wanted = [found for found in finder.found if found.must_move(device)]
    if not wanted:
        return Moves(left=tuple(finder.left))
    plan = MovePlan(device, wanted)
    plan.note_bystanders(bystanders)
    if not plan.copy():  # raised out here: a chained exception would keep the copies alive
        raise GpuError(_no_room(device, wanted))
    if plan.nbytes:
        plan.carry_out()
        for module in finder.recurrent:
            # cuDNN wants a recurrent layer's weights in one piece, as Module.to leaves them.
            module.flatten_parameters()
        wait_for(device)
    moved = tuple(
        Moved(name, nbytes, tuple(plan.sources[name])) for name, nbytes in plan.nbytes.items()
    )
    return Moves(moved, (*finder.left, *plan.left), clock() - start if moved else 0.0)


def tensors_in(namespace: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are variables themselves, by name; not those that only IPython names."""
    for name, value in list(namespace.items()):
        if type(value) is Tensor and not name.startswith("_"):
            yield name, value


def wait_for(device: torch.device) -> None:
    """Wait until `device` has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _no_room(device: torch.device, wanted: list[FoundTensor]) -> str:
    needed: dict[str, int] = {}
    for found in wanted:
        needed[found.root] = needed.get(found.root, 0) + bytes_of(found.tensor)
    largest = sorted(needed.items(), key=lambda item: -item[1])[:3]
    names = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in largest)
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
