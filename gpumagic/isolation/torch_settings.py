"""List what code may set in torch, for its thread and for the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch as dispatch

from gpumagic.isolation.setting import Setting, attributes, mapping, pairs


def of_a_thread() -> Iterator[Setting]:
    """What each thread decides for itself."""
    yield from pairs(
        torch,
        ("is_grad_enabled", "set_grad_enabled"),
        ("is_autocast_cache_enabled", "set_autocast_cache_enabled"),
    )
    for kind in ("cpu", "cuda", "mps"):
        for read, write in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        ):
            yield Setting(f"autocast on {kind}", partial(read, kind), partial(write, kind))


def of_the_process() -> Iterator[Setting]:
    """All else."""
    yield Setting("inference mode", torch.is_inference_mode_enabled, _set_inference_mode)
    yield Setting("the default device, and modes of functions", _modes, _set_modes)
    yield Setting("modes of operators", dispatch._get_current_dispatch_mode_stack, _set_operators)
    yield from pairs(
        torch,
        ("get_default_dtype", "set_default_dtype"),
        ("get_num_threads", "set_num_threads"),
        ("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
        ("get_float32_matmul_precision", "set_float32_matmul_precision"),
        ("is_warn_always_enabled", "set_warn_always"),
    )
    yield from pairs(
        torch._C,
        ("_is_multithreading_enabled", "_set_multithreading_enabled"),
        ("_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
        ("_check_sparse_tensor_invariants", "_set_check_sparse_tensor_invariants"),
    )
    yield Setting(
        "torch.autograd.set_detect_anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda now: torch.set_anomaly_enabled(*now),
    )
    yield Setting(
        "torch.set_flush_denormal",
        lambda: sys.float_info.min / 2 == 0.0,
        torch.set_flush_denormal,
    )
    yield mapping("torch.set_printoptions", vars(torch._tensor_str.PRINT_OPTS))
    yield from attributes(torch.utils.deterministic, "fill_uninitialized_memory")
    yield from pairs(
        torch.__future__,
        ("get_swap_module_params_on_conversion", "set_swap_module_params_on_conversion"),
        (
            "get_overwrite_module_params_on_conversion",
            "set_overwrite_module_params_on_conversion",
        ),
    )
    yield from pairs(torch.multiprocessing, ("get_sharing_strategy", "set_sharing_strategy"))
    yield from _of_backends()
    yield from attributes(module, "_global_is_full_backward_hook")
    for name, held in module_hooks().items():
        yield mapping(f"torch's {name}", held, grows=True)
    if torch.cuda.is_initialized():
        yield from pairs(
            torch.cuda,
            ("current_device", "set_device"),
            ("current_stream", "set_stream"),
            ("get_sync_debug_mode", "set_sync_debug_mode"),
        )


def _of_backends() -> Iterator[Setting]:
    backends = torch.backends
    names = "enabled benchmark benchmark_limit deterministic allow_tf32 fp32_precision"
    yield from attributes(backends.cudnn, *names.split())
    yield from attributes(backends.mkldnn, "enabled", "deterministic", "allow_tf32")
    names = "allow_tf32 allow_fp16_accumulation fp32_precision"
    yield from attributes(backends.cuda.matmul, *names.split())
    for kind in ("fp16", "bf16"):
        yield from attributes(backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction")
    yield from attributes(backends.opt_einsum, "enabled", "strategy")
    yield from attributes(backends.quantized, "engine")
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        yield from pairs(backends.cuda, (f"{kind}_sdp_enabled", f"enable_{kind}_sdp"))
    yield from pairs(backends.mha, ("get_fastpath_enabled", "set_fastpath_enabled"))


def module_hooks() -> dict[str, dict[Any, Any]]:
    """Those of all modules, by the names that torch has for them."""
    return {
        name: held
        for name, held in vars(module).items()
        if name.startswith("_global_") and isinstance(held, dict)
    }


def _set_inference_mode(on: bool) -> None:
    _held.append(torch._C._InferenceMode(on))
    _held[-1].__enter__()


# A guard that goes away ends its mode.
_held: list[Any] = []


def _modes() -> tuple[list[Any], Any, Any]:
    # The default device is such a mode, and kept besides where torch would end it.
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
