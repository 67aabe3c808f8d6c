"""Several machines' snapshots: each host once, and each GPU once."""

from __future__ import annotations

from gpumagic.telemetry import GpuSample, Host, ProcessSample, Snapshot
from gpumagic.telemetry.snapshot import other_hosts

OWN = Snapshot(10.0, Host("lab", boot="a"), gpus=(GpuSample("GPU-0"),))


def node(
    *gpus: GpuSample,
    name: str = "node",
    boot: str = "b",
    processes: tuple[ProcessSample, ...] = (),
) -> Snapshot:
    return Snapshot(10.0, Host(name, boot=boot), gpus=gpus, processes=processes)


def test_what_others_say_of_this_host_adds_nothing() -> None:
    assert other_hosts(OWN, [node(GpuSample("GPU-9"), name="lab", boot="a")]) == []


def test_hosts_are_told_apart_by_name_and_boot() -> None:
    told = [node(GpuSample("GPU-1"), boot="b"), node(GpuSample("GPU-2"), boot="c")]
    told.append(node(GpuSample("GPU-3"), name="pod", boot="c"))
    assert other_hosts(OWN, told) == told


def test_what_another_says_of_the_same_gpus_adds_nothing_and_no_process_is_this_notebook() -> None:
    process = ProcessSample("GPU-1", 5, mine=True)
    (one,) = other_hosts(
        OWN, [node(GpuSample("GPU-1"), processes=(process,)), node(GpuSample("GPU-1"))]
    )
    assert [(each.pid, each.mine) for each in one.processes] == [(5, False)]


def test_a_gpu_that_is_seen_here_stands_here() -> None:
    process = ProcessSample("GPU-0", 5)
    pod = node(GpuSample("GPU-0"), name="pod", boot="a", processes=(process,))
    assert other_hosts(OWN, [pod]) == []
    both = node(GpuSample("GPU-0"), GpuSample("GPU-1"), name="pod", processes=(process,))
    (one,) = other_hosts(OWN, [both])
    assert [gpu.uuid for gpu in one.gpus] == ["GPU-1"]
    assert one.processes == ()


def test_a_host_without_a_gpu_is_a_host() -> None:
    assert other_hosts(OWN, [node()]) == [node()]
