"""Who looks at the widget, as it hears of them."""

import pytest
from fake_sampler import Clock
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.widget import notebook_watch
from gpumagic.widget.notebook_watch import Audience


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(notebook_watch, "time", made)
    return made


def test_a_view_that_is_silent_for_long_is_gone(clock):
    audience = Audience()
    assert audience.look("a")
    assert not audience.look("a")
    clock.now = 90
    assert audience.anyone()
    clock.now = 91
    assert not audience.anyone()


def test_a_monitor_that_nobody_came_to_see_is_not_kept_going(clock):
    audience = Audience()
    clock.now = 89
    assert audience.anyone()
    clock.now = 91
    assert not audience.anyone()


def test_the_time_of_a_cell_does_not_count(clock):
    audience = Audience()
    audience.look("a")
    audience.receives(False)
    clock.now = 7200
    assert audience.anyone()
    audience.receives(True)
    clock.now += 89
    assert audience.anyone()
    clock.now += 2
    assert not audience.anyone()


def test_the_last_to_leave_is_known_as_such():
    audience = Audience()
    audience.look("a")
    audience.look("b")
    assert not audience.leave("a")
    assert not audience.leave("a")
    assert audience.leave("b")
    assert not audience.leave("never came")


@given(
    st.lists(
        st.tuples(st.sampled_from(["look", "leave", "busy", "free", "wait"]), st.integers(0, 60))
    )
)
def test_who_looked_a_moment_ago_is_there(steps):
    with pytest.MonkeyPatch.context() as patched:
        clock = Clock()
        patched.setattr(notebook_watch, "time", clock)
        walk(Audience(), clock, steps)


def walk(audience, clock, steps):
    for step, number in steps:
        if step == "wait":
            clock.now += number
        elif step in ("busy", "free"):
            audience.receives(step == "free")
        else:
            getattr(audience, step)(str(number % 3))
        if step == "look":
            assert audience.anyone()
