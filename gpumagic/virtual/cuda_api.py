"""Provide the parts of ``torch._C`` that ``torch.cuda`` uses on a CUDA build with GPUs.

:func:`patch` sets these parts and stores the previous values. Virtual GPUs compute synchronously,
so a stream never has pending work. Each GPU has its own random generator. The same seed gives the
same numbers on a GPU and on the CPU. Drawing numbers on a GPU does not change the CPU's generator.
"""

import contextlib
import itertools
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gpumagic.usercode.files import unseen
from gpumagic.virtual.virtual_gpus import GPUS, gpu_of, in_bad_fork, memory_functions

C: Any = torch._C


def patch(stack: ExitStack, owner: Any, **values: Any) -> None:
    """Set attributes of a module or class; closing `stack` restores the previous values."""
    for name, value in values.items():
        if isinstance(value, types.FunctionType) and "__wrapped__" not in vars(value):
            value = unseen(value)
        if name in vars(owner):
            stack.callback(setattr, owner, name, vars(owner)[name])
        else:
            stack.callback(delattr, owner, name)
        setattr(owner, name, value)


class _Kind(type(C.Generator)):  # type: ignore[misc]
    """Metaclass that lets ``isinstance(x, Stream)`` accept an object of torch's own class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__base__)


_numbers = itertools.count(1)  # ids of new streams; each GPU's default stream has id 0


class Stream(C.Stream, metaclass=_Kind):  # type: ignore[misc]
    """Replacement of ``torch.Stream`` and ``torch.cuda.Stream`` while virtual GPUs are on."""

    priority = 0

    @unseen
    def __new__(
        cls, device: Any = None, priority: int = 0, stream_id: int | None = None, **of: Any
    ) -> Any:
        device = of.get("device_index") if device is None else device
        if device is not None and torch.device(device).type != "cuda":
            return C.Stream(device)
        number = next(_numbers) if stream_id is None else stream_id
        index = gpu_of(device).index
        return super().__new__(cls, stream_id=number, device_index=index, device_type=1)  # 1: CUDA

    cuda_stream = property(lambda self: self.stream_id)

    def query(self) -> bool:
        """Return True, because no work is pending."""
        return True

    def synchronize(self, *others: Any) -> None:
        """Do nothing, because this and other streams and events have no pending work."""

    wait_stream = wait_event = synchronize

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record `event`, or a new event, and return it."""
        event = event or Event()
        event.record(self)
        return event


class Event:
    """Replacement of ``torch.Event`` and ``torch.cuda.Event``, with the CPU's clock."""

    def __init__(self, first: Any = None, *others: Any, enable_timing: Any = None, **of: Any):
        # `first` is `enable_timing` for torch.cuda.Event, and the device for torch.Event.
        self.enable_timing = first is True if enable_timing is None else enable_timing
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    query, synchronize, wait = Stream.query, Stream.synchronize, Stream.synchronize

    @unseen
    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds until a later event, measured with the CPU's clock."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end_event._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at - self._at) * 1e3


_of_cuda: set[int] = set()  # C++ addresses of the virtual GPUs' generators


class Generator(C.Generator, metaclass=_Kind):  # type: ignore[misc]
    """Replacement of ``torch.Generator``: a CPU generator whose device may be a virtual GPU."""

    _device: torch.device
    device = property(lambda self: self._device)

    @unseen
    def __new__(cls, device: Any = "cpu") -> "Generator":
        self: Generator = super().__new__(cls)
        self._device = torch.device(device)
        if self._device.type == "cuda":
            self._device = gpu_of(self._device).device
            _of_cuda.add(self._cdata)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        make, _, state = super().__reduce__()  # torch's arguments would create a CPU generator
        return make, (self._device,), state

    def __del__(self, _of_cuda: set[int] = _of_cuda) -> None:
        # At exit, the module's globals may be gone, so `_of_cuda` is a default argument.
        _of_cuda.discard(self._cdata)


def belongs_to_cuda(generator: Any) -> bool:
    """Whether a virtual GPU owns a generator, which C++ may pass as a plain torch._C.Generator."""
    return generator._cdata in _of_cuda


_swapping = threading.RLock()


