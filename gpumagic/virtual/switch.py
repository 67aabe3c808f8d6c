"""Turn virtual GPUs on and off, whole or not at all, by registering their kernels."""

import contextlib
import faulthandler
import functools
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import fields
from importlib.machinery import ExtensionFileLoader
from types import FunctionType
from typing import Any

import torch
import torch._decomp  # registers the decompositions of recurrent networks
from torch import nn

from gpumagic.telemetry.state_files import COUNTERS, NAME, Publisher
from gpumagic.usercode.files import unseen
from gpumagic.virtual import asserts, checks, cuda_api, flip, gate, torchless
from gpumagic.virtual.cuda_api import patch, refuse_compiling
from gpumagic.virtual.flip import writes
from gpumagic.virtual.generic_kernel import kernel_of, on_metadata, run
from gpumagic.virtual.networks import network_kernels
from gpumagic.virtual.operators import overload, own_kernels, pinning_kernels
from gpumagic.virtual.scratch import IN_PARTS
from gpumagic.virtual.streams import host_kernels
from gpumagic.virtual.virtual_gpus import GPUS, MemoryAccount, Properties, VirtualGpu, in_bad_fork

C: Any = torch._C
Kernel = Callable[..., Any]
# Kernels of these move bytes between processes, or torch itself recreates them.
_LEFT_ALONE = {"aten", "c10d", "symm_mem", "_native"}


_SHARE = {"_lazy_clone", "_unsafe_view", "unsafe_split"}
"""Composite operators whose results share an argument's bytes, which their schema does not tell."""
_TAKEN_APART = _SHARE | {"copy_", "linalg_lstsq", "masked_fill", "index_fill"}
"""The same, and composite operators that copy, read a number, or choose by the device."""

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
        _register_parts(aten)
        _register_others(stack)
    # TorchScript's fuser would compile for a GPU, and ask its driver.
    fuses = C._jit_can_fuse_on_gpu()
    stack.callback(C._jit_override_can_fuse_on_gpu, fuses)
    C._jit_override_can_fuse_on_gpu(False)
    rest = torch.library.Library("_", "IMPL", "CUDA")
    stack.callback(rest._destroy)
    rest.fallback(run)


def _register_dense(aten: Any) -> None:
    """Register at the dispatch key CUDA, and at CPU's for calls that C++ sends there for a GPU."""
    kernels.update(own_kernels())
    # What C++ makes of other operators may ask for the device within, and find CUDA's own stubs:
    # it runs as a whole on the CPU.
    explicit = "CompositeExplicitAutograd"
    named = _names(explicit) | _names(f"{explicit}NonFunctional")
    composites = {n for n in named if not n.endswith("out")}
    whole = {name for name in composites if _is_whole(overload(name))}
    # The second refuses lengths that are not the host's.
    not_whole = {"_fused_rms_norm", "_pack_padded_sequence", *host_kernels()}
    # On a CUDA build all of its own too: no real kernel must ever see these bytes.
    run_here = _names("CPU") | whole
    for name in run_here | _names("CUDA"):
        if name not in kernels and name not in not_whole and name.partition(".")[0] not in IN_PARTS:
            runs = name in run_here or _can_run(f"aten::{name}")
            runs &= "histogram" not in name  # which CUDA has not
            kernels[name] = kernel_of(overload(name)) if runs else _refusal(f"aten::{name}")
    for name, kernel in kernels.items():
        _put(aten, name, kernel, "CUDA")
    for name, kernel in (pinning_kernels() | host_kernels()).items():
        _put(aten, name, kernel, "CPU")


def _register_above(aten: Any) -> None:
    """Register operators that run above autograd, and the ones that virtual GPUs refuse."""
    for name, kernel in network_kernels(overload).items():
        _put(aten, name, kernel, "AutogradCUDA")
        _put(aten, name, kernel, "CUDA")  # inference mode goes past the first
    for name in _names("QuantizedCUDA"):
        _put(aten, name, _refusal(f"aten::{name}"), "QuantizedCUDA")


def _register_parts(aten: Any) -> None:
    """Register kernels for sparse and nested tensors, which have dispatch keys of their own."""
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
    """Register operators of other libraries (torchvision's …), also of ones loaded later."""
    known: set[str] = set()
    libraries = stack.enter_context(ExitStack())  # open until off: `stack` itself is handed on

    def register_new() -> None:
        new = _all_names("CUDA") - known
        known.update(new)
        for full in sorted(new):
            space, _, name = full.partition("::")
            if space not in _LEFT_ALONE:
                kernel = kernel_of(overload(name, space)) if _can_run(full) else _refusal(full)
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
    loader, ops = ExtensionFileLoader, type(torch.ops)
    patch(stack, loader, exec_module=after(loader.exec_module))
    patch(stack, ops, load_library=after(ops.load_library))


def _put(owner: Any, name: str, kernel: Kernel, key: str) -> None:
    python = isinstance(kernel, FunctionType)  # neither the generic kernel nor one of C++
    owner.impl(name, unseen(kernel) if python else kernel, key, allow_override=True)


def _all_names(key: str) -> set[str]:
    return set(C._dispatch_get_registrations_for_dispatch_key(key))


def _names(key: str) -> set[str]:
    """The operators of aten that have a kernel at `key`, without the prefix."""
    return {n.removeprefix("aten::") for n in _all_names(key) if n.startswith("aten::")}


