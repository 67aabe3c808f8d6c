"""How often something is run: enough, and no more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.timing import runner
from gpumagic.timing.comparison import interval
from gpumagic.timing.runner import Lap, Repeats


class Bench:
    """Blocks on a clock of their own; `run(n)` gives the seconds of the n-th run."""

    def __init__(self, run, overhead=0.0):
        self.now, self.run, self.overhead = 0.0, run, overhead
        self.ran, self.blocks, self.stages = 0, [], []

    def lap(self, number):
        took = self.overhead
        for _ in range(number):
            took += self.run(self.ran)
            self.ran += 1
        self.now += took
        self.blocks.append((number, took))
        return Lap(took, took)

    def repeats(self, max_time=5.0):
        return Repeats(self.lap, max_time, clock=lambda: self.now, told=self.stages.append)


def test_short_runs_come_in_blocks_in_which_our_own_cost_vanishes():
    bench = Bench(lambda n: 5e-6, overhead=3e-5)
    repeats = bench.repeats()
    repeats.run()
    assert repeats.number * 5e-6 >= 600 * 3e-5
    assert repeats.median() == pytest.approx(5e-6, rel=2e-3)
    assert bench.now < 2.0  # it is known long before the limit


def test_what_takes_longer_than_the_limit_is_run_once():
    bench = Bench(lambda n: 30.0)
    repeats = bench.repeats()
    repeats.run()
    assert bench.blocks == [(1, 30.0)]
    assert repeats.seconds == (30.0,)


def test_a_run_of_seconds_needs_no_other_warm_up():
    bench = Bench(lambda n: 1.2)
    repeats = bench.repeats()
    repeats.run()
    assert repeats.seconds == (1.2,) * 4
    assert bench.stages[0] == "warm up"
    assert set(bench.stages[1:]) == {"timing"}


def test_one_that_was_compiled_first_is_not_taken_for_slow():
    bench = Bench(lambda n: 2.0 if n == 0 else 1e-4)
    repeats = bench.repeats()
    repeats.run()
    assert repeats.number == 10
    assert max(repeats.seconds) == pytest.approx(1e-4)


def test_slow_runs_at_the_start_are_not_timed():
    bench = Bench(lambda n: 0.01 * (1 + 5 * 0.8**n))
    repeats = bench.repeats()
    repeats.run()
    assert max(repeats.seconds) < 0.0115


def test_a_slow_moment_at_the_start_does_not_make_the_blocks_short():
    bench = Bench(lambda n: 0.3 if n < 2 else 1e-6)
    repeats = bench.repeats()
    repeats.run()
    assert repeats.number >= 500


def test_what_is_never_steady_ends_at_the_limit():
    bench = Bench(lambda n: 0.01 if n * 7919 % 97 < 50 else 0.03)
    repeats = bench.repeats(2.0)
    repeats.run()
    assert 1.9 <= bench.now <= 2.1


def test_an_interrupt_leaves_the_repeats_so_far(monkeypatch):
    monkeypatch.setattr(runner, "_LEAST_TIMED_S", 40.0)

    def run(n):
        if n == 40:
            raise KeyboardInterrupt
        return 0.02

    bench = Bench(run)
    repeats = bench.repeats(50.0)
    with pytest.raises(KeyboardInterrupt):
        repeats.run()
    assert 10 < len(repeats.laps) < 40
    assert repeats.median() == pytest.approx(0.02)


def test_enough_time_for_what_needs_it(monkeypatch):
    monkeypatch.setattr(runner, "_LEAST_TIMED_S", 1.0)
    bench = Bench(lambda n: 0.01)
    repeats = bench.repeats()
    repeats.run()
    assert sum(repeats.seconds) * repeats.number >= 1.0


@given(
    times=st.lists(st.floats(1e-4, 3.0), min_size=1, max_size=30),
    max_time=st.floats(0.05, 10.0),
)
def test_the_limit_holds_as_far_as_one_run_allows(times, max_time):
    bench = Bench(lambda n: times[n % len(times)])
    repeats = bench.repeats(max_time)
    repeats.run()
    assert repeats.laps
    longest = max(took for _, took in bench.blocks)
    # What is predicted from the block before may take longer; a run that was compiled first, and
    # those that size a block, come on top.
    assert bench.now <= max_time + 2 * longest + 6 * max(times)
    low, high = interval(repeats.seconds)
    near = high - low <= 0.01 * repeats.median() * 1.0001
    assert near or bench.now + max(times) * repeats.number > max_time / 2