@contextlib.contextmanager
def cpu_draws_from(generator: Any) -> Iterator[None]:
    """In a `with` block, make CPU kernels draw random numbers from `generator`, not the default."""
    cpu = torch.default_generator
    with _swapping:
        saved = cpu.get_state()
        cpu.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(cpu.get_state())
            cpu.set_state(saved)


def equipped() -> tuple[Any, ...]:
    """Give each virtual GPU its random generator and its stream; return the generators."""
    for gpu in GPUS:
        gpu.generator, gpu.stream = Generator(gpu.device), _default_stream(gpu.device)
    return tuple(gpu.generator for gpu in GPUS)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_nothing, _zero, _no = map(_always, (None, 0, False))
_NO_COMPILER = (
    'virtual GPUs have no compiled kernels; type torch.compile(..., backend="aot_eager"), which '
    "traces the code in the same way and runs its operators one by one"
)
_NO_REDUCER = (  # follows "virtual GPUs have no"
    "DistributedDataParallel on a CUDA build of PyTorch, where it asks the driver for times; use a "
    "CPU build, or all_reduce the gradients"
)
_NO_RESIZING = "virtual GPUs cannot resize a storage, as FSDP does; use a mesh of CPUs"
_NO_SHARING = "virtual GPUs share no memory with other processes; send tensor.cpu()"


def install(stack: ExitStack) -> None:
    """Let ``torch.cuda`` see the virtual GPUs until `stack` is closed."""
    memory = memory_functions(stack)
    patch(stack, C, **_functions(), **memory, _has_cudnn=False)
    patch(
        stack,
        torch.cuda,
        _cudart=types.SimpleNamespace(cudaMemGetInfo=memory["_cuda_cudaMemGetInfo"]),
        _exchange_device=_exchange_device,
        _maybe_exchange_device=lambda index: _exchange_device(index),  # dynamo needs two functions
        _get_device_properties=lambda index: gpu_of(index).properties,
        _device_count_nvml=lambda: len(GPUS),
        _initialized=False,
        _cached_device_count=None,
        _is_in_bad_fork=in_bad_fork,
        _queued_calls=list(torch.cuda._queued_calls),
        default_generators=equipped(),
        Stream=Stream,
        Event=Event,
        current_stream=lambda device=None: gpu_of(device).stream,
        default_stream=_default_stream,
        set_stream=_set_stream,
    )
    patch(stack, torch, Generator=Generator, Stream=Stream, Event=Event)
    patch(stack, torch.cuda.graphs, _cuda_isCurrentStreamCapturing=_no)
    for kind in (torch.cuda.CUDAGraph, torch.cuda.MemPool):
        patch(stack, kind, __new__=_refused)
    marks = dict.fromkeys(("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA"), _zero)
    patch(stack, torch.cuda.nvtx, _nvtx=types.SimpleNamespace(**marks))
    patch(stack, torch.cuda.nccl, is_available=_no)
    patch(stack, torch.backends.cudnn, is_acceptable=_no, version=_nothing)
    _patch_storages(stack)
    _patch_autograd(stack)
    if backend := getattr(torch, "_TorchCompileInductorWrapper", None):
        patch(stack, backend, __call__=_refused_for_cuda(backend.__call__, _NO_COMPILER))
    if torch.version.cuda is not None:
        patch(stack, torch.distributed, Reducer=partial(_refused, _NO_REDUCER))
    elif logger := getattr(torch.distributed, "Logger", None):
        # For a model on a GPU, this method needs CUDA's timers, which a CPU build does not have.
        patch(stack, logger, set_runtime_stats_and_log=_nothing)


