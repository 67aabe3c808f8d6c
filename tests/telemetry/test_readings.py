"""What a watched GPU tells, how often it is asked, and what is left when it does not answer."""

from __future__ import annotations

from typing import Any

import pytest

FIELDS = {
    "nvmlDeviceGetUtilizationRates": {"utilization", "memory_utilization"},
    "nvmlDeviceGetTemperature": {"temperature"},
    "nvmlDeviceGetTemperatureThreshold": {"temperature_limit"},
    "nvmlDeviceGetPowerUsage": {"power"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit"},
    "nvmlDeviceGetClockInfo": {"sm_clock", "memory_clock"},
    "nvmlDeviceGetMaxClockInfo": {"sm_clock_limit"},
    "nvmlDeviceGetFanSpeed": {"fan"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_width"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"pcie_generation_limit"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"pcie_width_limit"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected", "ecc_uncorrected"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttle"},
    # A GPU without memory of its own has the host's.
    "nvmlDeviceGetMemoryInfo_v2": {"memory_reserved"},
    "nvmlDeviceGetComputeRunningProcesses_v3": set(),
    "nvmlDeviceGetMigMode": set(),
    "nvmlSystemGetDriverVersion": set(),
}


FAILING = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage")


@pytest.mark.parametrize(
    ("name", "code"), [*((name, 3) for name in FIELDS), *((name, 999) for name in FAILING)]
)
def test_one_thing_that_is_not_answered_leaves_the_others(
    stand_in: Any, name: str, code: int
) -> None:
    program = """
snapshot = look(21)
(gpu,) = snapshot.gpus
print(json.dumps([asdict(gpu), [p.pid for p in snapshot.processes], told(snapshot)[1]]))
"""
    machine = {"gpus": 1, "gpu.0.compute": "77:5", f"fail.{name}": code}
    gpu, pids, problems = stand_in.watch(program, machine)
    never = {"ordinal", "mig", "xid", "xid_time", "virtual_ordinal"}
    assert {field for field, value in gpu.items() if value is None} - never == FIELDS[name]
    assert pids == ([] if "RunningProcesses" in name else [77])
    assert problems == []
    if code == 3 and name.startswith("nvmlDeviceGet"):
        # Once for each of its arguments, or each time that the handles are made anew.
        assert stand_in.calls(name) <= 3


# Each is a figure that stands still on the stand-in.
STILL = [
    "memory_total",
    "memory_used",
    "memory_reserved",
    "utilization",
    "memory_utilization",
    "temperature",
    "temperature_limit",
    "power",
    "power_limit",
    "sm_clock",
    "memory_clock",
    "sm_clock_limit",
    "throttle",
    "fan",
    "pcie_generation",
    "pcie_width",
    "pcie_generation_limit",
    "pcie_width_limit",
    "ecc_corrected",
    "ecc_uncorrected",
    "unified",
    "name",
    "index",
]


@pytest.mark.parametrize("code", [6, 999])
def test_no_failed_question_makes_a_figure_wrong(stand_in: Any, code: int) -> None:
    names = [name for name in FIELDS if name.startswith("nvmlDevice")]
    program = f"""
healthy = asdict(look(6).gpus[0])
wrong = []
for name in {names!r}:
    machine(**{{f"fail__{{name}}": {code}}})
    for gpu in look(21).gpus:
        told = asdict(gpu)
        wrong += [(name, f) for f in {STILL!r} if told[f] not in (None, healthy[f])]
    machine(**{{f"fail__{{name}}": 0}})
    look(70)
print(json.dumps(wrong))
"""
    assert stand_in.watch(program, {"gpus": 1}) == []


def test_each_thing_is_asked_as_often_as_its_kind_needs(stand_in: Any) -> None:
    program = """
look(31)
with sampler.subscribe():
    subscription.close()
    look(30)
look(1000)
print("null")
"""
    stand_in.watch(program, {"gpus": 1, "gpu.0.compute": "77:5"})
    calls = stand_in.calls
    assert calls("nvmlDeviceGetUtilizationRates") == 61
    assert 30 <= calls("nvmlDeviceGetTemperature") <= 32
    # Each time twice: how many there are, and which.
    assert 20 <= calls("nvmlDeviceGetComputeRunningProcesses_v3") <= 24
    assert 30 <= calls("nvmlDeviceGetEnforcedPowerLimit") <= 32
    assert calls("nvmlDeviceGetPcieThroughput") == 0


def test_a_slow_pace_reads_what_it_tells(stand_in: Any) -> None:
    program = """
subscription.close()
subscription = sampler.subscribe(period_s=60, processes=True)
look()
machine(gpu__0__temp=77, gpu__0__compute="5:5,6:6")
now[0] = 60
snapshot = look()
print(json.dumps([snapshot.gpus[0].temperature, len(snapshot.processes)]))
"""
    assert stand_in.watch(program, {"gpus": 1}) == [77, 2]


def test_a_single_look_asks_once_and_watches_for_nothing(stand_in: Any) -> None:
    program = """
from gpumagic import snapshot
snapshot()
print("null")
"""
    stand_in.watch(program, {"gpus": 1})
    assert stand_in.calls("nvmlEventSetCreate") == 0
    assert stand_in.calls("nvmlDeviceGetUtilizationRates") == 1
