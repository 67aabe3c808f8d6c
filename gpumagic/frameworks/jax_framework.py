"""Support JAX's devices, arrays, pytrees and memory, and Flax NNX's objects.

JAX works asynchronously. `wait` queues one more computation on each device, and waits for its end.
Virtual GPU k is logical device k + 1 of the CPU; `jax.devices("gpu")` returns the virtual GPUs.
"""

import ast
import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import Any, cast

import jax
import numpy
from jax._src import xla_bridge
from jax.tree_util import tree_flatten, tree_structure, treedef_is_leaf

from gpumagic.device import Device, here
from gpumagic.errors import GpuError
from gpumagic.frameworks.array_framework import ArrayFramework, arrays_in, failures, operands
from gpumagic.frameworks.framework import Place, Pool, Split, too_late
from gpumagic.frameworks.jax_copies import JaxCopies, as_code, can_be_put
from gpumagic.mismatch.explanation import Edit, Explanation, Operand, expression, total
from gpumagic.usercode.files import swap_attribute
from gpumagic.usercode.frames import FailedFrame, statement
from gpumagic.usercode.values import MISSING, comes_from

_GPU = ("gpu", "cuda", "rocm")
# Functions of `jax` that list or count devices, and the position of their argument `backend`.
_ASKED = {"devices": 0, "local_devices": 1, "device_count": 0, "local_device_count": 0}
_PLAIN = (list, tuple, dict, set, str, int, float, type(None))  # not split by `parts`
_INCOMPATIBLE = re.compile(r"^Received incompatible devices for jitted computation.*", re.DOTALL)
_DEVICES = re.compile(r"with device ids \[([\d, ]+)\] on platform (\w+)")
_REASON = (
    "they are committed to their devices, by jax.device_put or by a cell that moved them there, so "
    "JAX does not move them"
)


