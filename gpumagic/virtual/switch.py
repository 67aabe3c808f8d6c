"""Install virtual GPUs in torch, and remove them when an ExitStack closes."""

import functools
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from importlib.machinery import ExtensionFileLoader
from types import FunctionType
from typing import Any

import torch
import torch._decomp  # registers the decompositions of recurrent networks

from gpumagic.telemetry.state_files import COUNTERS, VirtualFacts
from gpumagic.usercode.files import unseen
from gpumagic.virtual import cuda_api, flip, gate
from gpumagic.virtual.cuda_api import patch
from gpumagic.virtual.flip import writes
from gpumagic.virtual.generic_kernel import kernel_of, on_metadata, returns_view
from gpumagic.virtual.memory_account import MemoryAccount
from gpumagic.virtual.networks import network_kernels
from gpumagic.virtual.operators import collective, cpu_kernels, overload, own_kernels
from gpumagic.virtual.scratch import IN_PARTS
from gpumagic.virtual.virtual_gpus import GPUS, Properties, VirtualGpu, in_bad_fork

C: Any = torch._C
Kernel = Callable[..., Any]
# Namespaces that `_register_others` skips. `_register_dense` registers aten, and torch registers
# _native itself. symm_mem needs memory that several processes share.
_LEFT_ALONE = {"aten", "symm_mem", "_native"}
_SHARE = {"_lazy_clone", "_unsafe_view", "unsafe_split"}  # their results are undeclared aliases
_DECOMPOSED = _SHARE | {"copy_", "linalg_lstsq", "masked_fill", "index_fill"}
"""Composite operators to decompose: they alias or copy memory, or depend on values or devices."""

kernels: dict[str, Kernel] = {}
"""Kernels of aten at the dispatch key CUDA, by name. Empty while virtual GPUs are off."""


def register(stack: ExitStack) -> None:
    """Register all kernels; closing `stack` removes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel" is intended
        aten = torch.library.Library("aten", "IMPL")
        stack.callback(aten._destroy)
        stack.callback(kernels.clear)
        _register_dense(aten)
        for name, kernel in network_kernels().items():
            _put(aten, name, kernel, "AutogradCUDA")
            _put(aten, name, kernel, "CUDA")  # inference mode skips AutogradCUDA
        _register_parts(aten)
        _register_others(stack)
    # Turn off TorchScript's fuser, which would compile GPU code and call the driver.
    stack.callback(C._jit_override_can_fuse_on_gpu, C._jit_can_fuse_on_gpu())
    C._jit_override_can_fuse_on_gpu(False)
    rest = torch.library.Library("_", "IMPL", "CUDA")
    stack.callback(rest._destroy)
    rest.fallback(lambda op, *args, **kwargs: kernel_of(op)(*args, **kwargs))


def _register_dense(aten: Any) -> None:
    """Register aten's kernels: the kernels of `cpu_kernels` at the key CPU, all others at CUDA."""
    kernels.update(own_kernels())
    # Run each composite operator as one CPU call. With GPU tensors, its C++ code might call CUDA.
    explicit = "CompositeExplicitAutograd"
    named = _names(explicit) | _names(f"{explicit}NonFunctional")
    whole = {n for n in named if not n.endswith("out") and _is_whole(overload(n))}
    # As a whole, `_pack_padded_sequence` would accept lengths on a GPU, but CUDA refuses them.
    not_whole = {"_fused_rms_norm", "_pack_padded_sequence", *cpu_kernels()}
    # Also replace a CUDA build's real CUDA kernels, which must never get a virtual GPU's bytes.
    run_here = _names("CPU") | whole
    for name in run_here | _names("CUDA"):
        if name not in kernels and name not in not_whole and name.partition(".")[0] not in IN_PARTS:
            runs = name in run_here or _can_run(f"aten::{name}")
            runs &= "histogram" not in name  # CUDA has no histogram kernels
            kernels[name] = kernel_of(overload(name)) if runs else _refusal(f"aten::{name}")
    for name, kernel in kernels.items():
        _put(aten, name, kernel, "CUDA")
    for name, kernel in cpu_kernels().items():
        _put(aten, name, kernel, "CPU")


def _register_parts(aten: Any) -> None:
    """Register kernels at the dispatch keys of sparse and nested tensors."""
    makers = flip.makers()
    for key, of_cpu in flip.KEYS.items():
        as_it_is = C.DispatchKeySet(getattr(C.DispatchKey, of_cpu))
        there = _names(of_cpu)
        for name in (there | _names(key)) - flip.CPU_ONLY:
            op = overload(name)
            if name not in there:
                kernel = _refusal(f"aten::{name}")
            elif name in flip.METADATA or not (name.endswith("out") or _is_whole(op)):
                kernel = makers.get(name) or on_metadata(op, as_it_is)
            else:
                kernel = kernel_of(op, dense=False)
            _put(aten, name, kernel, key)


