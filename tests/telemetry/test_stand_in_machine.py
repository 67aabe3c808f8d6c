"""The whole way from the driver's library to a snapshot, with the real pynvml."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

GIB = 2**30
TAKE = """
from gpumagic import snapshot
print(snapshot().to_json())
"""


def taken(stand_in: Any, machine: dict[str, object], **env: str) -> dict[str, Any]:
    return json.loads(stand_in.run(TAKE, machine, **env))


def test_every_reading_arrives_in_its_unit(stand_in: Any) -> None:
    snapshot = taken(
        stand_in,
        {
            "gpus": 1,
            "gpu.0.used": 30 * GIB,
            "gpu.0.reserved": GIB,
            "gpu.0.util": 73,
            "gpu.0.memutil": 21,
            "gpu.0.temp": 61,
            "gpu.0.power": 412_500,
            "gpu.0.clock": 1755,
            "gpu.0.throttle": 0x4 | 0x40 | 0x1,
            "gpu.0.fan": 55,
            "gpu.0.pcie_gen": 4,
            "gpu.0.pcie_width": 8,
            "gpu.0.ecc_corrected": 2,
        },
    )
    assert snapshot["driver"] == "580.159.04"
    assert snapshot["source"] == "nvml"
    assert snapshot["problems"] == []
    (gpu,) = snapshot["gpus"]
    assert gpu == {
        "uuid": "GPU-abc00000-0000-4000-8000-000000000000",
        "name": "NVIDIA H100 80GB HBM3",
        "index": 0,
        "ordinal": 0,
        "ordinal_certain": True,
        "virtual": False,
        "mig": None,
        "unified": False,
        "memory_total": 80 * GIB,
        "memory_used": 30 * GIB,
        "memory_reserved": GIB,
        "utilization": 73.0,
        "memory_utilization": 21.0,
        "temperature": 61,
        "temperature_limit": 87,
        "power": 412.5,
        "power_limit": 700.0,
        "sm_clock": 1755,
        "memory_clock": 2619,
        "throttle": ["power cap", "hardware thermal slowdown"],
        "sm_clock_limit": 1980,
        "fan": 55.0,
        "pcie_generation": 4,
        "pcie_width": 8,
        "pcie_generation_limit": 5,
        "pcie_width_limit": 16,
        "ecc_corrected": 2,
        "ecc_uncorrected": 0,
        "virtual_ordinal": None,
        "xid": None,
        "xid_time": None,
        "lost": False,
        "age": 0.0,
        "vendor": "nvidia",
    }


def test_visible_devices_are_labeled_and_hidden_ones_still_shown(stand_in: Any) -> None:
    snapshot = taken(stand_in, {"gpus": 4}, CUDA_VISIBLE_DEVICES="3,1")
    assert [(gpu["index"], gpu["ordinal"]) for gpu in snapshot["gpus"]] == [
        (0, None),
        (1, 1),
        (2, None),
        (3, 0),
    ]


def test_a_process_in_two_lists_holds_its_memory_once(stand_in: Any) -> None:
    pid = os.getpid()
    snapshot = taken(
        stand_in,
        {
            "gpus": 1,
            "gpu.0.compute": f"{pid}:1000,999999999:5000",
            "gpu.0.graphics": f"{pid}:1000",
            "gpu.0.mps": "4242424:N/A",
        },
    )
    found = {p["pid"]: (p["memory"], p["mine"]) for p in snapshot["processes"]}
    assert found == {
        pid: (1000, False),
        999999999: (5000, False),
        4242424: (None, False),
    }


def test_how_busy_each_process_keeps_a_gpu(stand_in: Any) -> None:
    machine: dict[str, object] = {"gpus": 2, "gpu.*.compute": "71:1,72:1,73:1"}
    machine |= {"gpu.0.busy": "71:37,72:900,73:55:60"}
    found = [p["utilization"] for p in taken(stand_in, machine)["processes"]]
    # One not worth believing, one long ago; and a GPU on which nobody has worked.
    assert found == [37.0, None, 0.0, 0.0, 0.0, 0.0]
    machine["fail.nvmlDeviceGetProcessUtilization"] = 3
    assert {p["utilization"] for p in taken(stand_in, machine)["processes"]} == {None}


def test_own_process_and_its_notebook(stand_in: Any) -> None:
    program = """
