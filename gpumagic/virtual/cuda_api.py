"""Provide what ``torch.cuda`` finds in ``torch._C`` on a CUDA build with GPUs.

The stock ``torch.cuda`` runs unchanged on top of it. Everything is set through :func:`patch`, which
notes what was there. Compiling kernels for a virtual GPU is refused at once, with what to type
instead; torch's profiler shows the CPU's times.
"""

import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpumagic.device.caching_allocator import MemoryStat
from gpumagic.usercode.files import unseen
from gpumagic.virtual import asserts, collectives
from gpumagic.virtual.memory_history import MemoryApi
from gpumagic.virtual.streams import AnyEvent, AnyStream, Event, Generator, Stream
from gpumagic.virtual.virtual_gpus import GPUS, gpu_of, in_bad_fork

_init: Any = torch.autograd.profiler.profile.__init__


class Nvtx:
    """Accept marks for a profiler, and drop them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: 0


def on_the_cpu(
    self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **how: Any
) -> None:
    """`torch.autograd.profiler.profile.__init__`, where C++ would report a fault of each event."""
    if enabled and (use_cuda or use_device == "cuda"):
        warnings.warn("virtual GPUs: the profile has the CPU's times alone", stacklevel=3)
        how["use_cpu"], use_device = True, None
    _init(self, enabled, use_device=use_device, **how)


def make(nbytes: int, device: torch.device) -> Any:
    """Make a storage of `nbytes` on a virtual GPU, charged to it."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def to(
    self: Any, device: torch.device, non_blocking: bool = False, _to: Any = torch._utils._to
) -> Any:
    """`torch.storage._to`, which `UntypedStorage.cuda` and `torch.load` call."""
    if device.type != "cuda" or self.device == device:
        return _to(self, device, non_blocking)
    return make(self.nbytes(), device).copy_(self)


def clone(self: Any, _clone: Any = torch.storage._StorageBase.clone) -> Any:
    """`UntypedStorage.clone`, by which `copy.deepcopy` copies a tensor."""
    if self.device.type != "cuda":
        return _clone(self)
    return make(self.nbytes(), self.device).copy_(self)


_REAL_ONLY = {
    "resize_": "virtual GPUs cannot resize a storage, as FSDP does; use a mesh of CPUs",
    "_share_cuda_": "virtual GPUs share no memory with other processes; send tensor.cpu()",
}


def refusals() -> dict[str, Any]:
    """Return methods that refuse what C++ offers only for storages of real GPUs."""
    return {name: _refusal(getattr(torch.UntypedStorage, name), name) for name in _REAL_ONLY}


