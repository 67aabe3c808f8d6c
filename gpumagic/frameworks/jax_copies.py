"""Count JAX's waits and copies between devices at each line of the user's code, and give advice.

JAX silently copies NumPy operands, and arrays that are not committed to their device. Operands with
one element, constants, and copies by programs compiled ahead of time are not counted.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from numbers import Number
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy

from gpumagic.errors import GpuError
from gpumagic.frameworks import watching
from gpumagic.frameworks.watching import Call, CopyCounting, inside_of
from gpumagic.ledger.entry import OFTEN, USER, Count, Entry, kind_of
from gpumagic.ledger.ledger_view import ADVISERS, Advice, all_but_one
from gpumagic.usercode.files import called, in_cell, name_in, shell, swap_attribute
from gpumagic.usercode.values import comes_from


def advise(entry: Entry) -> Advice | None:
    """Return advice on copies or waits of JAX; None if there is no advice."""
    if entry.operator == "block_until_ready":
        text = "wait once, after the loop: jax.block_until_ready(results)"
        return all_but_one(entry, text) if entry.calls >= OFTEN else None
    put = put_call(entry.destination, entry.names)
    if entry.repeats and entry.kind == "copy" and entry.destination != "cpu":
        text = f"the same array each time; copy it before the loop: {put}"
        return Advice(text, entry.repeats)
    if entry.operator != "operand":
        return None
    is_, it = ("are", "them") if len(entry.names) > 1 else ("is", "it")
    place = f"on {entry.source}" if entry.source != "cpu" else "in host memory"
    text = f"{' and '.join(entry.names) or 'an operand'} {is_} {place}: copy {it} to the device"
    return Advice(f"{text}, before the loop if the values never change: {put}")


def put_call(destination: str, names: Sequence[str] = ()) -> str:
    """Return code that copies the variables in `names` to a device."""
    every = ", ".join(names)
    what = f"({every})" if len(names) > 1 else every or "…"
    # The notebook may have imported only `jax.numpy`.
    first = "import jax; " if "jax" not in getattr(shell(), "user_ns", ("jax",)) else ""
    return f"{first}{every and f'{every} = '}jax.device_put({what}, {as_code(destination)})"


def as_code(device: str) -> str:
    """Return a device as code: ``jax.devices("gpu")[1]``."""
    kind, _, number = device.partition(":")
    return f'jax.devices("gpu")[{number}]' if kind == "cuda" else 'jax.devices("cpu")[0]'


def _is(array: Any, value: Any) -> bool:
    """Whether `array` is `value`. NumPy arrays with the same address and shape count as one."""
    if value is array or not (hasattr(value, "__array_interface__") and hasattr(array, "ctypes")):
        return value is array
    ours, theirs = array.__array_interface__, value.__array_interface__
    return bool(ours["data"] == theirs["data"] and ours["shape"] == theirs["shape"])


def can_be_put(value: Any) -> bool:
    """Whether a value is a pytree of only arrays and numbers, which `device_put` can copy."""
    # Flax NNX's objects must be changed in place, not copied.
    if comes_from(type(value), "flax.nnx.Variable", "flax.nnx.Pytree"):
        return False
    return all(isinstance(leaf, (jax.Array, numpy.ndarray, Number)) for leaf in _leaves(value))


def _leaves(value: Any) -> list[Any]:
    try:
        return jax.tree.leaves(value)  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001  a user's class may raise anything
        return []


_MAKING = {"array", "asarray", "from_dlpack", "frombuffer"}  # convert data to an array
_MAKING |= {"make_array_from_callback", "make_array_from_process_local_data"}
_COMPILING = {"_array_mlir_constant_handler", "shard_const_args"}  # copy a program's constants
_PUTTING = {"device_put", "device_get", "to_device", "copy_to_host_async"}  # copy explicitly
_READING = {"array", "asarray", "ascontiguousarray", "copyto", "save", "savez", "stack"}

ADVISERS["JAX"] = advise
_After = Callable[[Any, float], None]


class _Copy(NamedTuple):
    """Describe a copy from one device to another, or a wait for the device `source`."""

    source: Any  # JAX's device; None for the host
    destination: Any
    nbytes: int
    array: Any


class JaxCopies(CopyCounting):
    framework = "JAX"
    inside = staticmethod(inside_of(jax, "jax_"))
    around = ("reraise_with_filtered_traceback", "wrapper")
    all_threads = True

    def __init__(self, jax_framework: Any) -> None:
        super().__init__()
        self._jax = jax_framework
        self._read: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def patch(self, stack: ExitStack) -> None:
        """Patch JAX until `stack` is closed; GpuError if JAX's private functions are missing."""
        try:
            self._patch(stack)
        except (ImportError, AttributeError, KeyError) as error:
            said = f"copies are not counted with JAX {jax.__version__}: {error}"
            raise GpuError(f"{said}; counting works with JAX 0.10") from error

    def _patch(self, stack: ExitStack) -> None:
        from jax._src import pjit, traceback_util
        from jax._src.array import ArrayImpl
        from jax._src.lib import _jax, xla_client

        _leave_out(traceback_util.register_exclusion)
        for owner, name, ask in (
            # The first two functions make all of JAX's copies to devices.
            (xla_client, "batched_device_put", self._put),
            (xla_client, "batched_copy_array_to_devices_with_sharding", self._copied),
            (xla_client, "batched_block_until_ready", self._blocked),
            (ArrayImpl, "block_until_ready", lambda array: self._blocked([array])),
        ):
            swap_attribute(stack, owner, name, self.wrapped(getattr(owner, name), ask))
        # JAX copies arrays to the host by `_value`, unless NumPy reads the memory directly.
        value = self.wrapped(vars(ArrayImpl)["_value"].fget, self._value)
        swap_attribute(stack, ArrayImpl, "_value", property(value))
        if self._jax.virtual:
            _read_as_on_gpus(ArrayImpl, stack)
        real, refused = pjit._get_fastpath_data, []

        def keep(executable: Any, out_tree: Any, args: Any, *rest: Any) -> Any:
            """Let JAX cache a call in C++ only if the call moves no data."""
            if executable is None or not _moves_any(executable, args):
                return real(executable, out_tree, args, *rest)
            refused.append(True)
            return None

        swap_attribute(stack, pjit, "_get_fastpath_data", keep)

        def clear() -> None:
            for table in (pjit._cpp_pjit_cache_fun_only, pjit._cpp_pjit_cache_explicit_attributes):
                table.clear()
            _jax.PjitFunctionCache.clear_all()

        clear()  # calls that are already cached would bypass Python
        # Clear again at the end. Otherwise, JAX would never cache the calls that `keep` refused.
        stack.callback(lambda: clear() if refused else None)
        stack.callback(self._read.clear)

    def _put(self, aval: Any, sharding: Any, xs: Any, devices: Any, *a: Any, **kw: Any) -> Any:
        __tracebackhide__ = True
        copies = [copy for x, there in zip(xs, devices, strict=False) for copy in _one(x, there)]
        return self._copying(copies)

    def _copied(self, xs: Any, device_lists: Any, *args: Any) -> Any:
        """Count the copies of arrays' shards to devices."""
        __tracebackhide__ = True
        copies = [
            _Copy(source, device, nbytes, x)
            for x, devices in zip(xs, device_lists, strict=False)
            for (source, nbytes), device in zip(_shards(x), devices, strict=False)
            if source != device
        ]
        return self._copying(copies)

    def _copying(self, copies: list[_Copy]) -> _After | None:
        __tracebackhide__ = True
        call = self.called_from(_COMPILING) if copies else None
        if call is None:
            return None
        # If a library converts data to an array, count the conversion as an operand's copy.
        users = call.inner is not None and kind_of(call.inner.f_code.co_filename) == USER
        making, putting = users and call.function in _MAKING, call.function in _PUTTING
        if not (putting or making):
            copies = [copy for copy in copies if copy.array.size != 1]
        operator = call.function if making else "device_put" if putting else "operand"
        return self._counted("copy", operator, call, copies, making or putting)

    def _value(self, array: Any) -> _After | None:
        """Count the first read of an array by the host."""
        __tracebackhide__ = True
        if array._npy_value is not None or self._read.get(id(array)) is array or array.is_deleted():
            return None
        self._read[id(array)] = array
        call = self.called_from(_COMPILING)
        shards = _shards(array)[: 1 if array.is_fully_replicated else None]
        if call is None or not shards:
            return None
        copies = [_Copy(device, None, nbytes, array) for device, nbytes in shards]
        operator, asked = "device_get", True
        if call.function not in _PUTTING:
            asked = call.user is not None and called(*in_cell(call.user)) in _READING
            operator = "asarray" if asked else "value"
        if array.size == 1 and operator != "device_get":
            return self._counted("wait", "item", call, copies, False)
        return self._counted("copy", operator, call, copies, asked)

    def _blocked(self, arrays: Sequence[Any]) -> _After | None:
        if (call := self.called_from()) is None:
            return None
        held = [array.sharding.device_set for array in arrays if isinstance(array, jax.Array)]
        waits = [_Copy(device, None, 0, None) for device in set().union(*held)]
        return self._counted("wait", "block_until_ready", call, waits, True)

    def _counted(
        self, kind: str, operator: str, call: Call, copies: Sequence[_Copy], explicit: bool
    ) -> _After | None:
        """Return a function that counts the copies when they are done; None if there are none."""
        __tracebackhide__ = True
        # Operands and explicit copies count as the user's. Otherwise, `within` names the library.
        asked = operator == "operand" or (explicit and kind == "copy")
        about = {"implicit": not explicit, "within": "" if asked else call.library}
        found: list[tuple[Count, _Copy]] = []
        for copy in copies:
            ends = self._end(copy.source), self._end(copy.destination)
            if ends[0] == ends[1] or (kind == "copy" and not copy.nbytes):
                continue
            for count in self.counts(call, kind, operator, ends, **about):
                _name(count, copy.array, call.user)
                found.append((count, copy))
        self.refuse(count for count, _ in found)
        return partial(_add, found) if found else None

    def _end(self, device: Any) -> str:
        return "cpu" if device is None else str(self._jax.name_of(device))

    def instead(self, count: Count) -> str:
        if count.destination == "cpu":
            return "copy it first: jax.device_get(x)"
        return f"copy it there first: {put_call(count.destination, count.names)}"


