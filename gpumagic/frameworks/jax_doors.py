"""Patch the functions through which JAX copies between devices and waits for them.

A compiled program, and every function of `jax.numpy` is one, is called by C++ without Python. So
while the patches hold, a call that moves something is not kept in C++'s tables, and passes through
Python each time. Calls that move nothing go their usual way, and no program is compiled again.

Private parts of JAX that are touched, as they are in 0.10; where one is missing, `stand` raises
`GpuError` and has touched nothing:

* ``jax._src.lib.xla_client``: ``batched_block_until_ready``, and, by which all copies to devices
  go, ``batched_device_put`` and ``batched_copy_array_to_devices_with_sharding``;
* ``jax._src.array.ArrayImpl``: ``block_until_ready``; ``_value``, by which all copies to the host
  go; and on virtual GPUs its C slot for buffers, by which NumPy reads memory of the CPU's alone;
* ``jax._src.pjit``: ``_get_fastpath_data`` and the two tables of calls; ``PjitFunctionCache``;
* ``jax._src.interpreters.pxla.MeshExecutableFastpathData``; ``jax._src.traceback_util``;
* ``jax._src.config.guard_lib``: whether `jax.device_put` or `jax.device_get` runs.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import jax

from gpumagic import faults
from gpumagic.errors import CrossDeviceWarning, GpuError
from gpumagic.frameworks.framework import replace

_WORD = ctypes.sizeof(ctypes.c_void_p)
# From a type's beginning to its tp_as_buffer: the head of an object, its size, and 17 words.
_BUFFER_SLOT = object.__basicsize__ + 18 * _WORD


class Move(NamedTuple):
    """Describe a copy from one device to another."""

    source: Any  # JAX's device; None for the host
    destination: Any
    nbytes: int
    array: Any
    single: bool  # it has one element


class _Parts(NamedTuple):
    client: Any
    array: Any
    pjit: Any
    pxla: Any
    tables: Callable[[], None]
    scopes: Callable[[], Any]


def stand(counter: Any, stack: ExitStack, *, virtual: bool) -> Callable[[], Any]:
    """Call `counter` before every copy and wait until `stack` is closed.

    `counter.copying`, `.reading` and `.waiting` may raise, and then nothing is copied; they return
    a function to call with the seconds, or None. GpuError if JAX differs inside.

    Returns a function that tells whether `jax.device_put` or `jax.device_get` runs on this thread.
    """
    try:
        parts = _parts()
        with ExitStack() as placed:
            _stand(counter, parts, placed)
            if virtual:
                _read_as_on_gpus(parts.array, placed)
            stack.push(placed.pop_all())
            return parts.scopes
    except (ImportError, AttributeError) as error:
        raise GpuError(
            f"copies are not counted with JAX {jax.__version__}: {error}; "
            "JAX 0.10 is known to be counted"
        ) from error


def _parts() -> _Parts:
    from jax._src import pjit, traceback_util
    from jax._src.array import ArrayImpl
    from jax._src.config import guard_lib
    from jax._src.interpreters import pxla
    from jax._src.lib import _jax, xla_client

    tables = (pjit._cpp_pjit_cache_fun_only, pjit._cpp_pjit_cache_explicit_attributes)

    def clear() -> None:
        for table in tables:
            table.clear()
        _jax.PjitFunctionCache.clear_all()

    scopes = guard_lib.thread_local_state
    scopes().explicit_device_put  # noqa: B018 (or there is no telling)
    _leave_out(traceback_util.register_exclusion)
    return _Parts(xla_client, ArrayImpl, pjit, pxla, clear, scopes)


@cache
def _leave_out(register: Callable[[str], None]) -> None:
    """Have JAX leave frames of this file out of tracebacks, as it does its own; for good."""
    register(__file__)


def _stand(counter: Any, parts: _Parts, stack: ExitStack) -> None:
    client, array, name = parts.client, parts.array, "batched_copy_array_to_devices_with_sharding"
    put, block = client.batched_device_put, array.block_until_ready
    replace(stack, client, "batched_device_put", _door(put, _put(counter)))
    replace(stack, client, name, _door(getattr(client, name), _copied(counter)))
    blocked = client.batched_block_until_ready
    replace(stack, client, "batched_block_until_ready", _door(blocked, counter.waiting))
    replace(stack, array, "block_until_ready", _door(block, lambda one: counter.waiting([one])))
    replace(stack, array, "_value", property(_door(vars(array)["_value"].fget, _read(counter))))
    gate = _Gate(parts.pjit._get_fastpath_data, parts.pxla.MeshExecutableFastpathData)
    replace(stack, parts.pxla, "MeshExecutableFastpathData", gate.data)
    replace(stack, parts.pjit, "_get_fastpath_data", gate.ask)
    parts.tables()  # a call that is kept there from before would not come by

    @stack.callback
    def forget() -> None:
        if gate.refused:  # what was not kept would come by Python for ever
            parts.tables()


def _door(real: Callable[..., Any], ask: Callable[..., Callable[[float], None] | None]) -> Any:
    def door(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        after = None
        try:
            after = ask(*args, **kwargs)
        except CrossDeviceWarning:  # strict's
            raise
        except Exception as error:  # noqa: BLE001  kept: the copy is the user's
            faults.keep("counting a copy of JAX's", error)
        if after is None:
            return real(*args, **kwargs)
        start = time.perf_counter()
        result = real(*args, **kwargs)
        with faults.kept("counting a copy of JAX's"):
            after(time.perf_counter() - start)
        return result

    return door


def _put(counter: Any) -> Callable[..., Callable[[float], None] | None]:
    def ask(aval: Any, sharding: Any, xs: Any, devices: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        moves = [m for x, d in zip(xs, devices, strict=False) for m in _one(x, d)]
        return counter.copying(moves) if moves else None

    return ask


def _one(x: Any, device: Any) -> Iterator[Move]:
    """Describe how a whole array, or a value that is none yet, gets to a device."""
    source = None
    if isinstance(x, jax.Array):
        if device in x.sharding.device_set:
            return
        source = min(x.sharding.device_set, key=lambda own: own.id)
    yield Move(source, device, x.nbytes, getattr(x, "val", x), x.size == 1)


def _copied(counter: Any) -> Callable[..., Callable[[float], None] | None]:
    def ask(xs: Any, device_lists: Any, *args: Any) -> Any:
        __tracebackhide__ = True
        moves = [
            Move(source, device, nbytes, x, x.size == 1)
            for x, devices in zip(xs, device_lists, strict=False)
            for (source, nbytes), device in zip(_shards(x), devices, strict=False)
            if source != device
        ]
        return counter.copying(moves) if moves else None

    return ask


def _shards(array: Any) -> list[tuple[Any, int]]:
    """Return an array's devices, in its own order, each with the bytes of its part."""
    sharding, shape = array.sharding, array.shape
    part = array.dtype.itemsize
    for size in sharding.shard_shape(shape):
        part *= size
    return [(device, part) for device in sharding._addressable_device_assignment]