def _refusal(method: Any, name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cuda":
            raise NotImplementedError(_REAL_ONLY[name])
        return method(self, *args, **kwargs)

    return refuse


C: Any = torch._C
_missing = object()
_run_backward: Any = torch.autograd.graph._engine_run_backward


def patch(stack: ExitStack, owner: Any, **values: Any) -> None:
    """Set attributes of a module; closing `stack` puts back what was there."""
    for name, value in values.items():
        if isinstance(value, types.FunctionType) and "__wrapped__" not in vars(value):
            value = unseen(value)
        before = vars(owner).get(name, _missing)
        if before is _missing:
            stack.callback(delattr, owner, name)
        else:
            stack.callback(setattr, owner, name, before)
        setattr(owner, name, value)


def equipped() -> tuple[Any, ...]:
    """Give each virtual GPU its random generator and its stream; the generators."""
    for gpu in GPUS:
        gpu.generator, gpu.stream = Generator(gpu.device), _default_stream(gpu.device)
    return tuple(gpu.generator for gpu in GPUS)


def install(stack: ExitStack) -> None:
    """Let ``torch.cuda`` see the virtual GPUs until `stack` is closed."""
    patch(stack, C, **_functions(), **MemoryApi(GPUS).functions(stack), _has_cudnn=False)
    patch(
        stack,
        torch.cuda,
        _cudart=types.SimpleNamespace(cudaMemGetInfo=_memory_info),
        _exchange_device=_exchange_device,
        _maybe_exchange_device=_maybe_exchange_device,
        _get_device_properties=lambda index: gpu_of(index).properties,
        _device_count_nvml=lambda: len(GPUS),
        _initialized=False,
        _cached_device_count=None,
        _is_in_bad_fork=in_bad_fork,
        _queued_calls=list(torch.cuda._queued_calls),
        default_generators=equipped(),
        Stream=Stream,
        Event=Event,
        current_stream=_current_stream,
        default_stream=_default_stream,
        set_stream=_set_stream,
    )
    patch(stack, torch.cuda.graphs, _cuda_isCurrentStreamCapturing=_no)
    for kind in (torch.cuda.CUDAGraph, torch.cuda.MemPool):
        patch(stack, kind, __new__=_refused)
    patch(stack, torch, Generator=Generator, Stream=AnyStream, Event=AnyEvent)
    collectives.register(stack)
    patch(stack, torch.cuda.nvtx, _nvtx=Nvtx())
    patch(stack, torch.autograd.profiler.profile, __init__=on_the_cpu)
    patch(stack, torch.cuda.nccl, is_available=_no)
    patch(stack, torch.backends.cudnn, is_acceptable=_no, version=_nothing)
    patch(stack, torch.storage, _to=to)
    patch(stack, torch.UntypedStorage, **refusals())
    patch(stack, torch.storage._StorageBase, clone=clone)
    for module in (torch.autograd, torch.autograd.graph):
        patch(stack, module, _engine_run_backward=_backward)
    # Each device has one stream here, so its advice about streams is never meant.
    warn = torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch
    warn(False)
    stack.callback(warn, True)
    if torch.version.cuda is None:
        patch(stack, torch.cuda, **_tensor_types())
        if logger := getattr(torch.distributed, "Logger", None):
            # Of a GPU it asserts that the driver's times are there, which this build has not.
            patch(stack, logger, set_runtime_stats_and_log=_nothing)
    else:
        patch(stack, torch.distributed, Reducer=collectives.refused_reducer)


_DO_NOTHING = (
    *("_cuda_init", "_cuda_getArchFlags", "_cuda_ipc_collect"),
    *("_accelerator_emptyHostCache", "_host_emptyCache"),
)
_WAIT = ("_cuda_synchronize", "_accelerator_synchronizeDevice")
_REFUSED = {f"_cuda_getCurrent{name}Handle": f"cu{name.upper()}" for name in ("Blas", "Solver")}
_REFUSED["_cuda_cudaCachingAllocator_raw_alloc"] = "caching_allocator_alloc"
_REFUSED["_cuda_set_sync_debug_mode"] = "set_sync_debug_mode; type %gpuwatch on"


def _functions() -> dict[str, Any]:
    return {
        **dict.fromkeys(_DO_NOTHING, _nothing),
        **dict.fromkeys(_WAIT, _wait),
        **{name: partial(_refused, what) for name, what in _REFUSED.items()},
        "_cuda_isInBadFork": in_bad_fork,
        "_cuda_getDeviceCount": lambda: len(GPUS),
        "_cuda_getDevice": C._accelerator_getDeviceIndex,
        "_cuda_setDevice": _set_device,
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _exchange_device,
        "_cuda_canDeviceAccessPeer": lambda one, other: one != other,
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_cuda_hasPrimaryContext": lambda index: True,
        "_cuda_isCurrentStreamCapturing": _no,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_memoryStats": _memory_stats,
        "_cuda_resetPeakMemoryStats": _reset("reset_peak"),
        "_cuda_resetAccumulatedMemoryStats": _reset("reset_accumulated"),
        "_cuda_getMemoryFraction": _memory_fraction,
        "_cuda_setMemoryFraction": _set_memory_fraction,
        "_cuda_emptyCache": _empty_cache,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getDeviceStats": _memory_stats,
        "_accelerator_resetPeakStats": _reset("reset_peak"),
        "_accelerator_resetAccumulatedStats": _reset("reset_accumulated"),
        "_accelerator_getMemoryInfo": _memory_info,
        "_accelerator_emptyCache": _empty_cache,
        **{f.__name__: f for f in (_scatter, _gather, _broadcast, _broadcast_coalesced)},
    }


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _wait(*args: Any, **kwargs: Any) -> None:
    __tracebackhide__ = True
    asserts.wait()


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _refused(what: Any, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"virtual GPUs have no {getattr(what, '__name__', what)}")


def _set_device(index: int) -> None:
    C._accelerator_setDeviceIndex(gpu_of(index).index)


def _maybe_exchange_device(index: int) -> int:
    return _exchange_device(index)  # a function of its own: dynamo keeps a table by identity


def _exchange_device(index: int) -> int:
    before = int(C._accelerator_getDeviceIndex())
    if index < 0:
        return -1
    _set_device(index)
    return before


def _current_stream(device: Any = None) -> Any:
    return gpu_of(device).stream


def _default_stream(device: Any = None) -> Stream:
    return Stream(gpu_of(device).device, stream_id=0)


def _set_stream(stream: Any) -> None:
    if stream is not None:
        gpu_of(stream.device_index).stream = stream
        _set_device(stream.device_index)


def _memory_stats(index: int) -> dict[str, Any]:
    account = gpu_of(index).account
    account.refresh()
    allocator = account.allocator
    none = vars(MemoryStat())
    pools: dict[str, Any] = {}
    for names, stat in (
        (("allocated_bytes", "active_bytes"), allocator.bytes),
        (("requested_bytes",), allocator.requested),
        (("allocation", "active"), allocator.blocks),
        (("reserved_bytes",), account.given()),
        (("segment",), allocator.segments),
        (("inactive_split", "inactive_split_bytes"), None),
    ):
        numbers = none if stat is None else vars(stat).copy()
        for name in names:  # there is one pool here; it stands as the large one
            pools[name] = {"all": numbers, "large_pool": numbers, "small_pool": none}
    for name in ("oversize_allocations", "oversize_segments"):
        pools[name] = none
    return pools | {
        "num_alloc_retries": account.retries,
        "num_ooms": account.ooms,
        "num_sync_all_streams": 0,
        "num_device_alloc": allocator.segments.allocated,
        "num_device_free": allocator.segments.freed,
        "max_split_size": -1,
    }


def _memory_info(index: int) -> tuple[int, int]:
    account = gpu_of(index).account
    return account.free, account.capacity


def _reset(what: str) -> Any:
    return lambda index: getattr(gpu_of(index).account, what)()


def _memory_fraction(index: int) -> float:
    account = gpu_of(index).account
    return account.limit / account.capacity


def _set_memory_fraction(fraction: float, index: int) -> None:
    account = gpu_of(index).account
    account.allow(int(account.capacity * fraction))


def _empty_cache() -> None:
    for gpu in GPUS:
        gpu.account.empty_cache()


def _scatter(
    tensor: Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Any = None,
) -> tuple[Tensor, ...]:
    if chunk_sizes:
        parts = torch.split(tensor, list(chunk_sizes), dim)
    else:
        parts = tensor.chunk(len(devices), dim)
    return tuple(part.cuda(device) for part, device in zip(parts, devices, strict=False))


def _gather(tensors: Sequence[Tensor], dim: int, destination: int | None = None) -> Tensor:
    device = "cpu" if destination == -1 else gpu_of(destination).device
    return torch.cat([tensor.to(device) for tensor in tensors], dim)


def _broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    return [tensor if tensor.get_device() == d else tensor.cuda(d) for d in devices]


def _broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[Tensor]]:
    copies = [_broadcast(tensor, devices) for tensor in tensors]
    return [list(on_device) for on_device in zip(*copies, strict=True)]


