"""What of torch is another while a dry run lasts, and only in the dry run's own objects and calls.

Each has a reason: fakes are no plain tensors to it, it would start processes or touch the device's
memory, or it would write a file.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch._meta_registrations
import torch.utils.data
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils
from torch.utils.data.dataloader import DataLoader, _SingleProcessDataLoaderIter

from gpumagic.device import here as devices_here
from gpumagic.dryrun.answers import Calls, set_data
from gpumagic.dryrun.fakes import Fakes
from gpumagic.dryrun.lazy import new_buffer, new_parameter


def patch(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or a class; closing `stack` puts back what was there."""
    if name not in vars(owner):
        return
    stack.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def install(
    stack: ExitStack, mode: Fakes, calls: Calls, note: Callable[[str], None], wait: Any
) -> None:
    """Put all of it in force until `stack` closes.

    Parameters
    ----------
    mode : Fakes
    calls : Calls
    note : callable
        Told what was left out, as a phrase.
    wait : callable
        Told of a wait for a device.
    """
    patch(stack, fake_tensor, "init_gpu_context", _nothing)
    patch(stack, FakeTensor, "tolist", lambda self: calls.list_of(self, sys._getframe(1)))
    patch(stack, nn.Module, "_apply", _apply(vars(nn.Module)["_apply"]))
    patch(stack, UninitializedParameter, "__new__", staticmethod(new_parameter(mode)))
    patch(stack, UninitializedBuffer, "__new__", staticmethod(new_buffer(mode)))
    patch(stack, DataLoader, "_get_iterator", _one_process)
    for module in (optimizers, _foreach_utils):
        # By their types torch decides whether an optimizer works on all tensors at once.
        kinds = module._foreach_supported_types
        kinds.append(FakeTensor)
        stack.callback(kinds.remove, FakeTensor)
    patch(stack, torch, "save", _left_out("torch.save", note))
    patch(stack, torch.jit, "save", _left_out("torch.jit.save", note))
    patch(stack, torch, "compile", _eager(note))
    for name in ("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        patch(stack, torch.cuda, name, _nothing)
    patch(stack, torch.cuda, "synchronize", wait)
    if any(device.virtual for device in devices_here(memory=False)):
        # Their kernels are the CPU's, which make other tensors beside the result.
        patch(stack, torch._meta_registrations, "device_hint", lambda tensor: "cpu")
    # A function mode is on: by that alone torch would leave its fused layers out.
    patch(stack, torch.overrides, "has_torch_function", _no)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _no(*args: Any) -> bool:
    return False


def _left_out(name: str, note: Callable[[str], None]) -> Callable[..., None]:
    return lambda *args, **kwargs: note(f"{name} was left out")


def _eager(note: Callable[[str], None]) -> Callable[..., Any]:
    def compiled(model: Any = None, **options: Any) -> Any:
        note("torch.compile was left out: what it saves in memory is not counted")
        return model if model is not None else (lambda function: function)

    return compiled


def _one_process(loader: Any) -> Any:
    words = vars(loader)
    changed = {"num_workers": 0, "pin_memory": False, "prefetch_factor": None, "timeout": 0}
    before = {name: words[name] for name in changed if name in words}
    words.update(changed)
    try:
        return _SingleProcessDataLoaderIter(loader)
    finally:
        words.update(before)


def _apply(real: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.to`, `.cuda`, `.half` …: torch swaps the parameters of fakes, which fails."""

    @functools.wraps(real)
    def apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        own = [*self._parameters.values(), *self._buffers.values()]
        if any(t is not None and not isinstance(t, FakeTensor) for t in own):
            return real(self, fn, recurse)
        if recurse:
            for module in self.children():
                module._apply(fn)
        for parameter in self._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    set_data(parameter, fn(parameter))
                    if parameter.grad is not None:
                        set_data(parameter.grad, fn(parameter.grad))
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    return apply


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """torch's switches and random states, as they were."""
    with ExitStack() as stack:
        for read, write in (
            (torch.is_grad_enabled, torch.set_grad_enabled),
            (torch.get_default_dtype, torch.set_default_dtype),
            (torch.get_num_threads, torch.set_num_threads),
            (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
            (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
            (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
            (torch.get_rng_state, torch.set_rng_state),
        ):
            stack.callback(_write, read, write, read())
        stack.callback(_default_device, torch.utils._device.CURRENT_DEVICE)
        for name in ("benchmark", "deterministic", "enabled"):
            stack.callback(setattr, torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
        if torch.cuda.is_initialized():
            stack.callback(torch.cuda.set_device, torch.cuda.current_device())
            for index in range(torch.cuda.device_count()):
                state = torch.cuda.get_rng_state(index)
                stack.callback(torch.cuda.set_rng_state, state, index)
        yield


def _default_device(before: Any) -> None:
    if before != torch.utils._device.CURRENT_DEVICE:
        torch.set_default_device(before)


def _write(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> None:
    now = read()
    if now is not value and (isinstance(value, torch.Tensor) or now != value):
        write(value)
