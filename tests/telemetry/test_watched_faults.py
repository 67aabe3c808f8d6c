"""A machine that is watched while things go wrong: each is told with a cure, and it recovers."""

from __future__ import annotations

import re
from typing import Any

import pytest

GIB = 2**30
FINE = [2 * GIB, 50.0]


@pytest.mark.parametrize(
    ("code", "name"),
    [(9, "driver-not-loaded"), (18, "version-mismatch"), (12, "library-missing"), (4, "no-perm")],
)
def test_a_driver_that_cannot_be_reached_and_then_can(stand_in: Any, code: int, name: str) -> None:
    program = """
first = look(3)
machine(fail__nvmlInitWithFlags=0)
print(json.dumps([told(first), first.problems[0].cure, told(look(70))]))
"""
    machine = {"gpus": 1, "fail.nvmlInitWithFlags": code}
    (gpus, (found,)), cure, after = stand_in.watch(program, machine)
    assert gpus == []
    assert found.startswith(name)
    assert len(cure) > 20
    assert after == [[[0, False, *FINE]], []]


def test_a_library_that_is_missing(stand_in: Any) -> None:
    program = "snapshot = look(5)\nprint(json.dumps(told(snapshot)))\n"
    assert stand_in.watch(program, {}, LD_LIBRARY_PATH="") == [[], ["library-missing"]]


def test_a_gpu_that_is_lost_while_watched_and_back_again(stand_in: Any) -> None:
    program = """
seen = [told(look(5))]
machine(gpu__1__xid="79:1")
machine(gpu__1__lost=2)
seen += [told(look(1)), told(look(30))]
machine(gpu__1__lost=0)
seen += [told(look(70)), told(look(600))]
print(json.dumps(seen))
"""
    before, at_once, later, back, after = stand_in.watch(program, {"gpus": 3})
    well = [[index, False, *FINE] for index in range(3)]
    lost = [well[0], [1, True, None, None], well[2]]
    assert before == [well, []]
    assert at_once == [lost, ["gpu-lost", "xid"]]
    assert later == [lost, ["gpu-lost", "xid"]]
    assert back == [well, ["xid"]]
    assert after == [well, []]


def test_nothing_of_the_driver_leaks(stand_in: Any) -> None:
    program = """
look(5)
for _ in range(5):
    machine(gpu__1__lost=1)
    look(5)
    machine(gpu__1__lost=0)
    look(70)
machine(**{"fail__*": 999})
look(5)
machine(**{"fail__*": 0})
look(70)
machine(fail__nvmlDeviceGetCount_v2=9)
look(20)
print(json.dumps(told(sampler.latest())))
"""
    assert stand_in.watch(program, {"gpus": 2}) == [[], ["driver-not-loaded"]]
    assert stand_in.calls("nvmlInitWithFlags") == stand_in.calls("nvmlShutdown") > 1
    made, freed = (stand_in.calls(f"nvmlEventSet{what}") for what in ("Create", "Free"))
    assert made == freed > 2


def test_all_fields_failing_is_a_problem_and_goes(stand_in: Any) -> None:
    asked = ("MemoryInfo_v2", "MemoryInfo", "UtilizationRates", "Temperature", "PowerUsage")
    changes = {f"fail__nvmlDeviceGet{name}": 999 for name in asked}
    program = f"""
look(3)
machine(**{changes!r})
failing = look(3)
machine(**{dict.fromkeys(changes, 0)!r})
print(json.dumps([told(failing), failing.problems[0].cause, told(look(20))]))
"""
    failing, cause, after = stand_in.watch(program, {"gpus": 1})
    assert failing == [[[0, False, None, None]], ["gpu-silent"]]
    assert cause == "NVIDIA H100 80GB HBM3 (NVML 0) does not answer: Unknown Error"
    assert after == [[[0, False, *FINE]], []]


