"""Wrap torch's kernels that copy or wait, to count their bytes and time.

While nothing is counted, a wrapper only calls the kernel that it replaced. On virtual GPUs, the
wrappers compute the bytes that CUDA's operators would copy. `tests/cuda` compares these bytes with
CUDA's own log.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from gpumagic.device import cuda_state
from gpumagic.errors import CrossDeviceWarning
from gpumagic.faults import keep, kept
from gpumagic.ledger import attribute
from gpumagic.ledger.attribute import HOST, add, counts, here, serials
from gpumagic.ledger.entry import Count, before_reading
from gpumagic.usercode.files import leave_out_ours

_TIMED_FIRST, _TIMED_EVERY = 64, 16  # time a line's first 64 copies, then every 16th


class CopyTimer:
    """Time copies on a real GPU with two CUDA events per copy. Not tested on a real GPU."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Sequence[Count], Any, Any, int]] = deque()
        self._lock = threading.RLock()

    def begin(self, count: int, device: torch.device) -> tuple[Any, Any] | None:
        """Record an event before a copy. Return the event and its stream, or None if not timed."""
        skipped = count >= _TIMED_FIRST and count % _TIMED_EVERY
        if device.type != "cuda" or skipped or torch.cuda.is_current_stream_capturing():
            return None  # an event cannot be queried during a graph capture
        stream = torch.cuda.current_stream(device)
        event = cuda_state.take_event(stream.device_index)
        event.record(stream)
        return event, stream

    def end(self, begun: tuple[Any, Any], counts: Sequence[Count]) -> None:
        """Record an event after the copy. `_read` later adds the time between the events."""
        start, stream = begun
        event = cuda_state.take_event(stream.device_index)
        event.record(stream)
        with self._lock:
            self._waiting.append((counts, start, event, stream.device_index))
            while self._waiting and self._waiting[0][2].query():
                self._read()

    def read_all(self) -> None:
        """Wait for all recorded events, and add the times to the counts."""
        with self._lock:
            while self._waiting and cuda_state.live_cuda():
                self._waiting[0][2].synchronize()
                self._read()

    def _read(self) -> None:
        counts, start, end, index = self._waiting.popleft()
        seconds = start.elapsed_time(end) * 1e-3
        cuda_state.give_events(index, start, end)
        for count in counts:
            count.seconds = (count.seconds or 0.0) + seconds
            count.timed += 1


TIMER = CopyTimer()
before_reading.append(TIMER.read_all)

COUNT = 4  # bytes that the host reads to learn the size of an operator's result
WAITS = (
    *("_unique2", "bincount", "equal", "histc", "masked_select", "nonzero", "repeat_interleave"),
    *("unique_consecutive", "unique_dim"),
)
"""Operators that may make the host wait for a value, or for a size that depends on the data."""
INDEXING = (
    *("index", "_unsafe_index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put"),
)
_MASKS = (torch.bool, torch.uint8)


def crossing(target: Any, source: Any, non_blocking: bool) -> int:
    """Return the bytes that `target.copy_(source)` sends from one device to another."""
    nbytes: int = target.nbytes
    if target.dtype is source.dtype:
        return nbytes
    # A blocking copy converts the dtype on the host, any other copy on a GPU. If the destination
    # converts, the bytes sent have the source's dtype.
    here, there = source.get_device() == HOST, target.get_device() == HOST
    if (here or there) and here is bool(non_blocking):
        nbytes = target.numel() * source.element_size()
    return nbytes


def reads(operator: str, self: Any, *args: Any, output_size: Any = None, **_: Any) -> list[int]:
    """Return the bytes of each read for which the host waits; empty if the host does not wait."""
    if operator in INDEXING:
        return _reads_of_masks(operator, *args)
    if operator == "equal":
        return [1] * _is_compared(self, args[0])
    if operator == "repeat_interleave":  # reads the result's size, and whether a repeat is negative
        return [8, 1] if output_size is None else []
    if operator in ("bincount", "histc"):  # reads the smallest and the largest value
        low, high = (*args[1:], 0, 0)[:2] if operator == "histc" else (0, 0)
        return [int(self.element_size())] * 2 * bool(low == high and self.numel())
    return [COUNT] if self.numel() or operator == "nonzero" else []


