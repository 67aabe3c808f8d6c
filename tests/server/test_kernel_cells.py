"""Which messages of a kernel make a cell, and the GPUs that it is seen on."""

from types import SimpleNamespace

import pytest

from gpumagic.server import kernels
from gpumagic.server.kernels import KernelCells
from gpumagic.telemetry import GpuSample, ProcessSample, Snapshot


@pytest.fixture
def now(monkeypatch):
    """The time, in a list."""
    times = [1000.0]
    monkeypatch.setattr(kernels, "time", SimpleNamespace(time=lambda: times[0]))
    return times


def message(kind, parent="run-1", date=None, **content):
    return {
        "header": {"msg_type": kind, "msg_id": f"of-{parent}", "date": date},
        "parent_header": {"msg_type": "execute_request", "msg_id": parent} if parent else {},
        "content": content,
    }


def test_a_silent_run_is_no_cell_and_an_old_one_is_forgotten(now):
    log = KernelCells(lambda kernel: None)
    log.receive("k", message("status", execution_state="busy"))
    log.receive("k", message("status", execution_state="idle"))
    assert log.runs() == []
    log.receive("k", message("status", "run-2", execution_state="busy"))
    log.receive("k", message("execute_input", "run-2", execution_count=2))
    now[0] += 10
    log.receive("k", message("status", "run-2", execution_state="idle"))
    (run,) = log.runs()
    assert (run.start, run.end, run.count) == (1000.0, 1010.0, 2)
    assert log.runs(since=1011.0) == []
    now[0] += 601
    assert log.runs() == []


@pytest.mark.parametrize("bad", [{}, {"header": None}, message("status"), message("x", None)])
def test_a_message_that_is_none_is_ignored(bad):
    log = KernelCells(lambda kernel: None)
    log.receive("k", bad)
    assert log.runs() == []


def test_a_run_takes_the_gpus_that_are_seen_while_and_just_after_it(now):
    log = KernelCells(lambda kernel: "a.ipynb")
    log.receive("k", message("execute_input", execution_count=1))
    log.see(Snapshot(1001.0, processes=(ProcessSample("GPU-0", 1, 5, kernel="k"),)))
    now[0] = 1002.0
    log.receive("k", message("status", execution_state="idle"))
    seen = log.revision
    log.see(Snapshot(1003.0, processes=(ProcessSample("GPU-1", 1, 5, kernel="k"),)))
    log.see(Snapshot(1010.0, processes=(ProcessSample("GPU-2", 1, 5, kernel="k"),)))
    assert [run.gpus for run in log.since(seen)] == [("GPU-0", "GPU-1")]


@pytest.mark.parametrize(
    ("busy", "load", "memory", "used"),
    [
        (0.0, 90.0, 5, False),  # another process computes there
        (3.0, 90.0, 5, True),
        (0.0, 90.0, 6, True),
        (None, 0.0, 5, False),
        (None, 40.0, 5, True),
        (None, None, 5, True),  # unknown
    ],
)
def test_a_run_has_no_gpu_where_its_kernel_only_holds_memory(now, busy, load, memory, used):
    log = KernelCells(lambda kernel: "a.ipynb")

    def see(time, memory, busy):
        held = ProcessSample("GPU-0", 1, memory, kernel="k", utilization=busy)
        log.see(Snapshot(time, gpus=(GpuSample("GPU-0", utilization=load),), processes=(held,)))

    see(999.0, 5, 0.0)
    log.receive("k", message("execute_input", execution_count=1))
    see(1001.0, memory, busy)
    (run,) = log.runs()
    assert run.gpus == (("GPU-0",) if used else ())