def test_a_driver_that_fails_wholly_while_watched(stand_in: Any) -> None:
    program = """
look(3)
machine(**{"fail__*": 999})
failing = look(5)
machine(**{"fail__*": 0})
print(json.dumps([told(failing), told(look(70))]))
"""
    failing, after = stand_in.watch(program, {"gpus": 1})
    assert failing == [[], ["unknown-error"]]
    assert after == [[[0, False, *FINE]], []]


def test_mig_on_and_off_while_watched(stand_in: Any) -> None:
    program = """
def gpus():
    return [(gpu.uuid[:4], gpu.utilization, gpu.power, bool(gpu.mig)) for gpu in look(15).gpus]
seen = [gpus()]
machine(gpu__0__mig=2)
seen.append(gpus())
machine(gpu__0__mig=0)
print(json.dumps([*seen, gpus()]))
"""
    before, during, after = stand_in.watch(program, {"gpus": 1})
    assert before == after == [["GPU-", 50.0, 70.5, False]]
    assert during == [
        ["GPU-", None, 70.5, False],
        ["MIG-", None, None, True],
        ["MIG-", None, None, True],
    ]


def test_gpus_that_come_and_go(stand_in: Any) -> None:
    program = """
seen = [len(look(2).gpus)]
for count in (3, 1, 64, 0):
    machine(gpus=count)
    snapshot = look(15)
    seen.append(len(snapshot.gpus))
print(json.dumps([seen, told(snapshot)[1]]))
"""
    assert stand_in.watch(program, {"gpus": 2}) == [[2, 3, 1, 64, 0], ["no-gpu"]]


def test_pids_that_vanish(stand_in: Any) -> None:
    program = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
machine(gpu__0__compute=f"{child.pid}:5,999999999:7")
def processes():
    return sorted((p.pid == child.pid, p.memory, p.user is not None) for p in look(5).processes)
seen = [processes()]
child.communicate()
seen.append(processes())
machine(gpu__0__compute="")
print(json.dumps([*seen, processes()]))
"""
    there, gone, empty = stand_in.watch(program, {"gpus": 1})
    assert there == [[False, 7, False], [True, 5, True]]
    assert gone == [[False, 7, False], [True, 5, False]]
    assert empty == []


def test_an_xid_is_told_with_what_it_means(stand_in: Any) -> None:
    program = """
seen = [look(2)]
machine(gpu__0__xid="31:1")
seen.append(look(1))
machine(gpu__0__xid="94:2")
seen += [look(5), look(590), look(15)]
print(json.dumps([
    [seen.gpus[0].xid, seen.gpus[0].xid_time, [p.cause for p in seen.problems]] for seen in seen
]))
"""
    before, first, second, later, after = stand_in.watch(program, {"gpus": 1})
    assert before == [None, None, []]
    assert first[:2] == [31, 1e9 + 2]
    assert [re.findall(r"Xid \d+", cause) for cause in first[2]] == [["Xid 31"]]
    assert second[:2] == [94, 1e9 + 3]
    assert len(second[2]) == 2
    assert len(later[2]) == 2
    assert after[:2] == second[:2]
    assert after[2] == []


def test_a_stall_of_20_seconds(stand_in: Any) -> None:
    program = """
import queue, time
now = time.monotonic
for module in timed:
    module.time = time
heard = queue.Queue()
live = Sampler(Collector(), stalled_s=0.1)
live.subscribe(heard.put, period_s=0.25)
def until(codes):
    while True:
        snapshot = heard.get(timeout=30)
        if [problem.code for problem in snapshot.problems] == codes:
            return snapshot
begun = now()
assert until([]).gpus[0].age == 0
machine(stall__nvmlDeviceGetUtilizationRates=20)
stalled = until(["stalled"])
assert stalled.gpus[0].memory_used and stalled.gpus[0].age > 0
machine(stall__nvmlDeviceGetUtilizationRates=0)
assert until([]).gpus[0].age == 0
live.close()
print(json.dumps([stalled.problems[0].cure, now() - begun]))
"""
    cure, seconds = stand_in.watch(program, {"gpus": 2}, CUDA_VISIBLE_DEVICES="0,1")
    assert "dmesg" in cure
    assert seconds < 19