class Jax(ArrayFramework):
    """Adapt JAX to the `Framework` protocol; the first request for a device starts JAX."""

    name = "JAX"

    def __init__(self) -> None:
        super().__init__()
        self._bump = jax.jit(lambda mark: mark + 1)
        self._marks: dict[Any, Any] = {}  # inputs of the computations that `wait` queues, by device
        self._failed = weakref.WeakValueDictionary[int, Any]()  # arrays whose computation failed
        self.copies = JaxCopies(self)

    def started(self) -> bool:
        """Whether JAX's backends are initialized; never initializes them."""
        return bool(getattr(xla_bridge, "backends_are_initialized", lambda: True)())

    def devices(self) -> list[Device]:
        there = self._gpus()
        return [device for device in here(memory=False) if device.ordinal in there]

    def own(self, device: Device) -> Any:
        if device.kind == "cpu":
            return jax.local_devices(backend="cpu")[0]
        gpus = self._gpus() if device.kind == "cuda" else {}
        if device.ordinal in gpus:
            return gpus[device.ordinal]
        raise self.missing(device, len(gpus) + 1, "'jax[cuda13]'")

    def _gpus(self) -> dict[int, Any]:
        """Map ordinals to JAX's devices, which are the virtual GPUs if there are any."""
        if self.virtual:
            return dict(enumerate(jax.local_devices(backend="cpu")[1 : self.virtual + 1]))
        try:
            return {device.local_hardware_id: device for device in jax.local_devices(backend="gpu")}
        except RuntimeError:  # JAX has no GPU support, or there is no GPU
            return {}

    def name_of(self, own: Any) -> str:
        """Return gpumagic's name for a JAX device: ``"cuda:1"``."""
        if own.platform in _GPU:
            return f"cuda:{own.local_hardware_id}"
        if own.platform != "cpu":
            return f"{own.platform}:{own.id}"
        return f"cuda:{own.id - 1}" if self.virtual and own.id else "cpu"

    def default(self) -> str:
        """Return the default device of new arrays."""
        own = jax.config.jax_default_device or jax.devices()[0]
        return own if isinstance(own, str) else self.name_of(own)

    def make_virtual(self, count: int) -> None:
        try:
            jax.config.update("jax_num_cpu_devices", count + 1)  # an error if JAX has started
        except RuntimeError:
            if (there := len(jax.local_devices(backend="cpu"))) <= count:
                raise GpuError(too_late("JAX", there, count)) from None

    def patch(self, stack: ExitStack) -> None:
        for name, position in _ASKED.items():
            ours = self._answering(getattr(jax, name), position, name.endswith("_count"))
            swap_attribute(stack, jax, name, ours)

    def _answering(self, real: Callable[..., Any], position: int, counts: bool) -> Any:
        @functools.wraps(real)
        def answer(*args: Any, **kwargs: Any) -> Any:
            asked = dict(enumerate(args)).get(position, kwargs.get("backend"))
            if not self.virtual or asked not in _GPU:
                return real(*args, **kwargs)
            gpus = [*self._gpus().values()]
            return len(gpus) if counts else gpus

        return answer

    def place(self, device: Device, **options: Any) -> AbstractContextManager[object]:
        own = self.own(device)
        # JAX uses `own` anyway, and JAX's calls are faster while no default device is set.
        if jax.config.jax_default_device is None and own == jax.local_devices()[0]:
            return nullcontext()
        return cast(AbstractContextManager[object], jax.default_device(own))

    def is_array(self, value: Any) -> bool:
        has_data = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
        return has_data and not value.is_deleted()

    def where(self, array: Any) -> str:
        on_host = (array.sharding.memory_kind or "").endswith("_host")
        own = sorted(array.sharding.device_set, key=lambda device: device.id)
        return "cpu" if on_host and own[0].platform != "cpu" else " + ".join(map(self.name_of, own))

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        """Return `array` if it is on `device`, else a copy. JAX never moves a `committed` copy."""
        if array.sharding.num_devices > 1:
            why = f"it is sharded over {self.where(array)}, and was not moved"
            raise GpuError(f"{why}; jax.device_put(x, device) gathers it")
        if self.where(array) == str(device):
            return array
        own = self.own(device)
        if committed or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            return jax.device_put(array, own)
        with jax.default_device(own):
            return jax.numpy.asarray(jax.device_get(array))

    def copy(self, array: Any, device: Device) -> Any:
        """Return a new copy committed to a device; donating the copy leaves the array intact."""
        return jax.device_put(array, self.own(device), may_alias=False)

    def parts(self, value: Any) -> Split | None:
        if type(value) in _PLAIN or isinstance(value, jax.Array):
            return None
        if comes_from(type(value), "flax.nnx.Variable"):
            return [value.get_raw_value()], functools.partial(_set_variable, value)
        if comes_from(type(value), "flax.nnx.Pytree"):
            held = {n: v for n, v in vars(value).items() if not n.startswith("_pytree__")}
            return [*held.values()], functools.partial(_set_attributes, value, held)
        children, treedef = tree_flatten(value, is_leaf=lambda inner: inner is not value)
        return None if treedef_is_leaf(treedef) else (children, treedef.unflatten)

    def knows(self, kind: type) -> bool:
        """Whether the class is registered with JAX as a pytree, which a copy of it would not be."""
        if comes_from(kind, "flax.nnx.Pytree"):  # Flax also registers copies of a class
            return False
        try:
            return not treedef_is_leaf(tree_structure(object.__new__(kind)))
        except TypeError:  # a class written in C
            return False
        except Exception:  # noqa: BLE001  the class's flatten function failed on the empty object
            return True

    def wait(self, *devices: str) -> None:
        """Wait for live arrays, and for this thread's computations whose results are unused."""
        given = []
        # `jax.local_devices` would take 10 times as long, and timings include this wait.
        clients = xla_bridge.backends().values()
        for device in chain.from_iterable(client.local_devices() for client in clients):
            if device not in self._marks:
                self._marks[device] = jax.device_put(numpy.float32(0), device)
            given.append(self._bump(self._marks[device]))
        # Raise the first error at the end. Later calls skip arrays whose computation failed.
        errors: list[Exception] = []
        for array in [*given, *self.live()]:
            if self._failed.get(id(array)) is not array:
                try:
                    array.block_until_ready()
                except Exception as error:  # noqa: BLE001  an error of the user's computation
                    self._failed[id(array)] = array
                    errors.append(error)
        if errors:
            raise errors[0]

    def allocated(self, device: Device) -> tuple[int, int | None]:
        """Return the bytes allocated on a device, and the peak, which JAX knows only on GPUs."""
        if stats := self.own(device).memory_stats():
            return stats["bytes_in_use"], stats.get("peak_bytes_in_use")
        return super().allocated(device)

    def places(self, array: Any) -> list[Place]:
        if array.is_deleted() or not _has_data(array):
            return []
        # For one shard, avoid `shard.data`, because it would create another live array.
        one = array.sharding.num_devices == 1
        data = [array] if one else [shard.data for shard in array.addressable_shards]
        return [Place(self.where(x), x.unsafe_buffer_pointer(), x.nbytes) for x in data if x.nbytes]

    def live(self) -> list[Any]:
        """List all live arrays, including JAX's internal arrays but not gpumagic's."""
        if not self.started():
            return []
        ours = {id(mark) for mark in self._marks.values()}
        return [a for a in jax.live_arrays() if id(a) not in ours and not a.is_deleted()]

    def pool(self, device: Device) -> Pool | None:
        if device.virtual or not self.started():
            return None
        try:
            stats = self.own(device).memory_stats() or {}
        except GpuError:  # JAX does not see this GPU
            return None
        names = ("bytes_in_use", "peak_bytes_in_use", "pool_bytes", "bytes_limit")
        return Pool(self.name, *map(stats.get, names)) if stats else None

    def explain(self, error: BaseException, namespace: Mapping[str, Any]) -> Explanation | None:
        for n, (message, frame, node) in enumerate(failures(error, namespace, _INCOMPATIBLE)):
            said = {self._said(*devices) for devices in _DEVICES.findall(message[0])}
            parts = dict(operands(node, frame, self._committed))
            where = {part: Counter[str]() for part in parts}
            for part, array in ((p, array) for p in parts for array in parts[p]):
                where[part][self.where(array)] += array.nbytes
            there = {*chain.from_iterable(where.values())}
            # Skip a caller's frame if an operand has arrays on several devices: some may be unused.
            whole = n == 0 or all(len(devices) == 1 for devices in where.values())
            if len(there) > 1 and said <= there and whole:
                return _explained(frame, node, parts, where)
        return None

    def _committed(self, value: Any) -> list[Any]:
        """Return the arrays that are committed to a device, in a value or in a tracer's value."""
        while isinstance(value, jax.core.Tracer):  # tracers of `jax.jit` have no value
            value = getattr(value, "primal", getattr(value, "val", None))
        return [array for array in arrays_in(value, self) if array.committed]

    def _said(self, numbers: str, platform: str) -> str:
        """Return gpumagic's name for the devices that an error message lists."""
        devices = {device.id: device for device in jax.devices(platform.lower())}
        return " + ".join(self.name_of(devices[int(n)]) for n in numbers.split(","))


