"""How far it is: told seldom, and whatever is done with it, no matter."""

import pytest

from gpumagic import faults
from gpumagic.timing.timing import Reporter


class Told:
    """Collects what a reporter tells, on a clock of its own."""

    def __init__(self, total=4, raising=None):
        self.now, self.all, self.raising = 0.0, [], raising
        self.reporter = Reporter(self, "a @ a", ["cpu", "cuda:0"], total, lambda: self.now)

    def __call__(self, progress):
        self.all.append(progress)
        if self.raising:
            raise self.raising


def test_ten_times_a_second_at_most():
    told = Told()
    told.reporter.begin("cpu", {})
    for n in range(1000):
        told.now = n / 1000
        told.reporter.at("timing", n, 1.0)
    assert 9 <= len(told.all) <= 11


def test_the_bar_of_the_device_is_its_median_so_far():
    told = Told()
    told.reporter.begin("cpu", {})
    told.now = 1.0
    told.reporter.at("timing", 2, 2.0)
    assert told.all[-1].bars == (("cpu", 2.0, "timing"), ("cuda:0", None, "waiting"))
    assert (told.all[-1].repeat, told.all[-1].stage) == (2, "timing")


def test_what_is_left_is_estimated_from_what_is_done():
    told = Told()
    told.reporter.begin("cpu", {})
    assert told.all[-1].remaining is None
    told.now = 2.0
    told.reporter.end(0.5)
    told.reporter.begin("cuda:0", {})
    told.now = 2.5
    told.reporter.at("warm up")
    last = told.all[-1]
    assert (last.done, last.total, last.elapsed) == (1, 4, 2.5)
    assert last.remaining == pytest.approx(3 * 2.0 - 0.5)
    assert last.share == pytest.approx(2.5 / 8.0)
    assert told.all[0].share is None
    assert last.bars == (("cpu", 0.5, "done"), ("cuda:0", None, "warm up"))
    told.now = 9.0  # longer than the one before: those that follow are still to come
    told.reporter.at("timing", 1)
    assert told.all[-1].remaining == pytest.approx(2 * 2.0)


def test_a_new_value_begins_with_empty_bars():
    told = Told()
    told.reporter.begin("cpu", {"n": 1})
    told.reporter.end(0.5)
    told.now = 1.0
    told.reporter.begin("cpu", {"n": 2})
    assert told.all[-1].bars == (("cpu", None, "copy"), ("cuda:0", None, "waiting"))
    assert told.all[-1].values == {"n": 2}


def test_the_end_is_always_told():
    told = Told()
    told.reporter.begin("cpu", {})
    told.reporter.end(None, "out of memory")
    told.reporter.close()
    assert (told.all[-1].stage, told.all[-1].remaining) == ("done", 0.0)
    assert told.all[-1].bars[0] == ("cpu", None, "out of memory")


def test_what_listening_raises_is_kept_and_ctrl_c_is_not():
    faults.forget()
    told = Told(raising=ValueError("mine"))
    told.reporter.begin("cpu", {})
    assert len(told.all) == 1
    assert [fault.error for fault in faults.all_kept()] == ["ValueError: mine"]
    faults.forget()
    told = Told(raising=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        told.reporter.begin("cpu", {})
