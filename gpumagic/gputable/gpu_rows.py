"""Put a snapshot of GPUs into words: labels, readings, the caption, and notes to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpumagic.display.units import share, size
from gpumagic.gputable.holders import Holder, Split, split
from gpumagic.telemetry.snapshot import GpuSample, Problem, Snapshot

_CERTAIN_CURE = "set CUDA_DEVICE_ORDER=PCI_BUS_ID before the kernel starts to be sure"


@dataclass(frozen=True)
class GpuRow:
    """One GPU in words. ``nvml`` is empty where it says nothing that ``device`` does not."""

    gpu: GpuSample
    device: str
    nvml: str
    name: str
    split: Split


def rows(snapshot: Snapshot, only: Collection[str] | None) -> list[GpuRow]:
    """A row per GPU; of those whose UUID, or whose parent's, is in ``only`` if that is given."""
    cut = {gpu.mig for gpu in snapshot.gpus}
    return [
        _row(gpu, snapshot, gpu.uuid in cut)
        for gpu in snapshot.gpus
        if only is None or gpu.uuid in only or gpu.mig in only
    ]


def _row(gpu: GpuSample, snapshot: Snapshot, is_cut: bool) -> GpuRow:
    differs = gpu.index is not None and gpu.index != gpu.ordinal and gpu.mig is None
    return GpuRow(
        gpu=gpu,
        device="MIG mode" if is_cut else device(gpu),
        nvml=str(gpu.index) if differs else "",
        name=_name(gpu),
        split=split(gpu, snapshot.processes),
    )


def device(gpu: GpuSample) -> str:
    """Where a tensor would have to be: ``"cuda:1"``, or why it cannot be."""
    if gpu.lost:
        return "lost"
    if gpu.ordinal is not None:
        return f"cuda:{gpu.ordinal}" + ("" if gpu.ordinal_certain else "?")
    return "other process" if gpu.virtual else "not visible"


def _name(gpu: GpuSample) -> str:
    name = (gpu.name or "GPU of unknown model").removeprefix("NVIDIA ")
    if gpu.mig is not None:
        # "H100 80GB HBM3 MIG 1g.10gb": its parent's line, just above, says the rest.
        return f"└ MIG {name.rpartition('MIG ')[2]}"
    return name


def held(holder: Holder, gpus: Sequence[GpuSample]) -> list[str]:
    """``["cuda:0 10.2 GiB", "cuda:1 3.1 GiB"]``."""
    parts: dict[str, int | None] = {}
    for gpu in gpus:
        if gpu.uuid in holder.memory:
            count, before = holder.memory[gpu.uuid], parts.get(_short(gpu))
            parts[_short(gpu)] = count if before is None else before + (count or 0)
    return [f"{name} {size(count)}" for name, count in parts.items()]


def _short(gpu: GpuSample) -> str:
    if gpu.ordinal is not None:
        return f"cuda:{gpu.ordinal}" + (" (virtual)" if gpu.virtual else "")
    if gpu.virtual:
        return "its own virtual GPUs"
    return f"NVML {gpu.index}" if gpu.mig is None else _name(gpu).removeprefix("└ ")


def caption(snapshot: Snapshot, shown: Sequence[GpuRow]) -> str:
    """The machine in one line."""
    host = snapshot.host
    whole = [row for row in shown if row.gpu.mig is None]
    virtual = sum(row.gpu.virtual for row in whole)
    busy = "" if host.cpu_utilization is None else f" {host.cpu_utilization:.0f} %"
    parts = [
        host.name,
        f"driver {snapshot.driver}" if snapshot.driver else "",
        _count(len(whole) - virtual, "GPU"),
        _count(virtual, "virtual GPU"),
        f"{_count(host.cpu_count, 'CPU')}{busy}" if host.cpu_count else "",
        f"RAM {share(host.memory_used, host.memory_total)}" if host.memory_total else "",
    ]
    return " · ".join(filter(None, parts))


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count > 1)}" if count else ""


def notes(shown: Sequence[GpuRow]) -> list[str]:
    """What a reader of these rows should be told, a sentence each."""
    found = []
    for row in shown:
        # At full load the power cap is where a GPU should be; that needs no note.
        slow = [reason for reason in row.gpu.throttle or () if reason != "power cap"]
        if slow:
            found.append(f"{_short(row.gpu)} runs slower than it could: {', '.join(slow)}.")
    if any(row.gpu.unified for row in shown):
        found.append("A GPU that shares the host's memory shows the host's.")
    if any(not row.gpu.ordinal_certain for row in shown):
        found.append(f"cuda:N? is a guess, for CUDA may order unlike GPUs so; {_CERTAIN_CURE}.")
    return found


def cause(problem: Problem, *, no_gpu: bool) -> str:
    """A problem's first sentence."""
    return f"No GPU: {problem.cause}." if no_gpu else sentence(problem.cause)


def sentence(text: str) -> str:
    """With a capital, if it does not begin with something to type, and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."