def _has_data(array: Any) -> bool:
    """Whether an array has data: after a failed computation, reading its address would crash."""
    if next(iter(array.sharding.device_set)).platform == "cpu":
        try:
            array.block_until_ready()
        except Exception:  # noqa: BLE001  the computation failed; the user sees the error elsewhere
            return False
    return True


def _set_variable(variable: Any, parts: Sequence[Any]) -> Any:
    variable.set_raw_value(parts[0])
    return variable


def _set_attributes(thing: Any, held: Mapping[str, Any], parts: Sequence[Any]) -> Any:
    """Change a Flax NNX object in place, so that all references see the change."""
    for (name, old), new in zip(held.items(), parts, strict=True):
        if new is not old:
            vars(thing)[name] = new  # bypass the class's __setattr__, which checks values
    return thing


def _explained(
    frame: FailedFrame,
    node: ast.AST,
    parts: Mapping[ast.expr, Sequence[Any]],
    where: Mapping[ast.expr, Counter[str]],
) -> Explanation:
    """Explain that operands are on several devices; add a fix if all can move to one device."""
    # Choose the device with the most bytes of operands that cannot move; if all can, of all.
    stays = [part for part in parts if _stays(part, node, frame, where[part])]
    whole = Counter[str]()
    for part in stays or parts:
        whole.update(where[part])  # unlike +, this keeps a device with 0 bytes
    target = whole.most_common(1)[0][0]
    odd = [part for part, devices in where.items() if {*devices} != {target}]
    rows = [_row(part, frame, arrays, where[part], part in odd) for part, arrays in parts.items()]
    fix = None
    if "+" not in target and not {*odd} & {*stays}:
        stmt: Any = statement(node)
        edit = Edit(frame, stmt, ["import jax"] * (frame.scope.name("jax") is not jax))
        put = as_code(target)
        edit.replaced += [(part, f"jax.device_put({frame.text(part)}, {put})") for part in odd]
        fix = edit.fix(total(row.nbytes for row in rows if row.odd))
    return Explanation(*expression(frame, node), tuple(dict.fromkeys(rows)), fix, _REASON)


def _stays(part: ast.expr, node: ast.AST, frame: FailedFrame, devices: Counter[str]) -> bool:
    """Whether an operand must stay: it is assigned to, sharded, or not only arrays and numbers."""
    value = frame.scope.value(part)
    fixed = part is getattr(node, "target", None) or "+" in "".join(devices)
    return fixed or (value is not MISSING and not can_be_put(value))


def _row(
    part: ast.expr, frame: FailedFrame, arrays: Sequence[Any], where: Counter[str], odd: bool
) -> Operand:
    devices = tuple(device for device, _ in where.most_common())
    if frame.scope.value(part) is MISSING:
        return Operand(frame.text(part), devices, None, "made here", odd)
    shape = ", ".join(map(str, arrays[0].shape))
    about = f"{len(arrays)} arrays" if len(arrays) > 1 else f"{arrays[0].dtype}[{shape}]"
    return Operand(frame.text(part), devices, where.total(), about, odd)
