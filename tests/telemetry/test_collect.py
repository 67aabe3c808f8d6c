"""One snapshot from all sources, with sources that a test makes up."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gpumagic.device import Device
from gpumagic.telemetry import GpuSample, Host, Problem, ProcessSample, collect, source
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.host import read_host
from gpumagic.telemetry.processes import Owners
from gpumagic.telemetry.state_files import VirtualSource, VirtualState

MISSING = Problem("library-missing", "no driver", "install it")
MISMATCH = Problem("version-mismatch", "driver updated", "restart")
REAL = GpuSample("GPU-r", "H100", 0)
VIRTUAL = GpuSample(
    "GPU-v",
    "Virtual GPU",
    virtual=True,
    memory_total=16,
    memory_used=5,
    utilization=25.0,
    virtual_ordinal=0,
)
STATE = VirtualState(4242, VIRTUAL)


def collector(
    gpus: tuple[GpuSample, ...] = (),
    problems: tuple[Problem, ...] = (),
    states: tuple[VirtualState, ...] = (),
    here: tuple[Device, ...] = (),
    processes: tuple[ProcessSample, ...] = (),
    usable: bool = True,
) -> Collector:
    nvml: Any = SimpleNamespace(
        name="nvml",
        gpus=lambda host, max_age: list(gpus),
        processes=lambda max_age: list(processes),
        problems=lambda: list(problems),
        software=lambda: {"driver": "580", "cuda": "13.0"},
    )
    owners: Any = SimpleNamespace(
        look_up=lambda pids: {
            pid: ProcessSample("", pid, None, "python3", "ada", "a.ipynb", 9.0) for pid in pids
        },
        ordinals={},
    )
    return Collector(
        [nvml, VirtualSource(lambda: states)],
        owners,
        lambda: here,
        host=lambda: Host("box"),
        usable=usable,
    )


def test_no_gpu_is_one_problem_that_offers_virtual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "time", SimpleNamespace(time=lambda: 17.0))
    snapshot = collector(problems=(MISSING,)).take()
    assert snapshot.gpus == ()
    assert snapshot.source == "none"
    assert snapshot.time == 17.0
    (problem,) = snapshot.problems
    assert problem.cause == "no driver"
    assert "%gpus --virtual 2 makes virtual ones" in problem.cure
    assert "%gpus --doctor" in problem.cure


def test_a_driver_without_gpus_is_a_problem_too() -> None:
    (problem,) = collector().take().problems
    assert problem.code == "no-gpu"
    assert "%gpus --virtual 2" in problem.cure


def test_with_virtual_gpus_a_missing_driver_is_none_but_a_broken_one_is() -> None:
    assert collector(problems=(MISSING,), states=(STATE,)).take().problems == ()
    assert collector(problems=(MISMATCH,), states=(STATE,)).take().problems == (MISMATCH,)


def test_a_virtual_gpu_is_held_by_its_process() -> None:
    here = (Device("cuda", 0, "GPU-v", virtual=True),)
    snapshot = collector(states=(STATE,), here=here).take()
    assert snapshot.source == "virtual"
    assert snapshot.driver is None
    assert snapshot.gpus == (replace(VIRTUAL, ordinal=0),)
    (process,) = snapshot.processes
    assert (process.uuid, process.pid, process.memory) == ("GPU-v", 4242, 5)
    assert (process.user, process.notebook, process.mine) == ("ada", "a.ipynb", False)


def test_another_processes_virtual_gpu_has_no_ordinal_here() -> None:
    snapshot = collector(gpus=(REAL,), states=(STATE,), here=(Device("cuda", 0, "GPU-r"),)).take()
    assert [(gpu.uuid, gpu.ordinal) for gpu in snapshot.gpus] == [("GPU-r", 0), ("GPU-v", None)]
    assert snapshot.source == "nvml+virtual"
    assert snapshot.problems == ()


def test_own_process_is_mine() -> None:
    own = ProcessSample("GPU-r", os.getpid(), 3)
    snapshot = collector((REAL,), processes=(own,), here=(Device("cuda", 0, "GPU-r"),)).take()
    assert [process.mine for process in snapshot.processes] == [True]


def test_hidden_gpus_send_to_the_doctor() -> None:
    (problem,) = collector((REAL,)).take().problems
    assert problem.code == "none-visible"
    assert "run %gpus --doctor" in problem.cure


def test_an_uncertain_ordinal_is_marked() -> None:
    here = (Device("cuda", 0, "GPU-r", ordinal_certain=False),)
    (gpu,) = collector((REAL,), here=here).take().gpus
    assert (gpu.ordinal, gpu.ordinal_certain) == (0, False)


def test_a_lost_gpu_and_the_others_keep_their_names() -> None:
    gpus = [replace(REAL, uuid=uuid, index=n) for n, uuid in enumerate("abc")]
    here = [Device("cuda", n, uuid) for n, uuid in enumerate("abc")]
    made = collector()
    made._sources[0].gpus = lambda host, max_age: gpus  # type: ignore[attr-defined]
    made._here = lambda: here
    named = [("a", 0), ("b", 1), ("c", 2)]
    assert [(gpu.uuid, gpu.ordinal) for gpu in made.take().gpus] == named
    gpus[1] = replace(gpus[1], lost=True)
    here[1:] = [Device("cuda", 1, "c")]
    for _ in range(2):
        assert [(gpu.uuid, gpu.ordinal) for gpu in made.take().gpus] == named
    # The machine was restarted without it.
    del gpus[1]
    assert [(gpu.uuid, gpu.ordinal) for gpu in made.take().gpus] == [("a", 0), ("c", 1)]


def test_processes_are_asked_for_only_if_wanted() -> None:
    class Never(tuple[ProcessSample, ...]):
        def __iter__(self) -> Any:
            pytest.fail("asked for processes")

    made = collector((REAL,), states=(STATE,), processes=Never())
    assert made.take(processes=False).processes == ()


def test_this_machine_as_it_is() -> None:
    snapshot = collect.snapshot()
    assert snapshot.host.memory_total
    assert snapshot.host.cpu_count
    assert snapshot.gpus or snapshot.problems


def test_the_first_share_of_cpu_time_is_not_known_and_never_a_made_up_zero() -> None:
    found: list[Host] = []
    thread = threading.Thread(target=lambda: found.extend((read_host(), read_host())))
    thread.start()
    thread.join()
    first, second = found
    assert first.cpu_utilization is None
    assert second.cpu_utilization is not None
    assert first.memory_total == psutil.virtual_memory().total


def test_a_host_has_the_name_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    own = read_host()
    monkeypatch.setenv("GPUMAGIC_HOST", "node-7")
    assert read_host().name == "node-7" != own.name
    assert read_host().boot == own.boot


def test_own_process_is_known_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owners().look_up({os.getpid()})[os.getpid()]
    assert owner.user == psutil.Process().username()
    assert owner.name == psutil.Process().name()
    assert owner.started == psutil.Process().create_time()


def test_a_process_that_is_gone_or_cannot_be_has_no_owner() -> None:
    gone = {pid: ProcessSample("", pid) for pid in (999999999, 2**70)}
    assert Owners().look_up({*gone}) == gone


def test_of_another_user_only_the_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "secret.ipynb")
    monkeypatch.setattr(os, "getuid", lambda: -7)
    owner = Owners().look_up({os.getpid()})[os.getpid()]
    assert owner == ProcessSample("", os.getpid(), user=psutil.Process().username())


def test_a_known_process_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = Owners()
    first = owners.look_up({os.getpid()})
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: pytest.fail("asked again"))
    assert owners.look_up({os.getpid()}) == first


def test_owners_are_looked_up_as_often_as_they_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: now[0]))
    looked: list[tuple[float, set[int]]] = []

    def look_up(pids: set[int]) -> dict[int, ProcessSample]:
        looked.append((now[0], pids))
        return {pid: ProcessSample("", pid, user="ada") for pid in pids}

    held = [ProcessSample("GPU-r", 7)]
    nvml: Any = SimpleNamespace(
        name="nvml",
        gpus=lambda host, max_age: [REAL],
        processes=lambda max_age: list(held),
        problems=list,
        software=dict,
    )
    owners: Any = SimpleNamespace(look_up=look_up, ordinals={})
    made = Collector([nvml], owners, list)

    def tick() -> None:
        (*_, last) = made.take(max_age=0.9).processes
        assert last.user == "ada"

    for _ in range(7):
        tick()
        now[0] += 1.0
    assert [at for at, _ in looked] == [0, 3, 6]
    held.append(ProcessSample("GPU-r", 8))
    tick()
    assert looked[-1] == (7, {7, 8}), "who is new is looked up at once"
    made.take()
    made.take()
    assert len(looked) == 6, "a single look is always a new one"


def test_a_server_numbers_gpus_as_its_kernels_do_but_needs_none_itself() -> None:
    made = collector(gpus=(REAL,), here=(Device("cuda", 0, REAL.uuid),))
    assert made.take().gpus[0].ordinal == 0
    nobody = collector(gpus=(REAL,))
    assert [problem.code for problem in nobody.take().problems] == ["none-visible"]
    assert collector(gpus=(REAL,), usable=False).take().problems == ()


def test_where_nvml_is_missing_those_that_cuda_has_told_of_have_rows() -> None:
    told = Device("cuda", 0, "GPU-c", None, "H100", 16, memory_free=5)
    other = Device("cuda", 1, "GPU-d", None, "H100", 16)
    snapshot = collector(problems=(MISSING,), states=(STATE,), here=(told, other)).take()
    one, two = (gpu for gpu in snapshot.gpus if not gpu.virtual)
    assert (one.uuid, one.name, one.ordinal) == ("GPU-c", "H100", 0)
    assert (one.memory_total, one.memory_used, one.utilization) == (16, 11, None)
    assert two.memory_used is None
    (problem,) = snapshot.problems
    assert "NVML is missing" in problem.cause
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in problem.cure
    uncounted = collector(problems=(MISSING,), here=(Device("cuda", 0),)).take()
    assert [(gpu.uuid, gpu.ordinal, gpu.name) for gpu in uncounted.gpus] == [("CUDA-0", 0, None)]


def test_what_cuda_alone_tells_has_no_row_beside_a_drivers() -> None:
    lost = Device("cuda", 1, "GPU-gone", None, "H100", 16)
    assert [gpu.uuid for gpu in collector((REAL,), here=(lost,)).take().gpus] == ["GPU-r"]
