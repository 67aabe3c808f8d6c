"""The sums behind the table: who holds how much of which GPU."""

from __future__ import annotations

from typing import Any

from gpumagic.gputable import holders, split
from gpumagic.telemetry.snapshot import GpuSample, ProcessSample

GIB = 2**30


def gpu(memory_used: int | None = 30 * GIB) -> GpuSample:
    return GpuSample(
        "GPU-0",
        ordinal=0,
        memory_total=80 * GIB,
        memory_used=memory_used,
        memory_reserved=GIB,
    )


def process(**facts: Any) -> ProcessSample:
    return ProcessSample(
        "GPU-0", **{"pid": 7, "memory": GIB, "name": "python3", "user": "ada", **facts}
    )


def test_memory_is_split_between_this_kernel_others_and_the_driver() -> None:
    both = (process(memory=10 * GIB, mine=True), process(pid=8, memory=5 * GIB))
    expected = {"mine": 10 * GIB, "books": 0, "others": 5 * GIB, "left": 0, "system": 16 * GIB}
    assert split(gpu(), both) == expected
    book = process(memory=5 * GIB, kernel="k")
    left = process(memory=5 * GIB, kernel=None, orphan=True, notebook="old.ipynb")
    parts = split(gpu(), (book, left))
    assert parts is not None
    assert (parts["books"], parts["left"], parts["others"]) == (5 * GIB, 5 * GIB, 0)
    assert split(gpu(memory_used=None), both) is None
    greedy = split(gpu(), (process(mine=True, memory=99 * GIB),))
    assert greedy is not None
    assert greedy["mine"] == 30 * GIB
    assert (greedy["others"], greedy["system"]) == (0, GIB)


def test_a_notebook_is_as_busy_as_all_its_processes_on_the_gpu_that_they_keep_busiest() -> None:
    its = (
        process(pid=1, notebook="a.ipynb", utilization=40.0),
        process(pid=2, notebook="a.ipynb", utilization=30.0),
        process(pid=3, utilization=None),
    )
    found = holders([gpu()], its, each=False)
    assert [holder.utilization for holder in found] == [70.0, None, None]


def test_holders_are_this_kernel_then_the_greediest_then_the_system() -> None:
    some = (
        process(pid=1, memory=2 * GIB, notebook="work/small.ipynb"),
        process(pid=2, memory=9 * GIB, notebook="work/big.ipynb"),
        process(pid=3, memory=GIB, notebook="work/mine.ipynb", mine=True),
    )
    found = holders([gpu()], some, each=False)
    assert [holder.name for holder in found] == [
        "this notebook (mine.ipynb)",
        "big.ipynb",
        "small.ipynb",
        "system",
    ]
    assert found[-1].memory == {"GPU-0": 18 * GIB}


def test_processes_of_one_notebook_are_summed_or_told_apart() -> None:
    workers = tuple(process(pid=pid, memory=GIB, notebook="a.ipynb") for pid in (1, 2))
    gpus = [gpu(memory_used=2 * GIB)]
    (together,) = holders(gpus, workers, each=False)
    assert (together.pids, together.memory) == ((1, 2), {"GPU-0": 2 * GIB})
    assert [holder.pids for holder in holders(gpus, workers, each=True)] == [(1,), (2,)]


def test_equal_names_of_different_users_are_not_summed() -> None:
    gpus = [gpu(memory_used=2 * GIB)]
    two = (process(pid=1, user="ada"), process(pid=2, user="grace"))
    assert [holder.user for holder in holders(gpus, two, each=False)] == ["ada", "grace"]


def test_strangers_are_their_user_programs_are_mine_and_the_rest_is_gone() -> None:
    gpus = [gpu(memory_used=6 * GIB)]
    two = tuple(process(pid=pid, name=None, user="grace") for pid in (1, 2))
    gone = process(pid=3, name=None, user=None)
    mine = (process(pid=4), process(pid=5, name="train"), process(pid=6, name="train"))
    found = holders(gpus, (*two, gone, *mine), each=False)
    names = ["grace", "train, 2 processes", "exited (PID 3)", "python3, pid 4"]
    assert [holder.name for holder in found] == names
    found = holders(gpus, mine, each=True)  # a column has the PID
    assert [holder.name for holder in found] == ["python3", "train", "train", "system"]
