"""Against an earlier comparison: a change only beyond both spreads, and what else is different."""

import pickle

import pytest
from comparisons import comparison, cubes, timing, two
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.timing.comparison import Timing


def changes(now, earlier):
    """The cells of the column."""
    lines = repr(now.against(earlier)).splitlines()
    head = next(line for line in lines if " change" in line)
    at = head.index(" change") + len(" change")
    rows = lines[lines.index(head) + 1 :][: len(now.timings)]
    return [row[:at].split("  ")[-1].strip() for row in rows]


def beside(one):
    """With another device, so that there is a table."""
    return comparison(one, timing("cuda:7", 1.0))


@pytest.mark.parametrize(
    ("now", "then", "words"),
    [
        (timing("cpu", 1.0), timing("cpu", 1.32), "1.32 × faster"),
        (timing("cpu", 1.32), timing("cpu", 1.0), "1.32 × slower"),
        (timing("cpu", 1.0), timing("cpu", 1.0), "same"),
        (timing("cpu", 1.0, 0.4), timing("cpu", 1.1, 0.4), "same"),
        (timing("cpu", 1.0), timing("cuda:0", 1.0), "new"),
        (timing("cpu", 1.0), Timing("cpu", error="out of memory"), "new"),
        (Timing("cpu", (1.0,)), timing("cpu", 2.0), "2.00 × faster"),
    ],
)
def test_the_words(now, then, words):
    assert changes(beside(now), beside(then)) == [words, "same"]


def test_what_has_no_time_now_has_no_change():
    failed = beside(Timing("cpu", error="out of memory"))
    shown = repr(failed.against(beside(timing("cpu", 1.0))))
    (row,) = (line for line in shown.splitlines() if line.startswith("  cpu "))
    assert row.split() == ["cpu", "out", "of", "memory"]


@given(st.floats(1e-6, 10), st.floats(1.1, 50), st.floats(0.001, 0.05))
def test_the_ratio_is_the_other_way_round_backwards(median, by, spread):
    slow, fast = beside(timing("cpu", median * by, spread)), beside(timing("cpu", median, spread))
    faster, slower = changes(fast, slow)[0], changes(slow, fast)[0]
    assert faster.endswith(" faster")
    assert slower.endswith(" slower")
    for said in (faster, slower):  # the quotients of floats may round to different digits
        assert float(said.split()[0]) == pytest.approx(by, rel=6e-3)


def test_a_sweep_is_compared_value_by_value():
    shown = [line.split() for line in repr(cubes().against(cubes((64, 128)))).splitlines()]
    assert ["n", "cpu", "change", "cuda:0", "change", "fastest"] in shown
    assert [line.count("same") for line in shown if "×" in line] == [2, 2, 0, 0, 0]
    assert [line.count("new") for line in shown if "×" in line] == [0, 0, 2, 2, 2]


def test_a_single_device_says_its_change_in_its_line():
    now = comparison(timing("cpu", 1.0)).against(comparison(timing("cpu", 2.0)))
    assert repr(now) == "cpu takes 1.00 s (IQR 1.0 %, change 2.00 × faster)"


def test_what_else_is_different_is_told():
    assert "differs" not in repr(two().against(two()))
    shown = repr(two().against(two(code="A * B", setup="A = 1")))
    assert "differs from the earlier run: the code" in shown
    assert "differs from the earlier run: the setup" in shown


def test_the_earlier_run_keeps_no_other():
    once = two().against(two())
    assert two().against(once).earlier == two()


def test_a_comparison_is_kept_with_pickle():
    found = two().against(two(notes=("x",)))
    assert pickle.loads(pickle.dumps(found)) == found
