"""Find the largest value for which code fits into a GPU's memory: `gpumagic.fit`.

The search restores variables, random state, settings and memory, but not files that code writes.
"""

import inspect
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpumagic import faults
from gpumagic.device import Device, cuda_state
from gpumagic.device.cards import Card
from gpumagic.display.table import view
from gpumagic.dryrun.held_memory import target_of
from gpumagic.errors import GpuError, as_typed
from gpumagic.fitting.fit_result import Fit
from gpumagic.fitting.fit_search import Search
from gpumagic.telemetry.history import board
from gpumagic.usercode import sweep as sweeping
from gpumagic.usercode.program import Program, namespace_of, program


def fit(
    code: str | Callable[..., Any],
    on: object = None,
    *,
    margin: float = 0.05,
    dry: bool = False,
    namespace: dict[str, Any] | None = None,
    progress: Callable[[str], object] | None = None,
    filename: str | None = None,
    text: str | None = None,
    **value: Sequence[float],
) -> Fit:
    """Find the largest value of a variable for which `code` fits into a GPU's memory.

    Parameters
    ----------
    code : str or callable
        The code to run. A function receives the value if the variable is one of its parameters.
    on : object, optional
        The GPU; the current GPU if None. For cards that this machine does not have
        (``"H100 80GB"``, ``["RTX 4090", "24GiB"]``), results are predicted without running `code`.
    margin : float
        The fraction of the free memory to leave free. After six dry runs, the search may end
        with a value that is too small, by less than the fraction `margin` / 2.
    dry : bool
        Whether to predict the result by dry runs alone, without running the code.
    namespace : dict, optional
        The variables that the code uses; if None, the globals of the function or of the caller.
    progress : callable, optional
        Function to call with a line of text for each step.
    filename, text : str, optional
        The name of the file that contains `code`, and the text to show for `code`.
    **value : sequence of numbers
        The variable, and the values that it may take: ``batch=range(1, 4097)``.

    Returns
    -------
    Fit
        The results. After Ctrl-C, ``interrupted`` is True, and the results so far are included.

    Raises
    ------
    GpuError
        There is no such GPU or card; no variable or several variables are given; a value is not a
        number above 0; the code does not read the variable; or, with `dry` or cards, dry runs fail.
    Exception
        Any error that the code raises in a run, except for out-of-memory errors.

    Examples
    --------
    >>> def step(batch):
    ...     X = torch.randn(batch, 784)
    ...     F.cross_entropy(net(X), net(X).argmax(1)).backward()
    >>> gpumagic.fit(step, 0, batch=range(1, 4097)).value
    1216
    """
    cuda_state.check()
    began = time.monotonic()
    name, values = _values(value)
    if not 0 <= margin < 1:
        raise GpuError(f"margin={margin} must be at least 0 and below 1; type margin=0.05")
    if namespace is None:
        namespace = namespace_of(code, sys._getframe(1))
    made = _program(code, namespace, name, filename, text)
    device, cards = _target(on)
    cuda_state.collect()  # errors of earlier cells may still hold memory in reference cycles
    tell = progress or (lambda line: None)
    search = Search(made, namespace, name, values, device, cards, margin, tell)
    interrupted = False
    try:
        search.run(dry=dry or bool(cards))
    except KeyboardInterrupt:
        interrupted, search.stopped = True, "interrupted: results so far"
    except Exception as error:
        if not search.stop(error):
            raise
        faults.keep("searching for what fits", error)
    finally:
        board.post(None)
    result = Fit(
        code=made.text.strip("\n"),
        name=name,
        largest=search.found(),
        tried=search.tried(),
        trains=search.trains,
        margin=margin,
        notes=tuple(search.notes),
        interrupted=interrupted,
        stopped=search.stopped,
        values=values,
        seconds=time.monotonic() - began,
        time=time.time(),
    )
    with faults.kept("drawing a fit for the monitor"):
        board.keep(repr(result), result.time, **view(result).panel(result))
    return result


def _values(given: dict[str, Sequence[float]]) -> tuple[str, Sequence[float]]:
    if len(given) != 1:
        named = ", ".join(given) or "none"
        raise GpuError(f"fit takes one variable, not {named}; type one: batch=range(1, 4097)")
    ((name, values),) = given.items()
    if isinstance(values, range):
        ascending: Sequence[float] = values if values.step > 0 else values[::-1]
    else:
        (listed,) = sweeping.check({name: values}).values()
        numbers = all(type(value) in (int, float) and math.isfinite(value) for value in listed)
        ascending = sorted(listed) if numbers else []
    if not ascending or ascending[0] <= 0:
        raise GpuError(f"{name}: the values must be numbers above 0, such as 16, 32")
    return name, ascending


def _program(
    code: Any, namespace: dict[str, Any], name: str, filename: str | None, text: str | None
) -> Program:
    passed = [name] if callable(code) and name in inspect.signature(code).parameters else []
    made = program(code, {**namespace, name: None}, filename=filename, text=text, passed=passed)
    if callable(code) and name not in (*passed, *made.reads):
        called = getattr(code, "__name__", type(code).__name__)
        raise GpuError(
            f"{name} makes no difference: {called} neither takes it nor reads it; "
            f"type def {called}({name}): …"
        )
    if unread := sweeping.unread([name], made, namespace):
        raise GpuError(f"{unread[0]}; give a variable that the code reads")
    return made


def _target(on: object) -> tuple[Device, tuple[Card, ...]]:
    try:
        device, cards = target_of("cuda" if on is None else on)
    except GpuError as error:
        if on is not None:
            raise
        raise GpuError(
            "there is no GPU; type a card's name, such as 'RTX 4090', or for virtual GPUs "
            f"{as_typed('%gpus --virtual 2')}"
        ) from error
    assert device is not None
    if device.kind != "cuda":
        raise GpuError(f"torch cannot limit the memory of {device}; type a GPU, or a card's name")
    return device, cards
