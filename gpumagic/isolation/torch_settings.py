"""List the settings of torch that code may change, for its thread and for the process."""

import sys
from functools import cache, partial
from typing import Any

import torch
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch as dispatch

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
        Setting("inference mode", torch.is_inference_mode_enabled, _set_inference_mode),
        Setting("the default device, and modes of functions", _modes, _set_modes),
        Setting("modes of operators", dispatch._get_current_dispatch_mode_stack, _set_operators),
        *accessors(torch, "_default_dtype", "_num_threads", "_deterministic_debug_mode"),
        *accessors(torch, "_float32_matmul_precision"),
        *pairs(torch, ("is_warn_always_enabled", "set_warn_always")),
        *pairs(
            torch._C,
            ("_is_multithreading_enabled", "_set_multithreading_enabled"),
            ("_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
            ("_check_sparse_tensor_invariants", "_set_check_sparse_tensor_invariants"),
        ),
        Setting(
            "torch.autograd.set_detect_anomaly",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda now: torch.set_anomaly_enabled(*now),
        ),
        Setting("denormals", lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal),
        mapping("torch.set_printoptions", vars(torch._tensor_str.PRINT_OPTS)),
        *attributes(torch.utils.deterministic, "fill_uninitialized_memory"),
        *accessors(torch.__future__, "_swap_module_params_on_conversion"),
        *accessors(torch.__future__, "_overwrite_module_params_on_conversion"),
        *accessors(torch.multiprocessing, "_sharing_strategy"),
        *_of_backends(),
        *attributes(module, "_global_is_full_backward_hook"),
        *(
            mapping(f"torch's {name}", hooks, grows=True)
            for name, hooks in vars(module).items()
            if name.startswith("_global_") and isinstance(hooks, dict)
        ),
    ]


def of_cuda() -> list[Setting]:
    """Return the settings of the current GPU, if CUDA is initialized."""
    if not torch.cuda.is_initialized():
        return []
    return [
        *pairs(torch.cuda, ("current_device", "set_device"), ("current_stream", "set_stream")),
        *accessors(torch.cuda, "_sync_debug_mode"),
    ]


def _of_backends() -> list[Setting]:
    backends = torch.backends
    cudnn = "enabled benchmark benchmark_limit deterministic allow_tf32 fp32_precision"
    matmul = (
        "allow_tf32 allow_fp16_accumulation fp32_precision "
        "allow_fp16_reduced_precision_reduction allow_bf16_reduced_precision_reduction"
    )
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    return [
        *attributes(backends.cudnn, *cudnn.split()),
        *attributes(backends.mkldnn, "enabled", "deterministic", "allow_tf32"),
        *attributes(backends.cuda.matmul, *matmul.split()),
        *attributes(backends.opt_einsum, "enabled", "strategy"),
        *attributes(backends.quantized, "engine"),
        *pairs(backends.cuda, *((f"{k}_sdp_enabled", f"enable_{k}_sdp") for k in kinds)),
        *accessors(backends.mha, "_fastpath_enabled"),
    ]


# A guard ends its mode when it is freed.
_held: list[Any] = []


def _set_inference_mode(on: bool) -> None:
    _held.append(torch._C._InferenceMode(on))
    _held[-1].__enter__()


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


def _set_operators(before: list[Any]) -> None:
    while len(dispatch._get_current_dispatch_mode_stack()) > len(before):
        dispatch._pop_mode()
