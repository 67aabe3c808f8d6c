"""Count JAX's copies between devices and its waits, by the user's line, and advise on them.

An operand on another device is copied silently: NumPy's always, JAX's unless it is committed to its
device. Not counted: a single number as an operand, constants that a program closes over (they are
compiled in), and what a program over several devices exchanges while it runs. On virtual GPUs an
array counts as read once, as on a GPU, where JAX keeps the copy.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from numbers import Number
from types import FrameType
from typing import Any

import jax
import numpy

from gpumagic.errors import ImplicitCopyError
from gpumagic.frameworks import jax_doors
from gpumagic.frameworks.jax_devices import JaxDevices
from gpumagic.frameworks.jax_doors import Move
from gpumagic.frameworks.watching import Call, Inside, called_from, refusal
from gpumagic.ledger.advice import ADVISERS, OFTEN, Advice, all_but_one
from gpumagic.ledger.entry import DISPLAY, LIBRARY, USER, Count, Entry, Tally, kinds
from gpumagic.usercode.files import called, in_cell, module_of, name_in


def advise(entry: Entry) -> Advice | None:
    """Advise on what only JAX does; None for any other entry."""
    if entry.operator == "block_until_ready":
        text = "wait once, after the loop: jax.block_until_ready(results)"
        return all_but_one(entry, text) if entry.calls >= OFTEN else None
    if entry.operator == "operand":
        return _of_operand(entry)
    if entry.repeats and entry.kind == "copy" and entry.destination != "cpu":
        return _the_same(entry)
    return None


def _of_operand(entry: Entry) -> Advice:
    if entry.repeats:
        return _the_same(entry)
    is_, it = ("are", "them") if len(entry.names) > 1 else ("is", "it")
    place = f"on {entry.source}" if entry.source != "cpu" else "NumPy's, or on the CPU"
    text = f"{' and '.join(entry.names) or 'an operand'} {is_} {place}: put {it} there, and what is"
    text += f" the same each time once: {put_call(entry.destination, entry.names)}"
    return Advice(text, 0, 1.0, "at most: all of it, if the same array comes each time")


def _the_same(entry: Entry) -> Advice:
    put = put_call(entry.destination, entry.names)
    text = f"the same array each time; once, before the loop: {put}"
    share = entry.repeats / entry.count
    return Advice(text, entry.repeats, share, "the time of all but the first")


def put_call(destination: str, names: Sequence[str] = ()) -> str:
    """Return the code that copies the variables of these names to a device."""
    every = ", ".join(names)
    what = f"({every})" if len(names) > 1 else every or "…"
    return f"{every and f'{every} = '}jax.device_put({what}, {own(destination)})"


def own(device: str) -> str:
    """Return a device as code: ``jax.devices("gpu")[1]``."""
    kind, _, number = device.partition(":")
    return f'jax.devices("gpu")[{number}]' if kind == "cuda" else 'jax.devices("cpu")[0]'


_MOST = 4096  # leaves of a variable that are looked at


def name_of(array: Any, user: FrameType) -> str:
    """Return the variable in a user's expression that is or holds an array; empty if none does."""
    return name_in(user, partial(_is, array)) or name_in(user, partial(_holds, array))


def _is(array: Any, value: Any) -> bool:
    """Whether a variable's value is an array; NumPy's come here as other objects of their bytes."""
    if value is array or not (hasattr(value, "__array_interface__") and hasattr(array, "ctypes")):
        return array is not None and value is array
    ours, theirs = array.__array_interface__, value.__array_interface__
    return bool(ours["data"] == theirs["data"] and ours["shape"] == theirs["shape"])


def _holds(array: Any, value: Any) -> bool:
    """Whether a variable is a pytree with an array in it, which a copy may replace."""
    try:
        leaves = [] if changes(value) else jax.tree.leaves(value)
    except Exception:  # noqa: BLE001  of a class of the user's
        return False
    return any(_is(array, leaf) for leaf in leaves[:_MOST]) and all(map(is_data, leaves))


