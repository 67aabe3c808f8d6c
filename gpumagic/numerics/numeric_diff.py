"""Find the operation at which two devices, or two dtypes, part: `gpumagic.diff`.

The user's variables, random state and settings do not change.
"""

import contextvars
import inspect
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from gpumagic.copies.trial import Trial
from gpumagic.device import Device, cuda_state
from gpumagic.errors import GpuError, meant, note
from gpumagic.isolation.settings import Randomness, deferred, kept
from gpumagic.isolation.worker import Quiet
from gpumagic.numerics.diff_result import NumericDiff
from gpumagic.numerics.divergence import divergences
from gpumagic.numerics.recorded_run import Recorder
from gpumagic.placement.torch_devices import as_torch, find
from gpumagic.usercode.program import Program, program

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_TYPE = "two devices or two dtypes are needed; type cpu 1, or float32 bfloat16"


def diff(
    code: str | Callable[[], Any],
    *between: object,
    namespace: dict[str, Any] | None = None,
    filename: str | None = None,
    text: str | None = None,
) -> NumericDiff:
    """Find the first operation at which two devices, or two dtypes, give different numbers.

    Parameters
    ----------
    code : str or callable
        It runs once on each side, on copies of the variables that it reads.
    *between : two objects
        Devices (``"cpu", 1``); or dtypes (``"float32", torch.bfloat16``), to which floating
        tensors are converted. By default the CPU and the current GPU.
    namespace : dict, optional
        The variables of the code; if None, a function's globals, or the caller's variables.
    filename, text : str, optional
        Where `code` is from, and how it is shown.

    Raises
    ------
    GpuError
        No such device or dtype, or code that cannot be run again.
    Exception
        The code's own error, with a note of the side.

    Examples
    --------
    >>> gpumagic.diff("net(x)", "cpu", 1)
    cpu and cuda:1 part at train.py, line 7: `x.softmax(-1)` (aten._softmax)
    """
    cuda_state.check()
    if not isinstance(code, str) and not callable(code):
        raise GpuError(f"diff takes code or a function, not {type(code).__name__}; type diff(step)")
    if namespace is None:
        own = getattr(inspect.unwrap(code), "__globals__", None) if callable(code) else None
        namespace = sys._getframe(1).f_globals if own is None else own
    pair = _sides(between or ("cpu", "cuda"))
    made = program(code, namespace, filename=filename, text=text)
    began, randomness, notes = time.monotonic(), Randomness(), dict[str, None]()
    runs = Recorder(0), Recorder(1)
    for run, (name, side) in zip(runs, pair.items(), strict=True):
        try:
            with kept(), Quiet() if run is runs[1] else nullcontext():
                randomness.restore()
                # The code's settings end with the context.
                said = contextvars.copy_context().run(_run, made, namespace, side, run)
                notes |= dict.fromkeys(said)
        except Exception as error:
            note(error, f"this was the run on {name}")
            raise
        finally:
            cuda_state.collect()
    sides, dtypes = tuple(pair), [d for d in pair.values() if isinstance(d, torch.dtype)]
    recorded = [run.operations for run in runs]
    found, count, largest = divergences(recorded, sides, dtypes)
    shown, seconds = made.text.strip("\n"), time.monotonic() - began
    longer = max(map(len, recorded))
    return NumericDiff(sides, shown, found, longer, count, largest, tuple(notes), seconds)


def _sides(given: tuple[object, ...]) -> dict[str, Device | torch.dtype]:
    """Return two devices or two dtypes, by name."""
    words = [str(each).removeprefix("torch.") for each in given]
    found: dict[str, Device | torch.dtype] = {
        word: getattr(torch, word) for word in words if word in _DTYPES
    }
    if not found:
        found = {str(device): device for device in map(find, given)}
    if len(given) != 2 or len(found) != 2:
        question = meant(" ".join({*words} - {*_DTYPES}), _DTYPES)
        raise GpuError(f"{' '.join(words)}: {question}{_TYPE}")
    return found


def _run(
    made: Program, namespace: dict[str, Any], side: Device | torch.dtype, recorder: Recorder
) -> list[str]:
    """Run the code once on copies; return notes for the user."""
    device = as_torch(side) if isinstance(side, Device) else None
    trial = Trial(made, device, namespace, {}, clock=time.perf_counter)
    try:
        trial.set_up()
        if isinstance(side, torch.dtype):
            torch.set_default_dtype(side)
            for tensor in trial.copies.tensors():
                # To type promotion, one without dimensions is like a number: an optimizer's step.
                if tensor.is_floating_point() and tensor.dim():
                    tensor.data = tensor.data.to(side)
        with recorder:
            value = trial.first()
        space = trial.copies.globals
        names = [name for name in (*made.reads, *made.assigned) if name in space]
        recorder.add_variables([*((name, space[name]) for name in names), ("Out", value)])
        virtual = isinstance(side, Device) and side.virtual
        said = [f"{side} is virtual: it rounds as the CPU does"] * virtual
        if recorder.left_out:
            said.append(f"{recorder.left_out:,} operations not compared: no room in 512 MiB")
        return [*trial.copies.notes, *said]
    finally:
        with deferred():
            trial.stack.close()
            trial.close()
