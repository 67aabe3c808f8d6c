"""How far a comparison is: told seldom, and whatever is done with it, no matter."""

from itertools import pairwise

import late as lates
import pytest
from late import GPU0, GPU1

from gpumagic import faults
from gpumagic.timing import compare


def told(code, devices=("cpu", 0), progress=None, **options):
    """What a comparison reports, on a clock of its own."""
    late, every = lates.begin(GPU0, GPU1), []

    def note(now):
        every.append((late.now, now))
        if progress:
            progress(now)

    space = {"late": lates, "GPU0": GPU0}
    watch = late.stopwatch
    made = compare(code, devices, namespace=space, stopwatch=watch, progress=note, **options)
    return made, every


def test_ten_times_a_second_at_most(gpus):
    made, every = told("late.work(0.01)", max_time=2)
    times = [at for at, _ in every]
    assert 5 < len(times) < sum(len(t.seconds) for t in made.timings) / 4
    assert all(after - before >= 0.0999 for before, after in pairwise(times))


def test_the_bar_of_the_device_is_its_median_so_far(gpus):
    made, every = told("late.work(0.2)")
    shown = [now for _, now in every]
    assert shown[0].bars == (("cpu", None, "inputs and first run"), ("cuda:0", None, "waiting"))
    assert shown[-1].bars == (
        ("cpu", made.timings[0].median, "done"),
        ("cuda:0", pytest.approx(0.2), "timing"),
    )
    assert [(each.done, each.total) for each in (shown[0], shown[-1])] == [(0, 2), (1, 2)]
    assert str(shown[-1]) == "cuda:0 · timing · 2 of 2"


def test_a_new_value_begins_with_empty_bars(gpus):
    _, every = told("late.work(0.2 * n)", sweep={"n": [1, 2]})
    first = next(now for _, now in every if now.values == {"n": 2})
    assert first.bars == (("cpu", None, "warm up"), ("cuda:0", None, "waiting"))
    assert (first.done, first.total) == (2, 4)


def test_a_device_that_failed_says_why(gpus):
    code = "late.work(0.2)\nif str(torch.ones(1).device) == 'cuda:0' and n > 1: raise MemoryError"
    _, every = told(f"import torch\n{code}", [0, "cpu"], sweep={"n": [1, 2]})
    assert every[-1][1].bars[0] == ("cuda:0", None, "out of memory")


def test_what_listening_raises_is_kept_and_ctrl_c_is_not(gpus):
    def fail(now):
        raise ValueError("mine")

    def press(now):
        raise KeyboardInterrupt

    faults.forget()
    made, every = told("late.work(0.2)", ["cpu"], fail)
    assert made.timings[0].seconds
    assert [(fault.error, fault.count) for fault in faults.all_kept()] == [
        ("ValueError: mine", len(every))
    ]
    faults.forget()
    assert told("late.work(0.2)", ["cpu"], press)[0].interrupted
