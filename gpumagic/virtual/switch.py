"""Turn virtual GPUs on and off, whole or not at all."""

import threading
import uuid
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch

from gpumagic.device import Device, set_virtual
from gpumagic.telemetry.virtual_state import COUNTERS, NAME, Publisher, VirtualFacts
from gpumagic.virtual import abi, cuda_api, events, gate, host_memory, registry
from gpumagic.virtual.compiled import refuse_compiling
from gpumagic.virtual.memory_account import MemoryAccount
from gpumagic.virtual.virtual_gpus import GPUS, Properties, VirtualGpu, in_bad_fork

C: Any = torch._C
_on = ExitStack()
_lock = threading.RLock()


def turn_on(number: int, capacity: int | None, *, force: bool = False) -> None:
    """Give this process `number` virtual GPUs of `capacity` bytes, or GpuError where refused."""
    with _lock:
        gate.check(force=force)
        install(number, capacity or host_memory.part_of_the_host(number))


def install(number: int, capacity: int) -> None:
    """The same without asking the gate: only for it, in its own child process."""
    global _on
    with ExitStack() as stack:
        stack.callback(GPUS.clear)
        _make(stack, number, capacity)
        abi.install(stack)
        cuda_api.install(stack)
        refuse_compiling(stack)
        registry.register(stack)
        torch.cuda.init()
        stack.callback(_back_to_first)
        _on = stack.pop_all()


def _back_to_first() -> None:
    if not in_bad_fork():  # where C++ would refuse, and there is nothing to leave in order
        C._accelerator_setDeviceIndex(0)


def turn_off() -> None:
    """Undo all of it."""
    with _lock:
        _on.close()


def _make(stack: ExitStack, number: int, capacity: int) -> None:
    ids = [uuid.uuid4() for _ in range(number)]
    publisher = Publisher([VirtualFacts(f"GPU-{u}", NAME, capacity) for u in ids])
    stack.callback(publisher.close)
    for index, (u, row) in enumerate(zip(ids, publisher.counters, strict=True)):
        account = MemoryAccount(index, capacity, row)
        stack.callback(account.unpublish)
        GPUS.append(VirtualGpu(index, account, Properties(NAME, capacity, u)))
    stack.callback(events.listeners.clear)
    stack.callback(set_virtual, None)
    set_virtual(_devices)


def _devices() -> list[Device]:
    return [
        Device(
            kind="cuda",
            ordinal=gpu.index,
            uuid=f"GPU-{gpu.properties.uuid}",
            name=NAME,
            memory_total=gpu.account.capacity,
            memory_free=gpu.account.free,
            virtual=True,
        )
        for gpu in GPUS
    ]


def stand_in(gpus: Iterable[tuple[Any, int]]) -> None:
    """Let virtual GPUs answer for real ones in a forked child, which may not call their driver.

    Tensors cannot be made on them: it is for following code on tensors without data. Each is given
    by what ``torch.cuda.get_device_properties`` says of it, and the bytes allocated there. Virtual
    GPUs that are on are there no more.
    """
    on = bool(GPUS)  # and they are to stand aside
    GPUS.clear()
    for index, (real, allocated) in enumerate(gpus):
        facts = {f.name: getattr(real, f.name) for f in fields(Properties) if hasattr(real, f.name)}
        account = MemoryAccount(index, real.total_memory, [0] * COUNTERS)
        account.allocator.take(allocated)
        properties = Properties(**{"uuid": uuid.uuid4(), **facts})
        GPUS.append(VirtualGpu(index, account, properties))
    stack = ExitStack()  # never closed: the child ends with it
    if on:
        cuda_api.patch(stack, torch.cuda, default_generators=cuda_api.equipped())
    else:
        abi.install(stack)
        cuda_api.install(stack)
    torch.cuda.init()
