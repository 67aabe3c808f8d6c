"""Several machines' snapshots: each host once, and each GPU once."""

from __future__ import annotations

from gpumagic.telemetry import GpuSample, Host, ProcessSample, Snapshot
from gpumagic.telemetry.hosts import other_hosts

OWN = Snapshot(10.0, Host("lab", boot="a"), gpus=(GpuSample("GPU-0"),))


def node(
    *gpus: GpuSample,
    name: str = "node",
    boot: str = "b",
    time: float = 10.0,
    processes: tuple[ProcessSample, ...] = (),
) -> Snapshot:
    return Snapshot(time, Host(name, boot=boot), gpus=gpus, processes=processes)


def test_what_others_say_of_this_host_adds_nothing() -> None:
    assert other_hosts(OWN, [node(GpuSample("GPU-9"), name="lab", boot="a")]) == []


def test_hosts_are_told_apart_by_name_and_boot() -> None:
    told = [node(GpuSample("GPU-1"), boot="b"), node(GpuSample("GPU-2"), boot="c")]
    told.append(node(GpuSample("GPU-3"), name="pod", boot="c"))
    assert other_hosts(OWN, told) == told


def test_what_several_say_of_one_host_is_one_snapshot_and_the_newest_word() -> None:
    first = node(
        GpuSample("GPU-1", ordinal=0, utilization=1.0),
        GpuSample("GPU-2", utilization=1.0),
        time=11.0,
        processes=(ProcessSample("GPU-1", 5, mine=True), ProcessSample("GPU-2", 6)),
    )
    second = node(
        GpuSample("GPU-1", utilization=2.0),
        GpuSample("GPU-2", ordinal=0, utilization=2.0),
        GpuSample("GPU-3", virtual=True),
        time=12.0,
        processes=(ProcessSample("GPU-2", 6, mine=True),),
    )
    (one,) = other_hosts(OWN, [second, first])
    assert one.time == 12.0
    # Of a GPU, the word of one to whom CUDA shows it.
    assert [(gpu.uuid, gpu.ordinal, gpu.utilization) for gpu in one.gpus] == [
        ("GPU-1", 0, 1.0),
        ("GPU-2", 0, 2.0),
        ("GPU-3", None, None),
    ]
    # None of them is this notebook, whoever told of it.
    assert {(one.uuid, one.pid, one.mine) for one in one.processes} == {
        ("GPU-1", 5, False),
        ("GPU-2", 6, False),
    }


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
