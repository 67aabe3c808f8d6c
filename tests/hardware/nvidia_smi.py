"""Compare a GPU's sample with what `nvidia-smi -q -x` says of it."""

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from hardware.rows import Row, near, same, skipped

MIB = 2**20
# Field → where nvidia-smi has it (newer drivers' place first), its unit in ours, and how far the
# two may be apart: a part of it, or so much. What changes was read at another moment.
FIELDS: dict[str, tuple[tuple[str, ...], float, float, float]] = {
    "memory_total": (("fb_memory_usage/total",), MIB, 0, MIB),
    "memory_used": (("fb_memory_usage/used",), MIB, 0, MIB),
    "memory_reserved": (("fb_memory_usage/reserved",), MIB, 0, MIB),
    "utilization": (("utilization/gpu_util",), 1, 0, 5),
    "memory_utilization": (("utilization/memory_util",), 1, 0, 5),
    "temperature": (("temperature/gpu_temp",), 1, 0, 1),
    "temperature_limit": (("temperature/gpu_temp_slow_threshold",), 1, 0, 0),
    "power": (
        (
            "gpu_power_readings/average_power_draw",
            "gpu_power_readings/power_draw",
            "gpu_power_readings/instant_power_draw",
            "power_readings/power_draw",
        ),
        1, 0.05, 1,
    ),
    "power_limit": (
        ("gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"), 1, 0, 0.5
    ),
    "sm_clock": (("clocks/sm_clock",), 1, 0.02, 0),
    "memory_clock": (("clocks/mem_clock",), 1, 0.02, 0),
    "sm_clock_limit": (("max_clocks/sm_clock",), 1, 0, 0),
    "fan": (("fan_speed",), 1, 0, 2),
    "pcie_generation": (("pci/pci_gpu_link_info/pcie_gen/current_link_gen",), 1, 0, 0),
    "pcie_generation_limit": (("pci/pci_gpu_link_info/pcie_gen/max_link_gen",), 1, 0, 0),
    "pcie_width": (("pci/pci_gpu_link_info/link_widths/current_link_width",), 1, 0, 0),
    "pcie_width_limit": (("pci/pci_gpu_link_info/link_widths/max_link_width",), 1, 0, 0),
}  # fmt: skip
SLOWED = {
    "sw_power_cap": "power cap",
    "hw_slowdown": "hardware slowdown",
    "sync_boost": "sync boost",
    "sw_thermal_slowdown": "software thermal slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
}


def by_uuid(xml: str) -> dict[str, Element]:
    """Each GPU's part of nvidia-smi's answer."""
    return {gpu.findtext("uuid", ""): gpu for gpu in ElementTree.fromstring(xml).findall("gpu")}


def smi_rows(sample: Any, gpu: Element) -> Iterator[Row]:
    """Every field of a sample that nvidia-smi tells too."""
    yield same("name", sample.name, gpu.findtext("product_name"))
    for field, (places, unit, rel, plus) in FIELDS.items():
        told = [text for place in places if (text := gpu.findtext(place)) is not None]
        yield _row(field, getattr(sample, field), told, unit, rel, plus)
    yield _slowed(sample, gpu)
    for field, names in {
        "ecc_corrected": r"(sram|dram)_correctable",
        "ecc_uncorrected": r"(sram|dram)_uncorrectable\w*",
    }.items():
        found = gpu.iterfind("ecc_errors/volatile/*")
        counts = [_number(e.text or "") for e in found if re.fullmatch(names, e.tag)]
        known = [count for count in counts if count is not None]
        yield _row(field, getattr(sample, field), [str(sum(known)) if known else "N/A"], 1, 0, 0)


def process_rows(processes: Any, gpu: Element) -> Iterator[Row]:
    """Who holds memory there, and how much."""
    ours = {process.pid: process.memory for process in processes}
    theirs = {
        int(entry.findtext("pid", "0")): _number(entry.findtext("used_memory", ""))
        for entry in gpu.iterfind("processes/process_info")
    }
    yield same("pids", sorted(ours), sorted(theirs))
    for pid in sorted({*ours} & {*theirs}):
        told = [f"{theirs[pid]}"] if theirs[pid] is not None else ["N/A"]
        yield _row("memory of a process", ours[pid], told, MIB, 0, MIB)


def _row(field: str, ours: Any, told: list[str], unit: float, rel: float, plus: float) -> Row:
    if not told:
        return skipped(field, "this nvidia-smi has no such line")
    numbers = [number for text in told if (number := _number(text)) is not None]
    if ours is None or not numbers:
        return same(field, "N/A" if ours is None else ours, numbers[0] if numbers else "N/A")
    return near(field, ours, numbers[0] * unit, rel=rel, plus=plus)


def _number(text: str) -> float | None:
    """``81559 MiB`` → 81559; None for ``N/A``."""
    found = re.match(r"-?\d+(\.\d+)?", text)
    return float(found[0]) if found else None


def _slowed(sample: Any, gpu: Element) -> Row:
    for old in ("event", "throttle"):
        home = gpu.find(f"clocks_{old}_reasons")
        if home is not None:
            name = f"clocks_{old}_reason_"
            active = {
                why for tag, why in SLOWED.items() if home.findtext(f"{name}{tag}") == "Active"
            }
            return same("throttle", sorted(sample.throttle or ()), sorted(active))
    return skipped("throttle", "this nvidia-smi has no such line")