@unseen
def _backward(*args: Any, **kwargs: Any) -> Any:
    # On the caller's thread: the engine's threads for devices were made before these devices
    # were, if a backward pass ran before; and the user's frames stay in the traceback.
    with torch.autograd.set_multithreading_enabled(False):
        return _run_backward(*args, **kwargs)


def _tensor_types() -> dict[str, type]:
    """``torch.cuda.FloatTensor`` and its kin, which a CPU build has but cannot make."""

    class TensorType(type):
        dtype: torch.dtype

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def new(cls: Any, *args: Any, device: Any = "cuda") -> Tensor:
        # As torch.FloatTensor does: sizes make it empty, a sequence gives its values.
        if args and not isinstance(args[0], (int, torch.Size)):
            return torch.tensor(args[0], dtype=cls.dtype, device=device)
        return torch.empty(*args or (0,), dtype=cls.dtype, device=device)

    types_: dict[str, type] = {}
    for legacy in torch._tensor_classes:
        if legacy.__module__ == "torch.cuda":
            # Tensor.type() looks at the full name.
            kind = TensorType(f"torch.cuda.{legacy.__name__}", (), {"__new__": new})
            kind.dtype = legacy.dtype
            types_[legacy.__name__] = kind
    return types_


_NO_COMPILER = (
    'virtual GPUs have no compiled kernels; type torch.compile(..., backend="aot_eager"), which '
    "follows the code as the compiler does and runs its operators one by one"
)


def refuse_compiling(stack: ExitStack) -> None:
    """Have torch's own backend raise for a graph that uses a GPU, until `stack` closes."""
    backend: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
    if backend is None:  # renamed: then torch's own error stands
        return
    compile_graph = backend.__call__

    def compile_on_the_cpu(self: Any, model: Any, inputs: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        if any(tensor.device.type == "cuda" for tensor in _tensors(model, inputs)):
            raise NotImplementedError(_NO_COMPILER)
        return compile_graph(self, model, inputs, **options)

    patch(stack, backend, __call__=compile_on_the_cpu)


def _tensors(model: Any, inputs: Any) -> Iterator[Tensor]:
    made = (node.meta.get("example_value") for node in model.graph.nodes)
    return (value for value in (*inputs, *made) if isinstance(value, Tensor))
