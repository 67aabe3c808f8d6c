"""Predict what a cell or a function would do, without computing or changing anything.

The code is followed in a forked copy of the process, where every tensor is one without data
(torch's fake tensors): shapes, dtypes, devices, copies, waits and memory are what they would be.
What depends on data ends the dry run, with the result up to there.
"""

import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from gpumagic.display import table
from gpumagic.dryrun.result import LIMIT_S, Assigned, DryRun, Mismatch, Peak, Unknown
from gpumagic.errors import GpuError, torch_needed
from gpumagic.usercode.values import is_module
from gpumagic.usercode.variables import variables_read

__all__ = ["Assigned", "DryRun", "Mismatch", "Peak", "Unknown", "dry_run"]

table.register("gpumagic.dryrun.result.DryRun", "gpumagic.dryrun.result")


def dry_run(
    function: Callable[..., Any],
    *args: Any,
    on: object = None,
    move: bool = True,
    limit: float = LIMIT_S,
    **kwargs: Any,
) -> DryRun:
    """Predict what ``function(*args, **kwargs)`` would do, without computing or changing anything.

    The call is followed in a forked copy of this process, in which every tensor is replaced by one
    without data. Nothing is allocated on a GPU. A function that JAX jits, or that gets JAX's
    arrays, is compiled for their shapes, and the compiler reports what it needs. Its Python runs
    once, as for any `jit`.

    Parameters
    ----------
    function : callable
        A function, a method or a module.
    *args, **kwargs
        The arguments of the call.
    on : str, int, torch.device, Card or list, optional
        Place it as ``%%ongpu`` does: ``1``, ``"cuda:1"``, ``"free"`` … By default it runs where it
        is. Or a card that is not here, by its name or size: ``"H100 80GB"``, ``"RTX 4090"``,
        ``"24GiB"``, or several of them. ``"8 x H100 80GB"`` is one rank of eight, each on a card,
        in a process group that is there; ``"@all"`` one of as many as there are GPUs here.
    move : bool
        With `on`: whether its arguments, and the variables that it reads, are moved there first.
    limit : float
        Seconds after which it stops, with the result up to there.

    Returns
    -------
    DryRun
        Shapes, dtypes and devices, mismatches, copies and waits, peak memory, and everything
        unknown.

    Raises
    ------
    GpuError
        `function` is not callable, there is no such device or card, or this system has no fork.

    Examples
    --------
    >>> result = gpumagic.dry_run(train_step, net, optimizer, X, y, on=1)
    >>> result.peak["cuda:1"].needed
    15246295040
    >>> gpumagic.dry_run(train_step, net, optimizer, X, y, on="RTX 4090").cards[0].fits
    True
    >>> gpumagic.dry_run(train_sharded, on="8 x H100 80GB").ranks[0].collectives[0].sent
    11274289152
    """
    _check(function)
    if "jax" in sys.modules:
        from gpumagic.dryrun.dry_arrays import dry_run_of_jax, is_for_jax

        if is_for_jax(function, args, kwargs):
            return dry_run_of_jax(function, args, kwargs, on)
    with torch_needed("dry_run"):
        from gpumagic.dryrun.dry_cell import dry_run_on
        from gpumagic.dryrun.follow_code import Subject
    space, module = _home(function)
    arguments = [("function", function), *zip(_names(function, args), args, strict=True)]
    arguments += kwargs.items()
    read = variables_read(["function"], {**space, "function": function}, module)
    known = {name for name, _ in arguments}
    reads = arguments + [(name, value) for name, value in read if name not in known]

    def prepare(note: Callable[[str], object]) -> Callable[[], dict[str, Any]]:
        return lambda: {"return": function(*args, **kwargs)}

    return dry_run_on(on, Subject(space, reads, prepare, None, move, limit))


def _check(function: Any) -> None:
    if not callable(function):
        raise GpuError(
            f"dry_run takes a function to call, not {type(function).__name__}; type "
            "gpumagic.dry_run(lambda: ...)"
        )
    if inspect.iscoroutinefunction(function):
        raise GpuError("dry_run cannot follow an async function; give it one that awaits nothing")


def _home(function: Any) -> tuple[dict[str, Any], str]:
    """The global variables of a callable, and the name of its module."""
    inner = inspect.unwrap(function) if isinstance(function, FunctionType) else function
    inner = getattr(inner, "__func__", inner)
    if not isinstance(inner, FunctionType):
        inner = getattr(type(inner), "forward", vars(type(inner)).get("__call__"))
    if isinstance(inner, FunctionType):
        return inner.__globals__, str(inner.__module__)
    return {}, "__main__"


def _names(function: Any, args: tuple[Any, ...]) -> list[str]:
    """The names of the parameters, for the report; a number where they have none."""
    called = function.forward if is_module(function) else function
    try:
        found = list(inspect.signature(called).bind_partial(*args).arguments)
    except (TypeError, ValueError):
        found = []
    return found if len(found) == len(args) else [f"argument {n + 1}" for n in range(len(args))]
