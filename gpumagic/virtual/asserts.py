"""Imitate CUDA's device-side asserts: after a bad index, every GPU of the process is dead.

The operator with the bad index succeeds, with wrong numbers, as it does on a GPU. The next wait
raises CUDA's error, and from then on everything does, until the virtual GPUs are turned off.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gpumagic.device import cuda_state
from gpumagic.telemetry.state_files import unpublish_death
from gpumagic.virtual import checks
from gpumagic.virtual.virtual_gpus import GPUS

TEXT = (
    "CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
# What the CPU's kernels say where CUDA's have an assert; sizes and dimensions the host checks.
_ASSERTED = re.compile(
    r"(?i)index .*out of (range|bounds)|tried to access index|Target .* out of bounds|"
    r"INDICES element is out|not in the valid range|Class values must be|"
    r"elements of (input|target) should be between 0 and 1|probability tensor contains"
)
enabled = failed = False
"""Whether asserts are imitated; whether an index was bad, which the next wait reports."""
dead = False
_Error: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)  # torch 2.8


def enable(stack: ExitStack) -> None:
    """Imitate asserts until a stack is closed."""
    global enabled
    enabled = True
    checks.listeners.append(_listen)

    @stack.callback
    def undo() -> None:
        global enabled
        enabled = False
        revive()


def revive() -> None:
    """Let the GPUs work again; their tensors are as they were."""
    global failed, dead
    if not failed:
        return
    failed = dead = False
    cuda_state.forget()
    unpublish_death()
    for gpu in GPUS:
        if gpu.account.refusal == TEXT:
            gpu.account.refuse("")


def wait() -> None:
    """Raise CUDA's error if an index was bad; each wait of the host calls it."""
    global dead
    __tracebackhide__ = True
    if failed:
        dead = True
        for gpu in GPUS:
            gpu.account.refuse(TEXT)
        raise _Error(TEXT)


def _listen(kind: str, operator: str, source: Any, destination: Any, nbytes: int) -> None:
    __tracebackhide__ = True
    wait()


def is_assert(error: BaseException) -> bool:
    """Whether CUDA's kernel would have failed in an assert where the CPU's raised an error."""
    return enabled and _ASSERTED.search(str(error)) is not None


def run_on(plan: Any, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Note that the device has failed; return a result of the right shape, of other values."""
    global failed, enabled
    low = [_harmless(x, plan.arguments[n] in plan.written) for n, x in enumerate(args)]
    given = {name: _harmless(x, name in plan.written) for name, x in kwargs.items()}
    enabled = False  # an error of this call is the user's
    try:
        result = kernel(plan, *low, **given)
    finally:
        enabled = True
    failed = True
    return result


def _harmless(value: Any, written: bool) -> Any:
    """Return indices as zeros and probabilities as halves."""
    if isinstance(value, (list, tuple)):
        return type(value)(_harmless(each, written) for each in value)
    if not isinstance(value, Tensor) or written or value.dtype == torch.bool:
        return value
    return torch.full_like(value, 0.5 if value.is_floating_point() else 0)
