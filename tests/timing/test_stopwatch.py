"""The wait is counted for every device, and nothing that is queued is taken to be done."""

import gc

import pytest
import torch
from late import GPU0, GPU1, Late

from gpumagic.frameworks.known import torch_itself
from gpumagic.moving import move
from gpumagic.timing.runner import Stopwatch


def test_a_kernel_that_was_not_waited_for_is_not_done():
    late = Late(GPU0)
    lap = late.stopwatch.lap(lambda runs: late.work(0.001, GPU0, 5.0), 1)
    assert lap.total == pytest.approx(5.001)
    assert lap.host == pytest.approx(0.001)


def test_every_device_is_waited_for_whichever_is_meant():
    late = Late(GPU0, GPU1)
    lap = late.stopwatch.lap(lambda runs: late.work(0.001, GPU1, 3.0), 1)
    assert lap.total == pytest.approx(3.001)
    assert late.waits == [GPU0, GPU1] * 2


def test_code_of_the_cpu_that_uses_a_gpu_is_waited_for():
    late = Late(GPU1)
    lap = late.stopwatch.lap(lambda runs: late.work(0.5, GPU1, 1.0), 1)
    assert (lap.total, lap.host) == pytest.approx((1.5, 0.5))


def test_a_device_that_the_code_starts_is_waited_for_too():
    late = Late(GPU0)
    lap = late.stopwatch.lap(lambda runs: late.work(0.0, GPU1, 2.0), 1)
    assert lap.total == pytest.approx(2.0)


def test_intels_gpus_are_waited_for(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "synchronize", waits.append)
    Stopwatch([torch_itself()]).wait()
    assert waits == [torch.device("xpu", 0), torch.device("xpu", 1)]


def test_what_was_queued_before_is_not_counted():
    late = Late(GPU0)
    late.work(0.0, GPU0, 60.0)
    lap = late.stopwatch.lap(lambda runs: late.work(0.25), 1)
    assert (lap.total, lap.host) == pytest.approx((0.25, 0.25))


def test_it_runs_as_often_as_asked():
    late = Late()
    ran = []
    late.stopwatch.lap(lambda runs: ran.extend(runs), 7)
    assert ran == [None] * 7


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_meanwhile(collects):
    late, seen = Late(), []
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        late.stopwatch.lap(lambda runs: seen.append(gc.isenabled()), 1)
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert (seen, after) == ([False], collects)


def test_an_interrupt_anywhere_leaves_the_collector_on_and_gives_no_lap():
    late = Late(GPU0, GPU1)
    late.stopwatch.lap(lambda runs: late.work(0.1, GPU0, 1.0), 1)
    stages = late.calls
    assert stages >= 6
    for stage in range(1, stages + 1):
        late = Late(GPU0, GPU1)
        late.interrupt = stage
        with pytest.raises(KeyboardInterrupt):
            late.stopwatch.lap(lambda runs: late.work(0.1, GPU0, 1.0), 1)  # noqa: B023
        assert gc.isenabled()


def test_torchs_own_devices(gpus, monkeypatch):
    waits = []
    monkeypatch.setattr(move, "synchronize", waits.append)
    Stopwatch([torch_itself()]).wait()
    assert waits == [GPU0, GPU1]


def test_a_gpu_without_a_context_is_left_alone(gpus, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda n: n == 1, raising=False)
    waits = []
    monkeypatch.setattr(move, "synchronize", waits.append)
    Stopwatch([torch_itself()]).wait()
    assert waits == [GPU1]


def test_timing_on_the_cpu_does_not_start_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA is started"))
    Stopwatch([torch_itself()]).lap(lambda runs: list(runs), 3)
    assert not torch.cuda.is_initialized()
