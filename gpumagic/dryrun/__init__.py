"""Predict what a cell or a function would do, without computing or changing anything."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from gpumagic.dryrun.result import LIMIT_S, Assigned, DryRun, Mismatch, Peak, Unknown
from gpumagic.errors import GpuError, torch_needed
from gpumagic.usercode.program import namespace_of
from gpumagic.usercode.values import is_module
from gpumagic.usercode.variables import variables_read

__all__ = ["Assigned", "DryRun", "Mismatch", "Peak", "Unknown", "dry_run"]

OF_JAX = "for JAX, type step.lower(params, batch).compile().memory_analysis()"


def dry_run(
    function: Callable[..., Any],
    *args: Any,
    on: object = None,
    move: bool = True,
    limit: float = LIMIT_S,
    **kwargs: Any,
) -> DryRun:
    """Predict what ``function(*args, **kwargs)`` would do, without computing or changing anything.

    The call runs in a forked copy of this process, on fake tensors without data or GPU memory.
    Code that depends on data ends the dry run. The result then describes only the earlier code.

    Parameters
    ----------
    function : callable
        A function, a method or a module, to be called with `args` and `kwargs`.
    on : str, int, torch.device, Card or list, optional
        A device to place the call on, as in ``%%ongpu``: ``1``, ``"cuda:1"``, ``"free"`` … To try
        a GPU that this machine lacks, give its name or size: ``"H100 80GB"``, ``"24GiB"``. By
        default, nothing is placed or moved.
    move : bool
        Whether to move the arguments, and the variables that the call reads, to `on` first.
    limit : float
        Seconds after which the dry run stops and returns its result so far.

    Returns
    -------
    DryRun
        Shapes, dtypes and devices of results, device mismatches, copies, waits, peak memory, and
        everything that is unknown.

    Raises
    ------
    GpuError
        `function` is not callable, is async or uses JAX; the device or card does not exist; or
        this system has no fork.

    Examples
    --------
    >>> result = gpumagic.dry_run(train_step, net, optimizer, X, y, on=1)
    >>> result.peak["cuda:1"].needed
    15246295040
    >>> gpumagic.dry_run(train_step, net, optimizer, X, y, on="RTX 4090").cards[0].fits
    True
    """
    _check(function, (args, kwargs))
    with torch_needed("dry_run"):
        from gpumagic.dryrun.follow_code import Subject, dry
        from gpumagic.dryrun.held_memory import target_of
    space = namespace_of(function, sys._getframe(1))
    arguments = [("function", function), *zip(_names(function, args), args, strict=True)]
    arguments += kwargs.items()
    module = space.get("__name__", "__main__")
    read = variables_read(["function"], {**space, "function": function}, module)
    known = {name for name, _ in arguments}
    reads = arguments + [(name, value) for name, value in read if name not in known]

    def prepare(note: Callable[[str], object]) -> Callable[[], dict[str, Any]]:
        return lambda: {"return": function(*args, **kwargs)}

    device, cards = target_of(on)
    return dry(Subject(space, reads, prepare, device, move, limit, cards))


def _check(function: Any, given: object) -> None:
    """Raise `GpuError` if a dry run cannot run the call."""
    if not callable(function):
        raise GpuError(
            f"dry_run takes a function to call, not {type(function).__name__}; type "
            "gpumagic.dry_run(lambda: ...)"
        )
    if inspect.iscoroutinefunction(function):
        raise GpuError("dry_run cannot follow an async function; pass one that awaits nothing")
    jax: Any = sys.modules.get("jax")  # JAX fails in a forked child, which lacks JAX's threads
    if jax is None:
        return
    arrays = (jax.Array, jax.ShapeDtypeStruct)
    if hasattr(function, "lower") or any(isinstance(x, arrays) for x in jax.tree.leaves(given)):
        raise GpuError(f"dry_run is for torch; {OF_JAX}")


def _names(function: Any, args: tuple[Any, ...]) -> list[str]:
    """Return the parameter names of `args`, or ``"argument 1"`` … if the names are unknown."""
    called = function.forward if is_module(function) else function
    try:
        found = list(inspect.signature(called).bind_partial(*args).arguments)
    except (TypeError, ValueError):
        found = []
    return found if len(found) == len(args) else [f"argument {n + 1}" for n in range(len(args))]
