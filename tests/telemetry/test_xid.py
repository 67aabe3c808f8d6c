"""Xid errors in words, for ten minutes."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("number", [13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119, 777])
def test_every_number_has_a_cause_and_a_cure(stand_in: Any, number: int) -> None:
    program = f"""
look(2)
machine(gpu__3__xid="{number}:1")
snapshot = look(1)
print(json.dumps([asdict(snapshot.gpus[3]), [asdict(problem) for problem in snapshot.problems]]))
"""
    gpu, (problem,) = stand_in.watch(program, {"gpus": 4, "gpu.3.name": "H100"})
    assert (gpu["xid"], gpu["xid_time"]) == (number, 1e9 + 2)
    assert (problem["code"], problem["uuid"]) == ("xid", gpu["uuid"])
    assert problem["cause"].startswith(f"H100 (NVML 3) reported Xid {number}: ")
    assert problem["cure"]
    assert "{" not in problem["cure"]


def test_a_problem_for_ten_minutes_and_once_per_number(stand_in: Any) -> None:
    program = """
def count():
    return [problem.code for problem in sampler.latest().problems].count("xid")
look(2)
for xid in ("13:1", "31:2"):
    machine(gpu__0__xid=xid)
    look(1)
now[0] = 303
machine(gpu__0__xid="13:3")
look(1)
seen = [count()]
for now[0] in (610, 905):
    look(1)
    seen.append(count())
gpu, other = sampler.latest().gpus
print(json.dumps([*seen, gpu.xid, gpu.xid_time, other.xid]))
"""
    assert stand_in.watch(program, {"gpus": 2}) == [2, 1, 0, 13, 1e9 + 303, None]


def test_a_lost_gpu_keeps_its_last_xid_and_others_are_watched_on(stand_in: Any) -> None:
    program = """
look(2)
machine(gpu__1__xid="79:1")
machine(gpu__1__lost=2)
look(20)
machine(gpu__0__xid="31:1")
print(json.dumps([(gpu.lost, gpu.xid) for gpu in look(1).gpus]))
"""
    assert stand_in.watch(program, {"gpus": 2}) == [[False, 31], [True, 79]]


def test_gpus_without_such_events_are_not_asked_for_ever(stand_in: Any) -> None:
    program = """
print(json.dumps([look(30).gpus[0].xid, told(sampler.latest())[1]]))
"""
    machine = {"gpus": 1, "fail.nvmlDeviceRegisterEvents": 3, "fail.nvmlEventSetWait_v2": 999}
    assert stand_in.watch(program, machine) == [None, []]
    assert stand_in.calls("nvmlEventSetCreate") == stand_in.calls("nvmlEventSetFree") == 1


def test_the_watch_goes_on_after_an_error_and_the_error_is_kept_once(stand_in: Any) -> None:
    program = """
from gpumagic import faults
look(2)
machine(fail__nvmlEventSetWait_v2=999)
look(3)
machine(fail__nvmlEventSetWait_v2=0)
look(1)
machine(gpu__0__xid="31:1")
print(json.dumps([look(1).gpus[0].xid, [str(fault) for fault in faults.all_kept()]]))
"""
    xid, (kept,) = stand_in.watch(program, {"gpus": 2})
    assert xid == 31
    assert kept.startswith("gpumagic failed while watching for Xid errors: NVMLError_Unknown: ")
    assert kept.endswith("(3 times)")
