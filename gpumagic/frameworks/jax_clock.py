"""Wait for what JAX's devices were given, and know how long JAX has compiled.

JAX gives its devices work and goes on. A device does what one thread gives it in turn, so a small
computation is done when all before it are, also those whose results nobody holds.
"""

import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
import numpy
from jax._src import xla_bridge

# Making a jaxpr, lowering it, and compiling; the first may come within one another.
_COMPILING = "/jax/core/compile/"


marks: dict[Any, Any] = {}
"""What barriers compute with, by device."""


class JaxBarrier:
    """A small computation on each device, compiled at the first use."""

    def __init__(self) -> None:
        self._bump = jax.jit(_bump)

    def wait(self) -> None:
        """Return when each device of this process has done what this thread gave it."""
        given = []
        # It is no part of what is timed, and `jax.local_devices` takes ten times as long.
        clients = xla_bridge.backends().values()
        for device in chain.from_iterable(client.local_devices() for client in clients):
            if device not in marks:
                marks[device] = jax.device_put(numpy.float32(0), device)
            given.append(self._bump(marks[device]))
        for mark in given:
            mark.block_until_ready()


def _bump(mark: Any) -> Any:
    return mark + 1


class CompileClock:
    """Adds up the seconds that JAX compiles for, from its first reading on."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # Of each thread the stretches so far, none of which is within another.
        self._stretches: dict[int, list[tuple[float, float]]] = {}
        self._listens = False

    def seconds(self) -> float:
        """How long it has compiled, on all threads."""
        if not self._listens:
            self._listens = True
            jax.monitoring.register_event_duration_secs_listener(self.note)
        every = [stretch for found in list(self._stretches.values()) for stretch in found]
        return sum(end - start for start, end in every)

    def note(self, event: str, duration_secs: float, **about: Any) -> None:
        """JAX tells of a stretch when it is over: what came within was told before."""
        if not event.startswith(_COMPILING):
            return
        end = self._clock()
        found = self._stretches.setdefault(threading.get_ident(), [])
        while found and found[-1][0] >= end - duration_secs:
            found.pop()
        found.append((end - duration_secs, end))
