"""Several devices at the same time: a thread each, none of them left over."""

import random
import signal
import threading
import traceback

import pytest
import torch
from late import GPU0, GPU1

from gpumagic import virtual
from gpumagic.copies.trial import Trial
from gpumagic.errors import GpuError
from gpumagic.frameworks.known import torch_itself
from gpumagic.isolation.worker import Worker
from gpumagic.timing import compare, runner
from gpumagic.timing.runner import Runner, Stopwatch
from gpumagic.usercode.program import program

MEET = threading.Barrier(2)


class Here:
    """What code of a test may call: a class of a module is no variable, and not copied."""

    main = threading.main_thread()

    @staticmethod
    def meet():
        MEET.wait(20)

    @staticmethod
    def interrupt():
        signal.pthread_kill(Here.main.ident, signal.SIGINT)


def test_both_run_at_the_same_time_each_on_its_own(gpus, monkeypatch):
    seen = set()
    monkeypatch.setattr(Here, "seen", seen, raising=False)
    code = (
        "y = x + torch.ones(2)\n"
        "Here.seen.add((str(y.device), threading.get_ident(), torch.cuda.current_device()))"
    )
    space = {"x": torch.zeros(2), "torch": torch, "Here": Here, "threading": threading}
    made = compare(code, ["0+1"], namespace=space, max_time=0.2)
    (timing,) = made.timings
    assert timing.where == "cuda:0+cuda:1"
    assert timing.seconds
    assert timing.alone
    assert timing.virtual == virtual.enabled()
    assert {(device, current) for device, _, current in seen} == {("cuda:0", 0), ("cuda:1", 1)}
    assert len({thread for _, thread, _ in seen}) == 2
    assert space.keys() == {"x", "torch", "Here", "threading"}


def test_they_wait_for_each_other_so_they_do_run_together(gpus):
    # One after the other, neither would come back: so `alone` is not to be measured here.
    space = {"Here": Here}
    made, watch = program("Here.meet()", space), Stopwatch([torch_itself()])
    trials = [Trial(made, d, space, {}) for d in (GPU0, GPU1)]
    both = Runner(trials, watch)
    try:
        for n in range(2):
            both.set_up(n)
        lap = both.lap(3)
        assert 0 < lap.total < 20
        assert lap.host <= lap.total
    finally:
        both.close()
        for trial in trials:
            trial.close()


def test_an_exception_is_the_users_and_says_on_which_device(gpus):
    code = "if torch.ones(1).device.index == 1:\n    raise ValueError('no')"
    with pytest.raises(ValueError, match="no") as caught:
        compare(code, ["0+1"], namespace={"torch": torch}, max_time=0.2)
    told = "".join(traceback.format_exception(caught.value))
    assert "timed on cuda:0+cuda:1, line 2" in told


def test_ctrl_c_ends_the_threads_and_keeps_what_is_finished(gpus, monkeypatch):
    monkeypatch.setattr(Here, "runs", [], raising=False)
    code = (
        "if torch.ones(1).device.index == 1:\n"
        "    Here.runs.append(1)\n"
        "    if len(Here.runs) == 2:\n"
        "        Here.interrupt()\n"
        "        while True: pass\n"
    )
    made = compare(code, ["cpu", "0+1"], namespace={"Here": Here, "torch": torch}, max_time=0.3)
    assert made.interrupted
    cpu, both = made.timings
    assert cpu.seconds
    assert (both.seconds, both.error) == ((), "interrupted")


def test_ctrl_c_while_the_threads_are_begun_ends_them(gpus, monkeypatch):
    class Late(Worker):
        def __init__(self, name):
            super().__init__(name)
            if name == "cuda:0":
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(runner, "Worker", Late)
    made = compare("1", ["0+1"], namespace={}, max_time=0.1)
    assert made.interrupted
    assert not [t for t in threading.enumerate() if t.name.startswith("gputime")]


def test_a_device_twice_at_the_same_time_is_refused(gpus):
    with pytest.raises(GpuError, match=r"0\+0 names a device twice"):
        compare("1", ["0+0"])


def test_gradients_are_recorded_as_the_user_has_set_it(gpus):
    code = "recorded = torch.is_grad_enabled()\nassert not recorded"
    with torch.no_grad():
        made = compare(code, ["0+1"], namespace={"torch": torch}, max_time=0.1)
    assert made.timings[0].error is None


@pytest.mark.parametrize("draws", ["random.random()", "torch.randn(1, device='cpu').item()"])
def test_each_is_set_up_with_the_same_random_numbers(gpus, draws):
    space = {"torch": torch, "random": random}
    setup, code = f"k = {draws}", f"y = k + {draws}"
    made = compare(code, ["0", "0+1"], setup=setup, namespace=space, max_time=0.02)
    assert [agreement.same for agreement in made.agreements] == [True, True]


def test_threads_have_the_modes_of_the_one_that_asked(gpus):
    code = (
        "assert torch.is_inference_mode_enabled()\n"
        "assert torch.get_autocast_dtype('cpu') == torch.float16\n"
        "assert torch.is_autocast_enabled('cpu')"
    )
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        made = compare(code, ["0+1"], namespace={"torch": torch}, max_time=0.02)
    assert made.timings[0].error is None
    assert not [t for t in threading.enumerate() if t.name.startswith("gputime")]
