"""A snapshot in Prometheus's text format: base units, and no sample for what is not known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gpumagic.telemetry.snapshot import GpuSample, Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("uuid", "name", "index")


def _ratio(field: str) -> Callable[[GpuSample], float | None]:
    def read(gpu: GpuSample) -> float | None:
        percent = getattr(gpu, field)
        return None if percent is None else percent / 100

    return read


def _times(field: str, factor: float = 1.0) -> Callable[[GpuSample], float | None]:
    def read(gpu: GpuSample) -> float | None:
        value = getattr(gpu, field)
        return None if value is None else value * factor

    return read


_GAUGES: tuple[tuple[str, str, Callable[[GpuSample], float | None]], ...] = (
    ("memory_total_bytes", "Memory of the GPU.", _times("memory_total")),
    ("memory_used_bytes", "Memory in use, without what is reserved.", _times("memory_used")),
    ("memory_reserved_bytes", "Memory that the driver keeps.", _times("memory_reserved")),
    ("utilization_ratio", "Part of the time in which a kernel ran.", _ratio("utilization")),
    (
        "memory_utilization_ratio",
        "Part of the time in which memory was read or written.",
        _ratio("memory_utilization"),
    ),
    ("temperature_celsius", "Temperature.", _times("temperature")),
    ("power_watts", "Power drawn.", _times("power")),
    ("power_limit_watts", "Power limit in force.", _times("power_limit")),
    ("sm_clock_hertz", "Clock of the multiprocessors.", _times("sm_clock", 1e6)),
    ("memory_clock_hertz", "Clock of the memory.", _times("memory_clock", 1e6)),
    ("fan_ratio", "Fan speed.", _ratio("fan")),
    ("pcie_received_bytes_per_second", "Received over PCIe.", _times("pcie_received")),
    ("pcie_sent_bytes_per_second", "Sent over PCIe.", _times("pcie_sent")),
    ("nvlink_received_bytes_per_second", "Received over NVLink.", _times("nvlink_received")),
    ("nvlink_sent_bytes_per_second", "Sent over NVLink.", _times("nvlink_sent")),
    ("sm_activity_ratio", "Part of the multiprocessors at work.", _ratio("sm_activity")),
    ("sm_occupancy_ratio", "Part of the warps in use.", _ratio("sm_occupancy")),
    ("tensor_activity_ratio", "Part of the tensor cores at work.", _ratio("tensor_activity")),
    ("dram_activity_ratio", "Part of the memory bandwidth in use.", _ratio("dram_activity")),
    ("lost", "1 where the GPU has fallen off the bus.", lambda gpu: float(gpu.lost)),
    ("age_seconds", "How old the readings are.", lambda gpu: gpu.age),
)
_COUNTERS = (
    ("energy_joules", "Energy used since the driver was loaded.", "energy"),
    ("ecc_corrected_errors", "Memory errors that were corrected.", "ecc_corrected"),
    ("ecc_uncorrected_errors", "Memory errors that were not.", "ecc_uncorrected"),
)


class _Families:
    """What a registry collects from."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """A family for each reading that some GPU has."""
        gpus = self._snapshot.gpus
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"gpumagic_gpu_{name}", text, labels=_LABELS)
            for gpu in gpus:
                value = read(gpu)
                if value is not None:
                    gauge.add_metric(_labels(gpu), value)
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(f"gpumagic_gpu_{name}", text, labels=_LABELS)
            for gpu in gpus:
                value = getattr(gpu, field)
                if value is not None:
                    counter.add_metric(_labels(gpu), value)
            yield counter
        yield self._notebooks()
        problems = GaugeMetricFamily(
            "gpumagic_problem", "1 for each thing that is wrong.", labels=("code", "uuid")
        )
        for code, uuid in sorted({(p.code, p.uuid or "") for p in self._snapshot.problems}):
            problems.add_metric((code, uuid), 1)
        yield problems

    def _notebooks(self) -> Metric:
        """By notebook and not by process: pids would make a new series each time."""
        held: dict[tuple[str, str], int] = defaultdict(int)
        for process in self._snapshot.processes:
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


def text(snapshot: Snapshot) -> bytes:
    """The snapshot, in the text format.

    Parameters
    ----------
    snapshot : Snapshot

    Returns
    -------
    bytes
        Of type ``CONTENT_TYPE``.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(snapshot))
    return generate_latest(registry)


def _labels(gpu: GpuSample) -> tuple[str, str, str]:
    return gpu.uuid, gpu.name or "", "" if gpu.index is None else str(gpu.index)