machine(gpu__0__compute=f"{os.getpid()}:7")
from gpumagic import snapshot
(process,) = snapshot().processes
print(json.dumps([process.mine, process.notebook, process.memory, process.started is not None]))
"""
    printed = stand_in.run(program, {"gpus": 1}, JPY_SESSION_NAME="work/train.ipynb")
    assert json.loads(printed) == [True, "work/train.ipynb", 7, True]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (9, "driver-not-loaded"),
        (18, "version-mismatch"),
        (4, "no-permission"),
        (999, "unknown-error"),
        (15, "gpu-lost"),
        (17, "nvml-error"),
    ],
)
def test_a_driver_that_cannot_be_asked_is_a_problem_with_a_cure(
    stand_in: Any, code: int, name: str
) -> None:
    snapshot = taken(stand_in, {"fail.nvmlInitWithFlags": code})
    (problem,) = snapshot["problems"]
    assert snapshot["gpus"] == []
    assert problem["code"] == name
    assert problem["cause"]
    assert "%gpus --virtual 2" in problem["cure"]


def test_no_library_at_all(stand_in: Any) -> None:
    (problem,) = taken(stand_in, {}, LD_LIBRARY_PATH="")["problems"]
    assert problem["code"] == "library-missing"


def test_no_gpu_at_all(stand_in: Any) -> None:
    (problem,) = taken(stand_in, {"gpus": 0})["problems"]
    assert problem["code"] == "no-gpu"


def test_hidden_gpus_are_a_problem(stand_in: Any) -> None:
    snapshot = taken(stand_in, {"gpus": 1}, CUDA_VISIBLE_DEVICES="")
    (problem,) = snapshot["problems"]
    assert problem["code"] == "none-visible"


def test_a_lost_gpu_leaves_the_others_and_comes_back(stand_in: Any) -> None:
    program = """
from gpumagic import nvml
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.nvml_source import NvmlSource
now = [0.0]
door = nvml.Nvml(clock=lambda: now[0])
collector = Collector([NvmlSource(lambda: door)], here=list)
def look():
    now[0] += 100
    snapshot = collector.take()
    gpus = [(gpu.index, gpu.lost, gpu.memory_used is None) for gpu in snapshot.gpus]
    return [gpus, [(p.code, p.uuid) for p in snapshot.problems]]
seen = [look()]
machine(gpu__1__lost=1)
seen.append(look())
machine(gpu__1__lost=2)
seen.append(look())
machine(gpu__1__lost=0)
seen.append(look())
print(json.dumps(seen))
"""
    well, lost, gone, back = json.loads(
        stand_in.run(program, {"gpus": 3}, CUDA_VISIBLE_DEVICES="0,1,2")
    )
    uuid = "GPU-abc00001-0000-4000-8000-000000000001"
    all_well = [[n, False, False] for n in range(3)]
    one_lost = [all_well[0], [1, True, True], all_well[2]]
    assert well[0] == all_well
    assert lost[0] == gone[0] == one_lost
    assert ["gpu-lost", uuid] in lost[1]
    assert ["gpu-lost", uuid] in gone[1]
    assert back[0] == all_well
    assert not any(code == "gpu-lost" for code, _ in back[1])


def test_mig_devices_follow_their_gpu_and_the_first_one_is_ours(stand_in: Any) -> None:
    snapshot = taken(stand_in, {"gpus": 2, "mig": 0, "gpu.0.mig": 2})
    seen = [(g["uuid"][:4], g["index"], g["ordinal"], g["utilization"]) for g in snapshot["gpus"]]
    assert seen == [
        ("GPU-", 0, None, None),
        ("MIG-", 0, 0, None),
        ("MIG-", 0, None, None),
        ("GPU-", 1, None, 50.0),
    ]
    assert snapshot["gpus"][1]["mig"] == snapshot["gpus"][0]["uuid"]


def test_what_is_not_supported_is_none_and_asked_once(stand_in: Any) -> None:
    program = """
