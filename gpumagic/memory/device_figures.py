"""Read each GPU's figures: what torch has of it, what else this process has, and who the rest.

No figure starts CUDA or makes a context on a GPU that has none; what nobody can tell is None.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from gpumagic.device import Device
from gpumagic.frameworks.known import imported, started
from gpumagic.gputable.gpu_columns import UNSEEN, Holder, holders
from gpumagic.memory.find_holders import FoundStorage
from gpumagic.memory.memory_report import DeviceMemory
from gpumagic.telemetry import collect
from gpumagic.telemetry.snapshot import GpuSample
from gpumagic.usercode.values import torch_here


def figures() -> list[DeviceMemory]:
    """The GPUs that this process can use, with torch's part, without who holds what."""
    torch = torch_here()
    if torch is not None:
        from gpumagic.placement.torch_devices import tell_cuda_order

        tell_cuda_order()
    snapshot = collect.snapshot()
    gpus = {gpu.ordinal: gpu for gpu in snapshot.gpus if gpu.ordinal is not None and not gpu.lost}
    held = holders(snapshot.gpus, snapshot.processes, each=False)
    ordinals = {*range(torch.cuda.device_count() if torch else 0), *(gpus if imported() else ())}
    found = [_figures(n, gpus.get(n), held) for n in sorted(ordinals)]
    return found + (_apple(torch) if torch else [])


def with_other_libraries(device: DeviceMemory, found: Iterable[FoundStorage]) -> DeviceMemory:
    """A GPU's figures with what arrays of other libraries than torch have of it."""
    kind, _, ordinal = device.device.partition(":")
    here = [each for each in found if each.device == device.device and each.is_of_other_library]
    nbytes = sum(each.nbytes for each in here)
    if kind != "cuda" or not (nbytes or started()):
        return device
    gpu = Device("cuda", int(ordinal), virtual=device.virtual)
    pools = tuple(pool for each in started() if (pool := each.pool(gpu)) is not None)
    # What no allocator tells of was taken at least for what there is.
    taken = max(nbytes, sum(pool.taken or 0 for pool in pools))
    rest = device.other_in_process
    return replace(
        device,
        allocated=None if device.allocated is None else device.allocated + nbytes,
        reserved=None if device.reserved is None else device.reserved + taken,
        other_in_process=None if rest is None else max(rest - taken, 0),
        pools=pools,
    )


def _figures(ordinal: int, gpu: GpuSample | None, held: Sequence[Holder]) -> DeviceMemory:
    allocated, reserved, torn = _allocator(ordinal)
    device = f"cuda:{ordinal}"
    if gpu is None:  # nobody tells
        return DeviceMemory(device, None, False, None, None, allocated, reserved, torn)
    mine, others = None, []
    for holder in held:
        if gpu.uuid in holder.memory and holder.mine:
            mine = holder.memory[gpu.uuid]
        elif gpu.uuid in holder.memory:
            others.append((holder.name, holder.memory[gpu.uuid]))
    if mine is None and reserved:
        # Our own pid is another one out there (a container): what is ours is unaccounted, too.
        others = [(name, b - reserved if b and name == UNSEEN else b) for name, b in others]
        others = [(name, b) for name, b in others if b is None or b > 0]
    known = [b for _, b in others if b is not None]
    return DeviceMemory(
        device=device,
        name=gpu.name,
        virtual=gpu.virtual,
        total=gpu.memory_total,
        free=_free(gpu),
        allocated=allocated,
        reserved=reserved,
        torn=torn,
        other_in_process=None if mine is None or reserved is None else max(mine - reserved, 0),
        others=sum(known) if known or not others else None,
        others_by_name=tuple(others),
        uuid=gpu.uuid,
    )


def _free(gpu: GpuSample) -> int | None:
    if gpu.memory_total is None or gpu.memory_used is None:
        return None
    return max(gpu.memory_total - gpu.memory_used - (gpu.memory_reserved or 0), 0)


def _allocator(ordinal: int) -> tuple[int | None, int | None, int | None]:
    """Bytes allocated, reserved, and free in pieces between what is allocated."""
    torch = torch_here()
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0, 0
    from gpumagic.memory.allocator import is_native

    stats: dict[str, Any] = torch.cuda.memory_stats(ordinal)
    # Another allocator does not tell, and says 0.
    torn = stats.get("inactive_split_bytes.all.current") if is_native() else None
    return stats.get("allocated_bytes.all.current"), stats.get("reserved_bytes.all.current"), torn


def _apple(torch: Any) -> list[DeviceMemory]:
    """Apple's GPU, whose memory is the host's."""
    if not torch.backends.mps.is_available():
        return []
    mps = torch.mps
    allocated, reserved = mps.current_allocated_memory(), mps.driver_allocated_memory()
    most = mps.recommended_max_memory()
    return [DeviceMemory("mps:0", "Apple GPU", False, most, None, allocated, reserved)]