def _read(counter: Any) -> Callable[[Any], Callable[[float], None] | None]:
    def ask(array: Any) -> Callable[[float], None] | None:
        __tracebackhide__ = True
        if array._npy_value is not None or array.is_deleted():  # it has been read
            return None
        shards = _shards(array)[: 1 if array.is_fully_replicated else None]
        moves = [Move(device, None, nbytes, array, array.size == 1) for device, nbytes in shards]
        after: Callable[[float], None] | None = counter.reading(array, moves)
        return after

    return ask


class _Gate:
    """Keep a call in C++'s tables only if nothing moves in it."""

    def __init__(self, real: Callable[..., Any], data: Callable[..., Any]) -> None:
        self._real = real
        self._data = data
        self._here = threading.local()
        self.refused = False  # whether any call was not kept

    def ask(self, executable: Any, out_tree: Any, args: Any, *rest: Any) -> Any:
        """Replace ``pjit._get_fastpath_data``: return the entry for a table, or None."""
        if executable is not None and _moves_any(executable, args):
            self.refused = True
            return None
        self._here.still = True
        try:
            return self._real(executable, out_tree, args, *rest)
        finally:
            self._here.still = False

    def data(self, *args: Any) -> Any:
        """Replace the entry's class, which functions compiled ahead of time call themselves."""
        if getattr(self._here, "still", False):
            return self._data(*args)
        self.refused = True
        return None


def _moves_any(executable: Any, args: Sequence[Any]) -> bool:
    """Whether an operand is a NumPy array, or is on another device."""
    first = len(executable.in_avals) - len(args)  # before them are constants, if any are
    kept = executable._kept_var_idx
    if first > 0 or len(kept) != len(executable._in_shardings):
        return True
    used = [arg for i, arg in enumerate(args) if i in kept]
    return any(map(_moves, used, executable._in_shardings))


def _moves(arg: Any, sharding: Any) -> bool:
    if not isinstance(arg, jax.Array):
        return getattr(arg, "ndim", 0) > 0
    if arg.sharding.num_devices == sharding.num_devices == 1:
        return bool(arg.sharding.device_set != sharding.device_set)
    return not arg.sharding.is_equivalent_to(sharding, arg.ndim)


def _read_as_on_gpus(array: Any, stack: ExitStack) -> None:
    """Have NumPy ask an array for a copy, as it must ask a GPU's, until `stack` is closed."""
    slots = ctypes.c_void_p.from_address(id(array) + _BUFFER_SLOT).value or 0
    # They lie within a class that was made at run time, as this one was; else it is another place.
    if not 0 < slots - id(array) < type(array).__basicsize__:
        return
    get = ctypes.c_void_p.from_address(slots)
    stack.callback(setattr, get, "value", get.value)
    get.value = None