def _name(count: Count, array: Any, user: FrameType | None) -> None:
    """For a line's first copies, add the name of the array's variable to `count`."""
    if array is None or user is None or count.calls > 4:
        return

    def holds(value: Any) -> bool:
        return any(_is(array, leaf) for leaf in _leaves(value)) and can_be_put(value)

    name = name_in(user, holds)
    count.names += (name,) if name and name not in count.names else ()


def _add(found: Sequence[tuple[Count, _Copy]], result: Any, seconds: float) -> None:
    for count, copy in found:
        count.add(copy.nbytes, seconds / len(found))
        if count.kind == "copy" and isinstance(copy.array, jax.Array):
            count.looks += 1
            count.repeats += count.last is not None and count.last() is copy.array
            count.last = weakref.ref(copy.array)


@cache
def _leave_out(register: Callable[[str], None]) -> None:
    """Make JAX omit gpumagic's frames from tracebacks, permanently."""
    for file in (__file__, watching.__file__):
        register(file)


def _one(x: Any, device: Any) -> Iterator[_Copy]:
    """Yield the copy of a value to a device; nothing if an array is already on the device."""
    source = None
    if isinstance(x, jax.Array):
        if device in x.sharding.device_set:
            return
        source = min(x.sharding.device_set, key=lambda own: own.id)
    yield _Copy(source, device, x.nbytes, getattr(x, "val", x))


def _shards(array: Any) -> list[tuple[Any, int]]:
    """Return (device, bytes) for each shard of an array, in the order of the sharding."""
    sharding, part = array.sharding, array.dtype.itemsize
    for size in sharding.shard_shape(array.shape):
        part *= size
    return [(device, part) for device in sharding._addressable_device_assignment]


def _moves_any(executable: Any, args: Sequence[Any]) -> bool:
    """Whether a call copies an operand from the host or another device; True if unknown."""
    first = len(executable.in_avals) - len(args)  # constants precede the arguments
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
    """Make NumPy call an array's `__array__`, as for arrays on GPUs, until `stack` is closed."""
    # In CPython's type objects, the slot `tp_as_buffer` lies 18 words after the object header.
    slot = id(array) + object.__basicsize__ + 18 * ctypes.sizeof(ctypes.c_void_p)
    slots = ctypes.c_void_p.from_address(slot).value or 0
    # If the offset is right, the buffer slots are inside the class. Otherwise, change nothing.
    if not 0 < slots - id(array) < type(array).__basicsize__:
        return
    get = ctypes.c_void_p.from_address(slots)
    stack.callback(setattr, get, "value", get.value)
    get.value = None