def _is_compared(one: Any, other: Any) -> bool:
    """Whether `equal` reads data: not if tensors are empty, differ in shape or share their data."""
    same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return bool(one.shape == other.shape and one.numel() and not same)


def copies_to_gpu(operator: str, indices: Any, *values: Any) -> list[tuple[Any, str, int, bool]]:
    """List copies to the indexed tensor's GPU, each as (tensor, operator, bytes, blocking)."""
    # The other operators in INDEXING call one of these three if devices are mixed.
    if operator not in ("index", "_unsafe_index", "_index_put_impl_"):
        return []
    found = []
    for index in indices:
        if index is not None and index.get_device() == HOST:
            mask = index.dtype in _MASKS
            nbytes = 8 * index.dim() * int(index.count_nonzero()) if mask else index.nbytes
            found.append((index, "index", nbytes, not mask))
    if values and values[0].get_device() == HOST and not fills(indices, *values):
        found.append((values[0], "copy_", values[0].nbytes, True))
    return found


def _reads_of_masks(operator: str, indices: Any, *values: Any) -> list[int]:
    if operator.startswith("index_put") and any(
        tensor is not None and tensor.get_device() == HOST for tensor in (*indices, values[0])
    ):
        return []
    masks = [i for i in indices if i is not None and i.dtype in _MASKS and i.get_device() != HOST]
    return [] if fills(indices, *values) else [COUNT] * len(masks)


def fills(indices: Any, value: Any = None, accumulate: bool = False, *_: Any) -> bool:
    """Whether the call is like `x[mask] = 1`, which torch does by `masked_fill_` without a read."""
    given = [index for index in indices if index is not None]
    if value is None or accumulate or value.numel() != 1 or value.get_device() != HOST:
        return False
    return len(given) == 1 and given[0].dtype in _MASKS and given[0].get_device() != HOST


Kernel = Callable[..., Any]
After = Callable[[float], None]
"""A function that counts a successful call; its argument is the call's seconds."""

_DOING = "counting a copy or a wait"
_without_overrides = torch._C.DisableTorchFunction
_FIRST, _EVERY = 8, 64  # `look_at` checks a line's first 8 copies, then every 64th


