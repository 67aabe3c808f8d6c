"""Make virtual GPUs where torch is not installed: JAX and TensorFlow have them of the CPU."""

import uuid
from contextlib import ExitStack

from gpumagic.device import Device, physical_gpus, set_virtual
from gpumagic.errors import GpuError
from gpumagic.telemetry.virtual_state import NAME, OTHERS, Publisher, VirtualFacts
from gpumagic.virtual import host_memory

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
    each = capacity or host_memory.part_of_the_host(number)
    facts = [VirtualFacts(f"GPU-{uuid.uuid4()}", NAME, each) for _ in range(number)]
    with ExitStack() as stack:
        publisher = Publisher(facts)
        stack.callback(publisher.close)
        stack.callback(set_virtual, None)
        set_virtual(lambda: _devices(facts, publisher))
        _on = stack.pop_all()


def _devices(facts: list[VirtualFacts], publisher: Publisher) -> list[Device]:
    return [
        Device(
            kind="cuda",
            ordinal=ordinal,
            uuid=each.uuid,
            name=each.name,
            memory_total=each.memory_total,
            memory_free=each.memory_total - row[OTHERS],
            virtual=True,
        )
        for ordinal, (each, row) in enumerate(zip(facts, publisher.counters, strict=True))
    ]


def turn_off() -> None:
    """Undo all of it."""
    _on.close()
