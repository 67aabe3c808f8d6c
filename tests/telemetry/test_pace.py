"""Ticks on a grid: no drift, no bursts."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from gpumagic.telemetry.sampler import Pace


def test_nobody_asks() -> None:
    pace = Pace()
    assert not pace.tick(5.0)
    assert pace.pause(5.0) is None


def test_the_first_tick_is_at_once_and_the_others_do_not_drift() -> None:
    pace = Pace()
    pace.set_period(1.0, 10.0)
    ticks = [now for now in (10.0, 10.5, 11.1, 11.9, 12.2, 13.0) if pace.tick(now)]
    assert ticks == [10.0, 11.1, 12.2, 13.0]
    assert pace.ticked == 13.0


def test_a_long_tick_makes_no_burst() -> None:
    pace = Pace()
    pace.set_period(1.0, 0.0)
    assert pace.tick(0.0)
    assert pace.tick(7.3)
    assert pace.ticked == 7.0
    assert not pace.tick(7.4)
    assert math.isclose(pace.pause(7.4) or 0, 0.6)
    assert pace.tick(8.0)


def test_a_faster_period_counts_from_the_last_tick() -> None:
    pace = Pace()
    pace.set_period(60.0, 0.0)
    assert pace.tick(0.0)
    pace.set_period(1.0, 0.4)
    assert not pace.tick(0.9)
    assert pace.tick(1.0)
    pace.set_period(60.0, 1.5)
    assert not pace.tick(60.9)
    assert pace.tick(61.0)


def test_after_a_pause_the_tick_is_at_once() -> None:
    pace = Pace()
    pace.set_period(1.0, 0.0)
    assert pace.tick(0.0)
    pace.set_period(math.inf, 0.5)
    assert not pace.tick(100.0)
    pace.set_period(1.0, 100.2)
    assert pace.tick(100.2)


@given(st.floats(0.25, 60), st.lists(st.floats(0, 100), max_size=30))
def test_never_two_ticks_in_one_period(period: float, steps: list[float]) -> None:
    pace = Pace()
    pace.set_period(period, 0.0)
    now, places = 0.0, []
    for step in steps:
        now += step
        if pace.tick(now):
            places.append(pace.ticked)
            assert now - period * 1.001 <= pace.ticked <= now
        pause = pace.pause(now)
        assert pause is not None
        assert 0 <= pause <= period * 1.001
    for first, second in itertools.pairwise(places):
        assert second - first >= period * 0.999
