"""Sample the GPUs that an all-smi endpoint tells of, by its metrics in Prometheus' format.

``all-smi api --port 9090`` (https://github.com/lablup/all-smi, API.md) knows GPUs and accelerators
for which there is nothing here. Its processes are left out: their pids may be another machine's.
"""

import re
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.request import urlopen

from gpumagic.telemetry.drm_source import KeptReadings
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample

# As often as it looks itself, if nobody told it otherwise.
_EVERY_S, _PATIENCE_S, _LONGEST = 3.0, 2.0, 16 * 2**20
_LINE = re.compile(r"all_smi_gpu_(\w+)\{(.*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_FIELDS: dict[str, tuple[str, type]] = {
    "utilization": ("utilization", float),
    "memory_used_bytes": ("memory_used", int),
    "memory_total_bytes": ("memory_total", int),
    "temperature_celsius": ("temperature", float),
    "temperature_threshold_slowdown_celsius": ("temperature_limit", float),
    "power_consumption_watts": ("power", float),
    "power_limit_current_watts": ("power_limit", float),
    "frequency_mhz": ("sm_clock", int),
    "clock_graphics_max_mhz": ("sm_clock_limit", int),
    "clock_memory_max_mhz": ("memory_clock_limit", int),
    "pcie_gen_current": ("pcie_generation", int),
    "pcie_width_current": ("pcie_width", int),
}
_VENDORS = {"nvidia": "nvidia", "amd": "amd", "radeon": "amd", "intel": "intel", "apple": "apple"}


def fetch(address: str) -> str:
    """The text of a page; OSError or HTTPException where it cannot be had."""
    with urlopen(address, timeout=_PATIENCE_S) as page:
        content: bytes = page.read(_LONGEST)
    return content.decode(errors="replace")


class AllSmiSource:
    """Samples of all GPUs that one address tells of."""

    name = "all-smi"

    def __init__(
        self,
        address: str,
        read: Callable[[str], str] = fetch,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._read = read
        self._kept = KeptReadings(monotonic)
        self._fault = ""

    def software(self) -> dict[str, str]:
        """Nothing: it may be another machine's."""
        return {}

    def gpus(self, host: Host, patience: float = 0.0) -> list[GpuSample]:
        """All GPUs; `patience`: how many times its interval a reading may be old."""
        return self._kept.get("page", _EVERY_S, patience, self._samples)

    def processes(self, patience: float = 0.0) -> list[ProcessSample]:
        """None that could be looked up here."""
        return []

    def problems(self) -> list[Problem]:
        """An address that does not answer, or with something else."""
        if not self._fault:
            return []
        cure = "start it (all-smi api --port 9090), or take it out of GPUMAGIC_SOURCES"
        return [Problem("source-silent", f"{self._address} {self._fault}", cure)]

    def chore(self, *, processes: bool, seconds: float) -> None:
        """Read ahead what is due, for at most so long."""
        self._kept.read_ahead(seconds, lambda key: True)

    def _samples(self) -> list[GpuSample]:
        self._fault = ""
        try:
            text = self._read(self._address)
        except (OSError, ValueError, HTTPException) as error:
            self._fault = f"does not answer ({error or type(error).__name__})"
            return []
        found = samples(text)
        if not found:
            self._fault = "tells of no GPU"
        return found


def samples(text: str) -> list[GpuSample]:
    """The GPUs of a page, in its order."""
    told: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        labels = dict(_LABEL.findall(match[2])) if match else {}
        uuid = labels.get("gpu_uuid") or labels.get("uuid")
        if match is None or not uuid:
            continue
        model = labels.get("gpu") or None
        index = labels.get("gpu_index") or labels.get("index") or ""
        gpu = told.setdefault(uuid, {"uuid": uuid, "name": model, "vendor": _vendor(model)})
        gpu["index"] = int(index) if index.isascii() and index.isdigit() else None
        field, kind = _FIELDS.get(match[1], ("", float))
        try:
            value = float(match[3])
            # Infinite and NaN are no readings.
            if field and abs(value) < 2**63:
                gpu[field] = kind(value)
        except ValueError:
            continue
    return [GpuSample(**gpu) for gpu in told.values()]


def _vendor(model: str | None) -> str | None:
    words = (model or "").lower().split()
    return next((_VENDORS[word] for word in words if word in _VENDORS), None)