from gpumagic import snapshot
for _ in range(5):
    (gpu,) = snapshot().gpus
print(json.dumps([gpu.utilization, gpu.power, gpu.temperature]))
"""
    machine = {"gpus": 1, "fail.nvmlDeviceGetUtilizationRates": 3}
    assert json.loads(stand_in.run(program, machine)) == [None, 70.5, 40]
    assert stand_in.calls("nvmlDeviceGetUtilizationRates") == 1
    assert stand_in.calls("nvmlDeviceGetPowerUsage") == 5


def test_the_memory_of_an_older_driver_is_not_known(stand_in: Any) -> None:
    program = """
from gpumagic import snapshot
for _ in range(5):
    (gpu,) = snapshot().gpus
print(json.dumps([gpu.unified, gpu.memory_total, gpu.memory_used, gpu.memory_reserved]))
"""
    machine = {"gpus": 1, "fail.nvmlDeviceGetMemoryInfo_v2": 13}
    assert json.loads(stand_in.run(program, machine)) == [False, None, None, None]
    assert stand_in.calls("nvmlDeviceGetMemoryInfo_v2") == 1
    assert stand_in.calls("nvmlDeviceGetHandleByIndex_v2") == 1


def test_memory_that_is_the_hosts(stand_in: Any) -> None:
    snapshot = taken(
        stand_in,
        {"gpus": 1, "fail.nvmlDeviceGetMemoryInfo_v2": 3},
    )
    (gpu,) = snapshot["gpus"]
    assert gpu["unified"]
    assert gpu["memory_total"] == snapshot["host"]["memory_total"]


def test_a_failed_question_for_memory_is_not_the_hosts_memory(stand_in: Any) -> None:
    (gpu,) = taken(stand_in, {"gpus": 1, "fail.nvmlDeviceGetMemoryInfo_v2": 999})["gpus"]
    assert (gpu["unified"], gpu["memory_total"], gpu["memory_used"]) == (False, None, None)


def test_here_and_resolve_on_the_real_pynvml(stand_in: Any) -> None:
    program = """
from gpumagic.device import resolve_one
free = resolve_one("free")
print(json.dumps([str(free), free.index, free.memory_free]))
"""
    machine = {"gpus": 3, "gpu.0.used": 9 * GIB, "gpu.1.used": 8 * GIB, "gpu.2.used": 9 * GIB}
    printed = stand_in.run(program, machine, CUDA_VISIBLE_DEVICES="2,1")
    assert json.loads(printed) == ["cuda:1", 1, 80 * GIB - 8 * GIB - GIB // 2]


def test_a_child_of_a_fork_asks_anew(stand_in: Any) -> None:
    program = """
from gpumagic import nvml
before = nvml.shared_nvml()
before.gpus()
if os.fork() == 0:
    os._exit(0 if nvml.shared_nvml() is not before and len(nvml.shared_nvml().gpus()) == 2 else 1)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert stand_in.run(program, {"gpus": 2}) == "0\n"


def test_doctor_names_the_gpus(stand_in: Any) -> None:
    program = """
from gpumagic.telemetry.doctor import Doctor
print(json.dumps({check.name: [check.ok, check.found] for check in Doctor().checks()}))
"""
    found = json.loads(stand_in.run(program, {"gpus": 2}, CUDA_VISIBLE_DEVICES="5"))
    assert found["NVML"] == [
        True,
        "driver 580.159.04: NVIDIA H100 80GB HBM3, NVIDIA H100 80GB HBM3",
    ]
    assert found["CUDA_VISIBLE_DEVICES"] == [False, "'5' selects 0 of 2 GPUs"]
