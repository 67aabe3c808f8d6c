"""Make virtual GPUs: ``cuda:0`` … ``cuda:7`` in a process whose PyTorch sees no GPU.

A tensor on ``cuda:1`` is an ordinary ``torch.Tensor`` whose C++ device is ``cuda:1``, but its bytes
are in the CPU's memory. Results equal the CPU's bit for bit. Errors about mixed devices have CUDA's
text. Memory is counted and limited as on a GPU. Timings say nothing about a real GPU. In JAX and
TensorFlow, extra CPU devices serve as virtual GPUs, unless the framework has already started.

Importing this package does not import torch, which is optional. :func:`disable` restores torch.
See :mod:`gpumagic.virtual.gate` for the private parts of torch that are changed.
"""

import sys
import threading
import uuid
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec

import psutil

from gpumagic import faults
from gpumagic.device import Device, has_virtual, here, physical_gpus, set_virtual
from gpumagic.device.cards import bytes_in
from gpumagic.errors import GpuError, as_typed
from gpumagic.frameworks import known
from gpumagic.frameworks.framework import Framework
from gpumagic.telemetry import state_files as published
from gpumagic.telemetry.host import MemoryGroup

__all__ = ["disable", "enable", "enabled", "live_tensors"]

_GIB = 2**30
MOST = 8  # the limit of torch's fake device guard, c10::impl::FakeGuardImpl

_on = ExitStack()
_lock = threading.RLock()


def enable(devices: int = 2, memory: str | int | None = None, *, force: bool = False) -> None:
    """Give this process `devices` virtual GPUs of `memory` each; ``torch.cuda`` then reports them.

    Parameters
    ----------
    devices : int
        Number of GPUs, 1 to 8. Nothing changes if as many GPUs of this `memory` are already on.
    memory : str or int, optional
        Capacity of each GPU: ``"16GiB"``, ``"512MiB"``, ``"2GB"``, or bytes. By default,
        the GPUs share the host's usable memory equally, in whole GiB, at most 16 GiB each.
    force : bool
        Allow virtual GPUs on a machine with real GPUs. PyTorch cannot use the real GPUs until
        :func:`disable`.

    Raises
    ------
    GpuError
        If an argument is out of range, if there is a real GPU (without `force`), if this PyTorch
        cannot have virtual GPUs, or if virtual GPUs of another number or capacity are on.
    """
    if type(devices) is not int or not 1 <= devices <= MOST:  # True is an int too
        said = f"{devices} requested, 1 to {MOST} are possible"
        raise GpuError(f"virtual GPUs: {said}; type {as_typed('%gpus --virtual 2')}")
    capacity = None
    if memory is not None:
        capacity = bytes_in(f"{memory} bytes" if isinstance(memory, int) else str(memory)) or 0
        if not 2**20 <= capacity <= 2**40:
            said = f"their memory cannot be {memory!r}, 1MiB to 1TiB are possible"
            raise GpuError(f"virtual GPUs: {said}; type for example 16GiB or 512MiB")
    with _lock:
        if has_virtual():
            _compare(here(memory=False), devices, capacity)
        else:
            _check(force)
            turn_on(devices, capacity)


def _check(force: bool) -> None:
    """Raise GpuError if this machine or its torch cannot have virtual GPUs."""
    if find_spec("torch") is not None:
        from gpumagic.virtual import gate

        gate.check(force=force)
    elif not force and (real := len(physical_gpus())):
        there = "a real GPU" if real == 1 else f"{real} real GPUs"
        cure = "add --force to have virtual ones in place of real ones"
        raise GpuError(f"no virtual GPUs: this machine has {there}; {cure}")


def turn_on(number: int, capacity: int | None) -> None:
    """Turn on `number` virtual GPUs of `capacity` bytes, without `enable`'s checks."""
    global _on
    each = capacity or part_of_the_host(number)
    uuids = [f"GPU-{uuid.uuid4()}" for _ in range(number)]
    facts = [published.VirtualFacts(name, published.NAME, each) for name in uuids]
    with ExitStack() as stack:
        publisher = published.Publisher(facts)
        stack.callback(publisher.close)
        stack.callback(set_virtual, None)
        rows = publisher.counters
        devices = [
            Device("cuda", n, one.uuid, name=one.name, memory_total=each, virtual=True)
            for n, one in enumerate(facts)
        ]

        def listed() -> list[Device]:
            refresh(others=False)
            free = [max(each - row[published.RESERVED] - row[published.OTHERS], 0) for row in rows]
            return [replace(gpu, memory_free=n) for gpu, n in zip(devices, free, strict=True)]

        set_virtual(listed)
        if find_spec("torch") is not None:
            from gpumagic.virtual import switch

            switch.install(stack, facts, rows)
        _on = stack.pop_all()
    publisher.refresh = refresh
    known.make_virtual(number)


def part_of_the_host(number: int) -> int:
    """Return each GPU's default capacity: an equal part of the host's memory, at most 16 GiB."""
    part = (MemoryGroup().limit() or psutil.virtual_memory().total) // number
    return min(16 * _GIB, part // _GIB * _GIB or part)


def disable() -> None:
    """Turn the virtual GPUs off. Tensors on them are unusable until virtual GPUs are on again."""
    if enabled():
        known.make_virtual(0)
        with _lock:
            _on.close()


def enabled() -> bool:
    """Whether this process has virtual GPUs now."""
    return has_virtual()


def refresh(*, others: bool = True) -> None:
    """Publish to other processes how many bytes torch has reserved on each virtual GPU.
    With `others`, also publish the bytes of JAX and TensorFlow."""
    if gpus := sys.modules.get(f"{__name__}.virtual_gpus"):
        for gpu in gpus.GPUS:
            gpu.account.refresh()
    if others and has_virtual() and (started := known.started()):
        devices = here(memory=False)
        with faults.kept("counting what other frameworks hold on virtual GPUs"):
            published.count_others(lambda n: sum(_held(other, devices[n]) for other in started))


def _held(framework: Framework, device: Device) -> int:
    """Return a framework's bytes on `device`; 0 if the framework does not have the device."""
    with suppress(GpuError):
        return framework.allocated(device)[0]
    return 0


def live_tensors() -> int:
    """Return the number of tensor storages on the virtual GPUs; views share one storage."""
    refresh(others=False)
    gpus = sys.modules.get(f"{__name__}.virtual_gpus")
    return sum(gpu.account.allocator.blocks.current for gpu in gpus.GPUS) if gpus else 0


def _compare(there: list[Device], number: int, capacity: int | None) -> None:
    """Raise GpuError if the virtual GPUs that are already on differ from the requested ones."""
    each = there[0].memory_total or 0
    if len(there) != number or capacity not in (None, each):
        asked = number if capacity is None else f"{number} of {capacity / _GIB:.3g} GiB"
        off = "%gpus --virtual off" + " --force" * bool(live_tensors())
        said = f"{asked} requested, {len(there)} of {each / _GIB:.3g} GiB already on"
        raise GpuError(f"virtual GPUs: {said}; type {as_typed(off)} first")
