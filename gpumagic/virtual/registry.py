"""Register the kernels at torch's dispatch keys while virtual GPUs are on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch._decomp  # registers the decompositions of recurrent networks

from gpumagic.virtual import sparse
from gpumagic.virtual.generators import host_kernels
from gpumagic.virtual.generic_kernel import kernel_of, run
from gpumagic.virtual.networks import network_kernels
from gpumagic.virtual.operators import on_metadata, overload, own_kernels, pinning_kernels

C: Any = torch._C
Kernel = Callable[..., Any]
# Kernels of these move bytes between processes, or are made anew by torch itself.
_LEFT_ALONE = {"aten", "c10d", "symm_mem", "_native"}


kernels: dict[str, Kernel] = {}
"""By name, those of aten at the key CUDA while virtual GPUs are on."""


def register(stack: ExitStack) -> None:
    """Register all kernels; closing `stack` puts back what was there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel": on purpose
        aten = torch.library.Library("aten", "IMPL")
        stack.callback(aten._destroy)
        stack.callback(kernels.clear)
        _register_dense(aten)
        _register_above(aten)
        _register_sparse(aten)
        _register_others(stack)
    rest = torch.library.Library("_", "IMPL", "CUDA")
    stack.callback(rest._destroy)
    rest.fallback(run)


def _register_dense(aten: Any) -> None:
    """The dispatch key CUDA, and what C++ gives to the CPU's though it is meant for a GPU."""
    kernels.update(own_kernels())
    # C++ would take these apart into operators of another name, or ask is_cuda within them.
    whole = {"convolution_backward", "native_dropout", "native_dropout_backward"}
    whole |= {
        n.removeprefix("aten::")
        for n in C._dispatch_get_all_op_names()
        if n.startswith("aten::_foreach_") and not n.endswith("out")
    }
    # On a CUDA build all of its own too: no real kernel must ever see these bytes.
    for name in (_names("CPU") | _names("CUDA") | whole) - {"_fused_rms_norm"}:
        if name not in kernels:
            kernels[name] = kernel_of(overload(name)) if _can_run(name) else _refusal(name)
    for name, kernel in kernels.items():
        _put(aten, name, kernel, "CUDA")
    for name, kernel in (pinning_kernels() | host_kernels()).items():
        _put(aten, name, kernel, "CPU")


def _register_above(aten: Any) -> None:
    """Operators that stand above autograd, and those that virtual GPUs refuse."""
    for name, kernel in network_kernels(overload).items():
        _put(aten, name, kernel, "AutogradCUDA")
        _put(aten, name, kernel, "CUDA")  # inference mode goes past the first
    for key in ("QuantizedCUDA", "NestedTensorCUDA"):
        for name in _names(key):
            _put(aten, name, _refusal(name), key)


def _register_sparse(aten: Any) -> None:
    makers = sparse.makers()
    for key, of_cpu in sparse.KEYS.items():
        as_it_is = C.DispatchKeySet(getattr(C.DispatchKey, of_cpu))
        for name in (_names(of_cpu) | _names(key)) - sparse.CPU_ONLY:
            if name in sparse.METADATA:
                kernel = on_metadata(overload(name), as_it_is)
            else:
                kernel = makers.get(name) or kernel_of(overload(name))
            _put(aten, name, kernel, key)


def _register_others(stack: ExitStack) -> None:
    """Operators of other libraries that have both kernels (torchvision's, if it is there)."""
    both = _all_names("CUDA") & _all_names("CPU")
    for full in both:
        space, _, name = full.partition("::")
        if space in _LEFT_ALONE:
            continue
        packet, _, variant = name.partition(".")
        op = getattr(getattr(getattr(torch.ops, space), packet), variant or "default")
        other = torch.library.Library(space, "IMPL")
        stack.callback(other._destroy)
        _put(other, name, kernel_of(op), "CUDA")


def _put(owner: Any, name: str, kernel: Kernel, key: str) -> None:
    owner.impl(name, kernel, key, allow_override=True)


def _all_names(key: str) -> set[str]:
    return set(C._dispatch_get_registrations_for_dispatch_key(key))


def _names(key: str) -> set[str]:
    """The operators of aten that have a kernel at `key`, without the prefix."""
    return {n.removeprefix("aten::") for n in _all_names(key) if n.startswith("aten::")}


def _can_run(name: str) -> bool:
    return any(
        C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
        for key in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    )


def _refusal(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        raise NotImplementedError(
            f"virtual GPUs have no aten::{name}: PyTorch has it for real GPUs only"
        )

    return kernel