def counted(base: Kernel, before: Callable[..., After | None], *, within: str = "") -> Kernel:
    """Return a wrapper that counts calls of `base`. Waits in `base` count as waits of `within`."""

    # `before` gets the arguments of `base`, and returns a function to call after `base`, or None.
    def kernel(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            if not attribute.running or (after := _ask(before, args, kwargs)) is None:
                return base(*args, **kwargs)
            outer = here.within, here.serial
            if within:
                here.within = outer[0] or within
                here.serial = outer[1] or next(serials)
            try:
                start = perf_counter()
                result = base(*args, **kwargs)
                try:
                    after(perf_counter() - start)
                except Exception as error:  # noqa: BLE001
                    keep(_DOING, error)
            finally:
                if within:
                    here.within, here.serial = outer
            return result
        except BaseException as error:  # remove our frames, as the slower decorator `unseen` does
            leave_out_ours(error)
            raise

    return kernel


def _ask(before: Callable[..., After | None], args: Any, kwargs: Any) -> After | None:
    """Call `before` without `__torch_function__`. Record its errors except CrossDeviceWarning."""
    __tracebackhide__ = True
    try:
        with _without_overrides():
            return before(*args, **kwargs)
    except CrossDeviceWarning:
        raise
    except Exception as error:  # noqa: BLE001  must not stop the user's code
        keep(_DOING, error)
        return None


def as_tensor(value: Any) -> Any:
    """Return `value` as a tensor. torch may pass a kernel a number in place of a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    dtype = torch.float64 if type(value) is float else None  # as in torch's C++
    with _without_overrides():
        return torch.tensor(value, dtype=dtype, device="cpu")


def copying(base: Kernel, virtual: bool) -> Kernel:
    """Wrap `base`, the kernel of `copy_`, to count its copies."""

    def before(self: Any, src: Any, non_blocking: bool = False) -> After | None:
        __tracebackhide__ = True
        src = as_tensor(src)
        destination, source = self.get_device(), src.get_device()
        if source == destination or not (nbytes := crossing(self, src, non_blocking)):
            return None
        if here.within and destination == HOST:
            return reading(src)
        if not (found := counts(("copy", "copy_", source, destination, non_blocking), src)):
            return None
        host = self if destination == HOST else src
        blocking = not non_blocking and (source == HOST or destination == HOST)

        def after(seconds: float) -> None:
            add(found, nbytes, seconds, blocking)
            if (first := found[0].count) <= _FIRST or not first % _EVERY:
                _look(found, src, host)

        device = (self if source == HOST else src).device
        return after if virtual else _on_real(found, after, device)

    return counted(base, before)


def _on_real(found: Sequence[Count], after: After, device: torch.device) -> After:
    """Time a copy on a real GPU by CUDA events. Return the function to call after the copy."""
    begun, copies = None, here.copies
    with kept("timing a copy"):  # a failure must not stop the user's copy
        begun = TIMER.begin(found[0].count, device)

    def after_on_real(seconds: float) -> None:
        # If dtypes or strides differ, torch's `copy_` calls itself. Count only the inner call.
        if here.copies == copies:
            here.copies += 1
            after(0.0 if device.type == "cuda" else seconds)
            if begun is not None:
                TIMER.end(begun, found)

    return after_on_real


def _look(found: Sequence[Count], src: Any, host: Any) -> None:
    with _without_overrides():
        for count in found:
            count.look_at(src, host)


def reading(element: Any) -> After:
    """Return the function that counts a read of one element, as in `item`."""
    __tracebackhide__ = True
    found = counts(("wait", here.within or "item", element.get_device(), HOST, False), element)
    nbytes = element.nbytes

    def after(seconds: float) -> None:
        here.reads += 1
        add(found, nbytes, seconds, True)

    return after


def read_by(copy: Kernel, element: Any) -> Any:
    """Return the number in a GPU tensor, read by one copy to pinned memory, as torch does."""
    with _without_overrides():
        pinned = element.device.type == "cuda"
        host = torch.empty(element.shape, dtype=element.dtype, device="cpu", pin_memory=pinned)
        value = copy(host, element).tolist()
    while isinstance(value, list):
        value = value[0]
    return value


def naming(base: Kernel, operator: str) -> Kernel:
    """Wrap a real GPU's kernel, so that waits inside the kernel count as waits of `operator`."""
    return counted(base, lambda *args, **kwargs: lambda seconds: None, within=operator)


def sizing(base: Kernel, operator: str) -> Kernel:
    """Wrap a real GPU's kernel that reads a size; count this read unless `item` counted it."""

    def before(self: Any, *args: Any, **kwargs: Any) -> After | None:
        __tracebackhide__ = True
        if not reads(operator, self):
            return None
        found = counts(("wait", here.within or operator, self.get_device(), HOST, False), self)
        read = here.reads

        def after(seconds: float) -> None:
            if here.reads == read:
                here.reads += 1
                add(found, COUNT, seconds, True)

        return after

    return counted(base, before, within=operator)


def counting_whole(base: Kernel, operator: str) -> Kernel:
    """Wrap a virtual GPU's kernel; count the copies and reads that a real GPU would make."""

    def before(self: Any, *args: Any, **kwargs: Any) -> After | None:
        __tracebackhide__ = True
        sizes, device = reads(operator, self, *args, **kwargs), self.get_device()
        sent = copies_to_gpu(operator, *args) if operator in INDEXING else ()
        if not sizes and not sent:
            return None
        copied = [(x, counts(("copy", x[1], HOST, device, False), x[0])) for x in sent]
        name = "nonzero" if operator in INDEXING else operator
        waited = counts(("wait", name, device, HOST, False), self) if sizes else ()

        def after(seconds: float) -> None:
            each = seconds / (len(sent) + len(sizes))
            for (tensor, _, nbytes, blocking), found in copied:
                add(found, nbytes, each, blocking)
                _look(found, tensor, tensor)
            for nbytes in sizes:
                add(waited, nbytes, each, True)

        return after

    return counted(base, before, within=operator)
