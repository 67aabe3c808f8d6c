"""Bring anything to a device in a program: torch's in place, other frameworks' as copies."""

import sys
from dataclasses import replace

from gpumagic.errors import GpuError
from gpumagic.frameworks.bring_arrays import bring_all
from gpumagic.frameworks.own_devices import needed_in
from gpumagic.moving.moved import Moves, all_of


def move(value: object, where: object) -> Moves:
    """Bring `value` to a device in place: every object keeps its identity that can.

    An array of JAX's, TensorFlow's or CuPy's cannot move: lists, dicts and objects then hold a
    copy, and what stands for an array, a tuple or a pytree is ``.value``.

    Parameters
    ----------
    value : torch.Tensor, torch.nn.Module, torch.optim.Optimizer, array, or a container of them
        Lists, tuples, named tuples, dicts and dataclasses are followed to any depth.
    where : str, int or torch.device
        Any spelling of one device: ``1``, ``"cuda:1"``, ``"cpu"``, ``"free"`` …

    Returns
    -------
    Moves
        What moved, in bytes, what did not and why, the seconds it took, and the value.

    Raises
    ------
    GpuError
        There is no such device, or it has not enough free memory. Nothing was moved.

    Examples
    --------
    >>> moves = gpumagic.move((net, optimizer, batch), 1)
    >>> moves.nbytes
    1234944
    >>> params = gpumagic.move(params, 1).value  # of JAX
    """
    names = {"value": value}
    needed = needed_in({**sys._getframe(1).f_globals, **names}, "gpumagic.move")
    device = needed.find(where)
    found: list[Moves] = []
    if (torchs := needed.of_torch(device)) is not None:
        from gpumagic.moving.move import move_all

        found.append(move_all(names.items(), torchs))
    for framework in needed.others:
        found.append(bring_all(framework, [*names.items()], device, names))
    moves = all_of(found)
    if moves.left and not moves.moved and not needed.torch:
        raise GpuError(f"move: {moves.left[0].reason}; nothing was moved")
    return replace(moves, value=names["value"])