def is_data(leaf: Any) -> bool:
    """Whether `device_put` takes a leaf of a pytree: a module of Equinox's may hold functions."""
    return isinstance(leaf, (jax.Array, numpy.ndarray, Number))


def changes(value: object) -> bool:
    """Whether it is an object of Flax NNX, which changes in place."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, (nnx.Variable, nnx.Pytree))


_inside = Inside(jax, "jax_")
# Frames of JAX's that stand around its functions.
_AROUND = {"reraise_with_filtered_traceback", "wrapper"}
# A program's constants: see above.
_COMPILING = {"_array_mlir_constant_handler", "shard_const_args"}
# Functions that are called to make an array of something else, or to read one.
_MAKING = {"array", "asarray", "from_dlpack", "frombuffer"}
_MAKING |= {"make_array_from_callback", "make_array_from_process_local_data"}
_READING = {"array", "asarray", "ascontiguousarray", "copyto", "save", "savez", "stack"}

_NAMED = 8  # calls of an instruction whose arrays' names are looked for

ADVISERS["JAX"] = advise


class JaxCopies:
    """Count from `__enter__` to `__exit__`, on all threads that no other instance counts."""

    def __init__(self, devices: JaxDevices, tally: Tally, strict: bool) -> None:
        self._devices = devices
        self.tally = tally
        self.strict = strict
        self.thread = 0

    def __enter__(self) -> "JaxCopies":
        self.thread = threading.get_ident()
        _counting.add(self, self._devices)
        return self

    def __exit__(self, *exc: object) -> None:
        _counting.remove(self)


class _Counting:
    """Pass JAX's copies and waits to all counters in force."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: tuple[JaxCopies, ...] = ()
        self._stack = ExitStack()
        self._read: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._devices: Any = None
        self._scopes: Any = None
        self._names: dict[Any, str] = {}

    def add(self, one: JaxCopies, devices: JaxDevices) -> None:
        """Begin to count; GpuError where this JAX cannot be counted."""
        with self._lock:
            if not self._running:
                self._devices = devices
                self._scopes = jax_doors.stand(self, self._stack, virtual=devices.virtual)
                self._names = {None: "cpu"}
            self._running = (*self._running, one)

    def remove(self, one: JaxCopies) -> None:
        """Stop counting; the last counter to stop removes the patches of JAX."""
        with self._lock:
            if one not in self._running:
                return
            self._running = tuple(other for other in self._running if other is not one)
            if not self._running:
                self._stack.close()
                self._read.clear()

    def copying(self, moves: Sequence[Move]) -> Callable[[float], None] | None:
        """Count copies to devices; called before them."""
        __tracebackhide__ = True
        return self._asked(self._copying(moves, sys._getframe(1)))

    def reading(self, array: Any, moves: Sequence[Move]) -> Callable[[float], None] | None:
        """Count a read by the host; called before it."""
        __tracebackhide__ = True
        return self._asked(self._reading(array, moves, sys._getframe(1)))

    def waiting(self, arrays: Sequence[Any]) -> Callable[[float], None] | None:
        """Count a wait of the host for arrays; called before it."""
        call = self._called_from(sys._getframe(1))
        if call is None:
            return None
        held = [array.sharding.device_set for array in arrays if isinstance(array, jax.Array)]
        moves = [Move(own, None, 0, None, True) for own in set().union(*held)]
        call = call._replace(explicit=True)
        return self._asked(self._found(False, "block_until_ready", call, moves))

    def _asked(self, found: Sequence[tuple[Count, Move]]) -> Callable[[float], None] | None:
        """Return a function to count moves once made; under strict, raise if one is implicit."""
        __tracebackhide__ = True
        if any(one.strict for one in self._watching()):
            for count, _ in found:
                if count.implicit and count.how != DISPLAY:
                    refused = ImplicitCopyError(_refusal(count))
                    refused.raised_in = count.code
                    raise refused
        return _adding(found) if found else None

    def _copying(self, moves: Sequence[Move], frame: FrameType) -> list[tuple[Count, Move]]:
        call = self._called_from(frame)
        if call is None:
            return []
        # What a library makes an array of is an operand of the user's all the same.
        users = call.inner is not None and kinds[call.inner.f_code.co_filename] == USER
        making = users and call.function in _MAKING
        if not (call.explicit or making):
            moves = [move for move in moves if not move.single]
        operator = call.function if making else "device_put" if call.explicit else "operand"
        call = call._replace(explicit=call.explicit or making)
        return self._found(True, operator, call, moves)

    def _reading(
        self, array: Any, moves: Sequence[Move], frame: FrameType
    ) -> list[tuple[Count, Move]]:
        if self._read.get(id(array)) is array:
            return []
        self._read[id(array)] = array
        call = self._called_from(frame)
        if call is None or not moves:
            return []
        if moves[0].single and not call.explicit:
            return self._found(False, "item", call, moves)
        user = call.user is not None and called(*in_cell(call.user)) in _READING
        operator = "device_get" if call.explicit else "asarray" if user else "value"
        call = call._replace(explicit=call.explicit or user)
        return self._found(True, operator, call, moves)

    def _found(
        self, copy: bool, operator: str, call: Call, moves: Sequence[Move]
    ) -> list[tuple[Count, Move]]:
        """Return the counts for each move: one in every tally that counts this thread."""
        found = []
        for move in moves:
            ends = (self._name(move.source), self._name(move.destination))
            if ends[0] == ends[1] or (copy and not move.nbytes):
                continue
            key = ((copy, operator, *ends), *call.at(), call.how, threading.get_ident())
            for one in self._watching():
                count = one.tally.counts.get(key)
                if count is None:
                    count = one.tally.add(key, _new(copy, operator, ends, call))
                if count.calls < _NAMED and call.user is not None:
                    name = name_of(move.array, call.user)
                    count.names += (name,) if name and name not in count.names else ()
                found.append((count, move))
        return found

    def _watching(self) -> Sequence[JaxCopies]:
        me = threading.get_ident()
        return [one for one in self._running if one.thread == me] or self._running

    def _called_from(self, frame: FrameType) -> Call | None:
        threads = [one.thread for one in self._running]
        call = called_from(frame, _inside, _AROUND, _COMPILING, threads)
        scopes = self._scopes()
        if call is None or not (scopes.explicit_device_put or scopes.explicit_device_get):
            return call
        return call._replace(explicit=True)

    def _name(self, device: Any) -> str:
        name = self._names.get(device)
        if name is None:
            name = self._names[device] = self._devices.name(device)
        return name


_counting = _Counting()


def _new(copy: bool, operator: str, ends: tuple[str, str], call: Call) -> Count:
    inner = "" if call.inner is None else call.inner.f_code.co_filename
    # An operand is elsewhere because of who gave it; what a library reads, it reads by itself.
    asked = call.explicit and operator != "block_until_ready"
    library = call.how == LIBRARY and not asked and operator != "operand"
    within = module_of(inner) if library and kinds[inner] != USER else ""
    return call.counting(copy, operator, ends, not call.explicit, within=within, framework="JAX")


def _adding(found: Sequence[tuple[Count, Move]]) -> Callable[[float], None]:
    def add(seconds: float) -> None:
        for count, move in found:
            count.count += 1
            count.nbytes += move.nbytes
            count.seconds += seconds / len(found)
            count.calls += 1
            count.blocking += move.destination is None
            if count.copy and isinstance(move.array, jax.Array):
                count.looks += 1
                count.repeats += count.last is not None and count.last() is move.array
                count.last = weakref.ref(move.array)

    return add


def _refusal(count: Count) -> str:
    if count.destination == "cpu":
        return refusal(count, "name it first: jax.device_get(x)")
    put = put_call(count.destination, count.names)
    return refusal(count, f"bring it there first: {put}")