@functools.cache
def _is_whole(op: Any) -> bool:
    """Whether a composite operator returns the same on the CPU as on a GPU, except the device.

    Not one that is about views or devices, or that draws and is given no generator.
    """
    schema, tags = op._schema, op.tags
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    moves = "device" in kinds and any("Tensor" in kind for kind in kinds.values())
    draws = torch.Tag.nondeterministic_seeded in tags and "generator" not in kinds
    if moves or draws or torch.Tag.inplace_view in tags or schema.name[6:] in _TAKEN_APART:
        return False
    if any(argument.kwarg_only and writes(argument) for argument in schema.arguments):
        return False
    if not schema.returns:
        return any(map(writes, schema.arguments))
    return all("Tensor" in str(r.type) and (writes(r) or not r.alias_info) for r in schema.returns)


def _can_run(full: str) -> bool:
    return any(
        C._dispatch_has_kernel_for_dispatch_key(full, key)
        for key in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    )


def _refusal(full: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        raise NotImplementedError(
            f"virtual GPUs have no {full}: there is a kernel for real GPUs only"
        )

    return kernel


_on = ExitStack()
_lock = threading.RLock()


def imitate_asserts() -> None:
    """Let a bad index end the virtual GPUs, as a real one's assert does, until they are off."""
    with _lock:
        if not asserts.enabled:
            asserts.enable(_on)


def turn_on(number: int, capacity: int | None, *, force: bool = False) -> None:
    """Give this process `number` virtual GPUs of `capacity` bytes, or GpuError where refused."""
    with _lock:
        gate.check(force=force)
        install(number, capacity)


def install(number: int, capacity: int | None) -> None:
    """Turn virtual GPUs on without asking the gate: only for its own child process."""
    global _on
    with ExitStack() as stack:
        stack.callback(GPUS.clear)
        _make(stack, number, capacity)
        gate.install(stack)
        cuda_api.install(stack)
        refuse_compiling(stack)
        register(stack)
        torch.cuda.init()
        stack.callback(_back_to_first)
        _on = stack.pop_all()


def _back_to_first() -> None:
    if not in_bad_fork():  # where C++ would refuse, and there is nothing to leave in order
        C._accelerator_setDeviceIndex(0)


def turn_off() -> None:
    """Undo all of it."""
    with _lock:
        _on.close()


def _make(stack: ExitStack, number: int, capacity: int | None) -> None:
    facts = torchless.facts_of(number, capacity)
    publisher = Publisher(facts)
    stack.callback(publisher.close)
    for index, (each, row) in enumerate(zip(facts, publisher.counters, strict=True)):
        account = MemoryAccount(index, each.memory_total, row)
        stack.callback(account.unpublish)
        number_of = uuid.UUID(each.uuid.removeprefix("GPU-"))
        GPUS.append(VirtualGpu(index, account, Properties(NAME, each.memory_total, number_of)))
    stack.callback(checks.listeners.clear)
    torchless.show(stack, facts, lambda n: GPUS[n].account.reserved)


def stand_in(gpus: Iterable[tuple[Any, int]]) -> None:
    """Let virtual GPUs answer for real ones in a forked child, which may not call their driver.

    Tensors cannot be made on them: it is for following code on tensors without data. Each is given
    by what ``torch.cuda.get_device_properties`` says of it, and the bytes allocated there. Virtual
    GPUs that are on are there no more.
    """
    on = bool(GPUS)  # and they are to stand aside
    GPUS.clear()
    for index, (real, allocated) in enumerate(gpus):
        facts = {f.name: getattr(real, f.name) for f in fields(Properties) if hasattr(real, f.name)}
        account = MemoryAccount(index, real.total_memory, [0] * COUNTERS)
        account.allocator.take(allocated)
        properties = Properties(**{"uuid": uuid.uuid4(), **facts})
        GPUS.append(VirtualGpu(index, account, properties))
    stack = ExitStack()  # never closed: the child ends with it
    if on:
        cuda_api.patch(stack, torch.cuda, default_generators=cuda_api.equipped())
    else:
        gate.install(stack)
        cuda_api.install(stack)
    torch.cuda.init()


_CAPACITY = 2**30


def try_out() -> None:
    """Turn virtual GPUs on and off twice, in a process of `gate`, and use what could crash."""
    faulthandler.enable()
    _backward_on_the_cpu()
    for _ in range(2):
        install(2, _CAPACITY)
        _train()
        _cross()
        _pin()
        _mismatch()
        turn_off()
        assert not torch.cuda.is_initialized()
    _backward_on_the_cpu()
    print("verdict: works", flush=True)


def _backward_on_the_cpu() -> None:
    (torch.ones(2, requires_grad=True) * 2).sum().backward()


def _train() -> None:
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)
    net = nn.Sequential(*layers).to("cuda:1")
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 1, 5, 5, device="cuda:1")).square().mean().backward()
    optimizer.step()
    assert torch.cuda.memory_allocated(1) > 0


def _cross() -> None:
    x = torch.ones(3, device="cuda:0", requires_grad=True)
    (x.to("cuda:1") ** 2).sum().backward()
    assert x.grad is not None
    gradient = torch.func.grad(lambda t: (t**2).sum())(x.detach())
    for g in (x.grad, gradient):
        assert g.device == torch.device("cuda:0")
        assert g.tolist() == [2, 2, 2]


def _pin() -> None:
    assert torch.ones(2).pin_memory().is_pinned()
    assert torch.zeros(2, pin_memory=True).cuda().sum().item() == 0
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    assert accelerator.type == "cuda"


def _mismatch() -> None:
    with contextlib.suppress(RuntimeError):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
        raise AssertionError("two devices were taken for one")