def _functions() -> dict[str, Any]:
    refused = {f"_cuda_getCurrent{name}Handle": f"cu{name.upper()}" for name in ("Blas", "Solver")}
    refused["_cuda_cudaCachingAllocator_raw_alloc"] = "caching_allocator_alloc"
    refused["_cuda_set_sync_debug_mode"] = "set_sync_debug_mode; type %gpuwatch on"
    return {
        **dict.fromkeys(("_cuda_init", "_cuda_getArchFlags", "_cuda_ipc_collect"), _nothing),
        **dict.fromkeys(("_accelerator_emptyHostCache", "_host_emptyCache"), _nothing),
        **dict.fromkeys(("_cuda_synchronize", "_accelerator_synchronizeDevice"), _nothing),
        **{name: partial(_refused, what) for name, what in refused.items()},
        "_cuda_isInBadFork": in_bad_fork,
        "_cuda_getDeviceCount": lambda: len(GPUS),
        "_cuda_getDevice": C._accelerator_getDeviceIndex,
        "_cuda_setDevice": _set_device,
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _exchange_device,
        "_cuda_canDeviceAccessPeer": lambda one, other: one != other,
        "_cuda_getCurrentRawStream": _zero,
        "_cuda_hasPrimaryContext": _always(True),
        "_cuda_isCurrentStreamCapturing": _no,
        "_cuda_get_sync_debug_mode": _zero,
        **{f.__name__: f for f in (_scatter, _gather, _broadcast, _broadcast_coalesced)},
    }


def _refused(what: Any, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"virtual GPUs have no {getattr(what, '__name__', what)}")


def _set_device(index: int) -> None:
    C._accelerator_setDeviceIndex(gpu_of(index).index)


def _exchange_device(index: int) -> int:
    before = int(C._accelerator_getDeviceIndex())
    if index < 0:
        return -1
    _set_device(index)
    return before


def _default_stream(device: Any = None) -> Any:
    return Stream(gpu_of(device).device, stream_id=0)


def _set_stream(stream: Any) -> None:
    if stream is not None:
        gpu_of(stream.device_index).stream = stream
        _set_device(stream.device_index)


def _scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Any = None, dim: int = 0, streams: Any = None
) -> tuple[Tensor, ...]:
    parts = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(devices), dim)
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


def _patch_storages(stack: ExitStack) -> None:
    base, storage = torch.storage._StorageBase, torch.UntypedStorage
    original: Any = torch._utils._to

    def copied(self: Any, device: torch.device) -> Any:
        made = torch.empty(self.nbytes(), dtype=torch.uint8, device=device)
        return made.untyped_storage().copy_(self)

    def to(self: Any, device: torch.device, non_blocking: bool = False) -> Any:
        if device.type != "cuda" or self.device == device:
            return original(self, device, non_blocking)
        return copied(self, device)

    patch(stack, torch.storage, _to=to)  # called by `UntypedStorage.cuda` and `torch.load`
    patch(stack, base, clone=lambda self: copied(self, self.device))  # for `copy.deepcopy`
    patch(stack, storage, resize_=_refused_for_cuda(storage.resize_, _NO_RESIZING))
    patch(stack, storage, _share_cuda_=_refused_for_cuda(storage._share_cuda_, _NO_SHARING))


def _refused_for_cuda(method: Any, why: str) -> Any:
    """Wrap `method` to raise an error if the method's object or an argument is on a GPU."""

    def refuse_or_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if any(getattr(x, "is_cuda", False) for x in tree_leaves((self, args))):
            raise NotImplementedError(why)
        return method(self, *args, **kwargs)

    return refuse_or_call


def _patch_autograd(stack: ExitStack) -> None:
    run_backward: Any = torch.autograd.graph._engine_run_backward
    begin: Any = torch.autograd.profiler.profile.__init__

    @unseen
    def backward(*args: Any, **kwargs: Any) -> Any:
        # Stay on the caller's thread, where the user's frames are. autograd may have no GPU thread.
        with torch.autograd.set_multithreading_enabled(False):
            return run_backward(*args, **kwargs)

    def profile_cpu(self: Any, enabled: bool = True, **options: Any) -> None:
        on_cuda = options.pop("use_cuda", False) or options.get("use_device") == "cuda"
        if enabled and on_cuda:  # profiling CUDA would report an error per event
            warnings.warn("virtual GPUs: the profile has only the CPU's times", stacklevel=3)
            options |= {"use_cpu": True, "use_device": None}
        begin(self, enabled, **options)

    for module in (torch.autograd, torch.autograd.graph):
        patch(stack, module, _engine_run_backward=backward)
    patch(stack, torch.autograd.profiler.profile, __init__=profile_cpu)
    # Streams never have pending work here, so torch need not warn about different streams.
    warn = torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch
    warn(False)
    stack.callback(warn, True)
