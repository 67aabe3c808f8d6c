"""Make virtual GPUs without torch, for JAX and TensorFlow, within the host's memory."""

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil

from gpumagic.device import Device, physical_gpus, set_virtual
from gpumagic.errors import GpuError
from gpumagic.telemetry.state_files import NAME, OTHERS, Publisher, VirtualFacts

# Of a container: cgroup's second version, and its first.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NONE = 2**63
_GIB = 2**30
LARGEST = 16 * _GIB
"""What a virtual GPU has where nobody says how much, and the host can hold it."""


def total() -> int:
    """Bytes that this process may use at most."""
    return min([psutil.virtual_memory().total, *map(_limit, LIMITS)])


def part_of_the_host(number: int) -> int:
    """Return the capacity that all of them can hold at once; in whole GiB from 1 GiB on."""
    part = total() // number
    return min(LARGEST, part // _GIB * _GIB or part)


def available() -> int:
    """Return the bytes that this process can still allocate."""
    limit = min(map(_limit, LIMITS), default=_NONE)
    return min(psutil.virtual_memory().available, limit - psutil.Process().memory_info().rss)


def _limit(path: str) -> int:
    """A container's limit of memory in bytes; a large number where it has none."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return _NONE


_on = ExitStack()


def turn_on(number: int, capacity: int | None, *, force: bool = False) -> None:
    """Give this process `number` virtual GPUs of `capacity` bytes, or GpuError where refused."""
    global _on
    if not force and (real := len(physical_gpus())):
        there = "a real GPU" if real == 1 else f"{real} real GPUs"
        raise GpuError(
            f"no virtual GPUs: this machine has {there}; add --force to have virtual ones in place "
            "of real ones"
        )
    facts = facts_of(number, capacity)
    with ExitStack() as stack:
        publisher = Publisher(facts)
        stack.callback(publisher.close)
        show(stack, facts, lambda n: publisher.counters[n][OTHERS])
        _on = stack.pop_all()


def facts_of(number: int, capacity: int | None) -> list[VirtualFacts]:
    """Return new virtual GPUs; if no capacity is given, of an equal part of the host's memory."""
    each = capacity or part_of_the_host(number)
    return [VirtualFacts(f"GPU-{uuid.uuid4()}", NAME, each) for _ in range(number)]


def show(stack: ExitStack, facts: list[VirtualFacts], used: Callable[[int], int]) -> None:
    """Let this process see virtual GPUs until `stack` closes; `used` gives the bytes in use."""

    def devices() -> list[Device]:
        return [
            Device(
                kind="cuda",
                ordinal=n,
                uuid=each.uuid,
                name=each.name,
                memory_total=each.memory_total,
                memory_free=max(each.memory_total - used(n), 0),
                virtual=True,
            )
            for n, each in enumerate(facts)
        ]

    stack.callback(set_virtual, None)
    set_virtual(devices)


def turn_off() -> None:
    """Undo all of it."""
    _on.close()
