"""Write a snapshot in Prometheus's text format: base units, no sample for what is not known."""

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gpumagic.telemetry.snapshot import GpuSample, Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("uuid", "name", "index")


# Name, help, field of a GPU's sample, and the factor to base units.
_GAUGES = (
    ("memory_total_bytes", "Memory of the GPU.", "memory_total", 1),
    ("memory_used_bytes", "Memory in use, without what is reserved.", "memory_used", 1),
    ("memory_reserved_bytes", "Memory that the driver keeps.", "memory_reserved", 1),
    ("utilization_ratio", "Part of the time in which a kernel ran.", "utilization", 0.01),
    ("memory_utilization_ratio", "Part of the time of memory access.", "memory_utilization", 0.01),
    ("temperature_celsius", "Temperature.", "temperature", 1),
    ("power_watts", "Power drawn.", "power", 1),
    ("power_limit_watts", "Power limit in force.", "power_limit", 1),
    ("sm_clock_hertz", "Clock of the multiprocessors.", "sm_clock", 1e6),
    ("memory_clock_hertz", "Clock of the memory.", "memory_clock", 1e6),
    ("fan_ratio", "Fan speed.", "fan", 0.01),
    ("pcie_received_bytes_per_second", "Received over PCIe.", "pcie_received", 1),
    ("pcie_sent_bytes_per_second", "Sent over PCIe.", "pcie_sent", 1),
    ("nvlink_received_bytes_per_second", "Received over NVLink.", "nvlink_received", 1),
    ("nvlink_sent_bytes_per_second", "Sent over NVLink.", "nvlink_sent", 1),
    ("sm_activity_ratio", "Part of the multiprocessors at work.", "sm_activity", 0.01),
    ("sm_occupancy_ratio", "Part of the warps in use.", "sm_occupancy", 0.01),
    ("tensor_activity_ratio", "Part of the tensor cores at work.", "tensor_activity", 0.01),
    ("dram_activity_ratio", "Part of the memory bandwidth in use.", "dram_activity", 0.01),
    ("lost", "1 where the GPU has fallen off the bus.", "lost", 1),
    ("age_seconds", "How old the readings are.", "age", 1),
)
_COUNTERS = (
    ("energy_joules", "Energy used since the driver was loaded.", "energy", 1),
    ("ecc_corrected_errors", "Memory errors that were corrected.", "ecc_corrected", 1),
    ("ecc_uncorrected_errors", "Memory errors that were not.", "ecc_uncorrected", 1),
)


def text(snapshot: Snapshot) -> bytes:
    """The snapshot in the text format, of type ``CONTENT_TYPE``."""
    registry: Any = SimpleNamespace(collect=lambda: _families(snapshot))
    return generate_latest(registry)


def _families(snapshot: Snapshot) -> Iterator[Metric]:
    """A family for each reading that some GPU has."""
    for make, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, about, field, factor in table:
            family = make(f"gpumagic_gpu_{name}", about, labels=_LABELS)
            for gpu in snapshot.gpus:
                value = getattr(gpu, field)
                if value is not None:
                    # Rounded, so that 57 % is 0.57.
                    family.add_metric(_labels(gpu), round(value * factor, 9))
            yield family
    yield _notebooks(snapshot)
    problems = GaugeMetricFamily(
        "gpumagic_problem", "1 for each thing that is wrong.", labels=("code", "uuid")
    )
    for code, uuid in sorted({(p.code, p.uuid or "") for p in snapshot.problems}):
        problems.add_metric((code, uuid), 1)
    yield problems


def _notebooks(snapshot: Snapshot) -> Metric:
    """By notebook and not by process: pids would make a new series each time."""
    held: dict[tuple[str, str], int] = defaultdict(int)
    for process in snapshot.processes:
        if process.memory is not None:
            held[process.uuid, process.notebook or ""] += process.memory
    family = GaugeMetricFamily(
        "gpumagic_notebook_memory_bytes",
        "GPU memory held by the processes of a notebook; without a name: by all others.",
        labels=("uuid", "notebook"),
    )
    for labels, memory in sorted(held.items()):
        family.add_metric(labels, memory)
    return family


def _labels(gpu: GpuSample) -> tuple[str, str, str]:
    return gpu.uuid, gpu.name or "", "" if gpu.index is None else str(gpu.index)
