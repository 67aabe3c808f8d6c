"""List the settings of torch that code may change, for its thread and for the process."""

from functools import cache, partial
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from gpumagic.isolation.python_settings import Setting, accessors, attributes, mapping, pairs


@cache
def of_a_thread() -> list[Setting]:
    """Return the settings of a thread."""
    autocast: dict[str, tuple[Any, Any]] = {
        "enabled": (torch.is_autocast_enabled, torch.set_autocast_enabled),
        "dtype": (torch.get_autocast_dtype, torch.set_autocast_dtype),
    }
    return [
        *pairs(
            torch,
            ("is_grad_enabled", "set_grad_enabled"),
            ("is_autocast_cache_enabled", "set_autocast_cache_enabled"),
        ),
        *(
            Setting(f"autocast {name}, {kind}", partial(read, kind), partial(write, kind))
            for kind in ("cpu", "cuda", "mps")
            for name, (read, write) in autocast.items()
        ),
    ]


@cache
def of_the_process() -> list[Setting]:
    """Return the settings of the process, without the GPU's."""
    return [
        Setting("the default device, and modes of functions", _modes, _set_modes),
        *accessors(torch, "_default_dtype", "_num_threads", "_deterministic_debug_mode"),
        *accessors(torch, "_float32_matmul_precision"),
        Setting(
            "torch.autograd.set_detect_anomaly",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda now: torch.set_anomaly_enabled(*now),
        ),
        mapping("torch.set_printoptions", vars(torch._tensor_str.PRINT_OPTS)),
        *_of_backends(),
    ]


def of_cuda() -> list[Setting]:
    """Return the settings of the current GPU, if CUDA is initialized."""
    if not torch.cuda.is_initialized():
        return []
    return pairs(torch.cuda, ("current_device", "set_device"), ("current_stream", "set_stream"))


def _of_backends() -> list[Setting]:
    backends = torch.backends
    cudnn = "enabled benchmark deterministic allow_tf32 fp32_precision"
    matmul = (
        "allow_tf32 allow_fp16_accumulation fp32_precision "
        "allow_fp16_reduced_precision_reduction allow_bf16_reduced_precision_reduction"
    )
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    return [
        *attributes(backends.cudnn, *cudnn.split()),
        *attributes(backends.cuda.matmul, *matmul.split()),
        *pairs(backends.cuda, *((f"{k}_sdp_enabled", f"enable_{k}_sdp") for k in kinds)),
    ]


def _modes() -> tuple[list[Any], Any, Any]:
    # The default device is a mode too, saved separately because torch would end it.
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return _get_current_function_mode_stack(), default, torch.utils._device.CURRENT_DEVICE


def _set_modes(before: tuple[list[Any], Any, Any]) -> None:
    stack, torch._GLOBAL_DEVICE_CONTEXT.device_context, current = before
    while _get_current_function_mode_stack():
        torch.overrides._pop_mode()
    for mode in stack:
        torch.overrides._push_mode(mode)
    torch.utils._device.CURRENT_DEVICE = current