def _register_others(stack: ExitStack) -> None:
    """Register kernels of collectives, and of libraries (torchvision …) imported now or later."""
    known: set[str] = set()
    libraries = stack.enter_context(ExitStack())

    def register_new() -> None:
        new = _all_names("CUDA") - known
        known.update(new)
        for full in sorted(new):
            space, _, name = full.partition("::")
            if space not in _LEFT_ALONE:
                make = collective if space == "c10d" else kernel_of
                kernel = make(overload(name, space)) if _can_run(full) else _refusal(full)
                other = torch.library.Library(space, "IMPL")
                libraries.callback(other._destroy)
                _put(other, name, kernel, "CUDA")

    def after(load: Callable[..., Any]) -> Callable[..., Any]:
        @unseen
        @functools.wraps(load)
        def load_and_register(*args: Any, **kwargs: Any) -> Any:
            loaded = load(*args, **kwargs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                register_new()
            return loaded

        return load_and_register

    register_new()
    patch(stack, ExtensionFileLoader, exec_module=after(ExtensionFileLoader.exec_module))
    patch(stack, type(torch.ops), load_library=after(type(torch.ops).load_library))


def _put(owner: Any, name: str, kernel: Kernel, key: str) -> None:
    python = isinstance(kernel, FunctionType)  # False for the generic kernel and C++ kernels
    owner.impl(name, unseen(kernel) if python else kernel, key, allow_override=True)


def _all_names(key: str) -> set[str]:
    return set(C._dispatch_get_registrations_for_dispatch_key(key))


def _names(key: str) -> set[str]:
    """Return the names of aten's operators with a kernel at `key`. The names lack ``aten::``."""
    return {n.removeprefix("aten::") for n in _all_names(key) if n.startswith("aten::")}


@functools.cache
def _is_whole(op: Any) -> bool:
    """Whether a composite operator for GPU tensors can run as a whole on the CPU."""
    schema = op._schema
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    moves = "device" in kinds and "Tensor" in " ".join(kinds.values())
    draws = torch.Tag.nondeterministic_seeded in op.tags and "generator" not in kinds
    if moves or draws or torch.Tag.inplace_view in op.tags or schema.name[6:] in _DECOMPOSED:
        return False
    written = [*filter(writes, schema.arguments)]
    if returns_view(op) or any(argument.kwarg_only for argument in written):
        return False
    if not schema.returns:
        return bool(written)
    return all("Tensor" in str(r.type) for r in schema.returns)


def _can_run(full: str) -> bool:
    return any(
        C._dispatch_has_kernel_for_dispatch_key(full, key)
        for key in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    )


def _refusal(full: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        why = "it has a kernel for real GPUs only"
        raise NotImplementedError(f"virtual GPUs do not support {full}: {why}")

    return kernel


def install(stack: ExitStack, facts: Sequence[VirtualFacts], rows: Sequence[Any]) -> None:
    """Install the virtual GPUs in `facts` until `stack` closes. Write their counters to `rows`."""
    stack.callback(GPUS.clear)
    for each, row in zip(facts, rows, strict=True):
        number = uuid.UUID(each.uuid.removeprefix("GPU-"))
        stack.callback(_add(Properties(each.name, each.memory_total, number), row).unpublish)
    gate.install(stack)
    cuda_api.install(stack)
    register(stack)
    torch.cuda.init()
    # When `stack` closes, make GPU 0 current, but not in a forked child, where the call would fail.
    stack.callback(lambda: in_bad_fork() or C._accelerator_setDeviceIndex(0))


def _add(properties: Properties, row: Any) -> MemoryAccount:
    account = MemoryAccount(len(GPUS), properties.total_memory, row)
    GPUS.append(VirtualGpu(len(GPUS), account, properties))
    return account


def stand_in(gpus: Iterable[tuple[Any, int]]) -> None:
    """In a forked child, replace `gpus` by virtual GPUs with the same properties and used bytes."""
    on = bool(GPUS)  # whether virtual GPUs are on and will be replaced
    GPUS.clear()
    for real, allocated in gpus:
        facts: dict[str, Any] = {"uuid": uuid.uuid4()}
        for field in fields(Properties):
            # A build of torch may lack a field. Reading a clock rate asks the driver, and may fail.
            with suppress(AttributeError, RuntimeError):
                facts[field.name] = getattr(real, field.name)
        _add(Properties(**facts), [0] * COUNTERS).allocator.allocate(allocated)
    stack = ExitStack()  # never closed, so that the patches last until the child ends
    if on:
        patch(stack, torch.cuda, default_generators=cuda_api.equipped())
    else:
        gate.install(stack)
        cuda_api.install(stack)
    torch.cuda.init()
