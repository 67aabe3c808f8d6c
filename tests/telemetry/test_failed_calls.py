"""A call of NVML that fails makes its fields unknown, never another figure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parents[2] / "gpumagic"
# NVML calls its newest version of some functions.
VERSIONS = {
    "nvmlDeviceGetCount": ("_v2",),
    "nvmlDeviceGetMemoryInfo": ("_v2",),
    "nvmlDeviceGetComputeRunningProcesses": ("_v3",),
    "nvmlDeviceGetGraphicsRunningProcesses": ("_v3",),
    "nvmlDeviceGetMPSComputeRunningProcesses": ("_v3",),
    "nvmlSystemGetCudaDriverVersion": ("_v2",),
    "nvmlDeviceGetHandleByIndex": ("_v2",),
}
# No answers: they free or start something.
OTHERS = {"nvmlInitWithFlags", "nvmlShutdown", "nvmlEventSetFree"}
CODES = (*range(1, 29), 999)

PROGRAM = """
from gpumagic.telemetry.snapshot import Host
host = Host("h", memory_total=7 * 2**40, memory_used=5 * 2**40)
now = [0.0]

def start():
    door = Nvml(clock=clock)
    return Collector([NvmlSource(lambda: door)], here=list, host=lambda: host)

def look(collector):
    for _ in range(2):
        snapshot = collector.take(max_age=0.9)
        now[0] += 3
    found = {(p.uuid, p.pid): {"memory": p.memory, "busy": p.utilization}
             for p in snapshot.processes}
    return {gpu.uuid: asdict(gpu) for gpu in snapshot.gpus} | found | {0: {"cuda": snapshot.cuda}}

right = look(start())
wrong = []
for name, code in FAILURES:
    watching = start()
    look(watching)
    machine(**{f"fail__{name}": code})
    for seen in (look(watching), look(start())):
        for key, fields in seen.items():
            for field, value in fields.items():
                may = [None, *DOCUMENTED.get((name, code, field), ())]
                # Without the list of MIG devices, their parent has their processes.
                may += [right[key][field]] if key in right else [5000, 40.0]
                if value not in may and not (field == "lost" and value is True):
                    wrong.append([name, code, field, value])
    machine(**{f"fail__{name}": 0})
print(json.dumps(wrong))
"""

# What an answer that is no error means, by NVML's documentation; sizes are those of the stand-in.
MEMORY = "nvmlDeviceGetMemoryInfo_v2"
DOCUMENTED = {
    ("nvmlDeviceGetProcessUtilization", 6, "busy"): [0.0],  # no process ran
    # A GPU without memory of its own shares the host's.
    (MEMORY, 3, "unified"): [True],
    (MEMORY, 3, "memory_total"): [7 * 2**40],
    (MEMORY, 3, "memory_used"): [5 * 2**40],
}


def functions() -> list[str]:
    """Every function of NVML that the sources name."""
    text = "".join(
        path.read_text()
        for room in ("nvml", "telemetry")
        for path in sorted((SOURCES / room).rglob("*.py"))
    )
    found = set(re.findall(r'"(nvml(?:Device|System|Event)\w+)"', text)) - OTHERS
    return [name + version for name in sorted(found) for version in VERSIONS.get(name, ("",))]


def test_the_functions_are_found() -> None:
    assert len(functions()) > 30
    assert "nvmlDeviceGetMemoryInfo_v2" in functions()


def wrong_figures(stand_in: Any, failures: list[tuple[str, int]]) -> Any:
    """What a field has that is neither unknown nor right, for each function that fails and code."""
    machine = {"gpus": 2, "gpu.*.compute": "77:5000", "gpu.*.busy": "77:40", "gpu.1.mig": 1}
    program = f"FAILURES = {failures!r}\nDOCUMENTED = {DOCUMENTED!r}\n{PROGRAM}"
    return stand_in.watch(program, machine)


def test_a_failed_call_is_unknown_and_no_other_figure(stand_in: Any) -> None:
    usual = (3, 6, 15, 999)  # not supported, not found, lost, unknown
    assert wrong_figures(stand_in, [(name, code) for name in functions() for code in usual]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", functions())
def test_each_code_is_unknown_and_no_other_figure(stand_in: Any, name: str) -> None:
    assert wrong_figures(stand_in, [(name, code) for code in CODES]) == []
