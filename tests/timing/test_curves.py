"""The plot: well-formed SVG in which each point is where its values say, and labels have room."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from comparisons import SIZES, comparison, cubes, timing
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.display import plot
from gpumagic.timing.comparison_view import sweep_figure

NUMBERS = st.floats(1e-9, 1e9)


def drawn(found):
    return ElementTree.fromstring(sweep_figure(found))


def texts(root):
    return [t.text for t in root.iter("text")]


def titles(root):
    return [t.text for t in root.iter("title")]


def test_each_device_has_a_curve_marks_and_its_name():
    root = drawn(cubes())
    assert len(root.findall("polyline")) == 2
    assert {"cpu", "cuda:0"} <= set(texts(root))
    assert "cuda:0 · n = 256 · 30.0 µs · IQR 1.0 %" in titles(root)
    assert root.get("role") == "img"
    assert "cpu from 1.00 µs to 4.10 ms" in root.get("aria-label")


def test_points_lie_on_a_straight_line_where_time_is_a_power():
    line = drawn(cubes()).find("polyline").get("points")
    points = [tuple(map(float, p.split(","))) for p in line.split()]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(points)]
    assert all(dx == pytest.approx(steps[0][0], abs=0.2) for dx, _ in steps)
    assert all(dy == pytest.approx(steps[0][1], abs=0.2) for _, dy in steps)
    assert steps[0][1] < 0  # more time is higher up


def test_the_crossing_is_marked_with_its_value():
    root = drawn(cubes())
    assert "n ≈ 200" in texts(root)
    ring = next(c for c in root.iter("circle") if c.get("class") == "gm-ring")
    cpu, gpu = (p.get("points").split() for p in root.findall("polyline"))
    level = float(gpu[0].split(",")[1])
    assert float(ring.get("cy")) == pytest.approx(level, abs=0.2)
    at = [float(p.split(",")[0]) for p in cpu]
    assert at[1] < float(ring.get("cx")) < at[2]


def test_out_of_memory_ends_the_curve_with_a_cross():
    root = drawn(cubes(fails=512))
    assert "cuda:0 · n = 512 · out of memory" in titles(root)
    assert "out of memory" in texts(root)
    cpu, gpu = root.findall("polyline")
    assert len(cpu.get("points").split()) == 5
    assert len(gpu.get("points").split()) == 3


def test_an_interrupt_is_no_failure_of_the_device():
    found = cubes(fails=512)
    cut = [t for t in found.timings if t.error is None]
    assert "✕" not in repr(comparison(*cut, sweep=found.sweep))
    assert "out of memory" not in texts(drawn(comparison(*cut, sweep=found.sweep)))


def test_values_that_are_no_numbers_have_no_plot():
    timings = [timing("cpu", s, values={"how": h}) for h, s in (("mean", 1.0), ("sum", 2.0))]
    assert sweep_figure(comparison(*timings, sweep={"how": ("mean", "sum")})) == ""


@pytest.mark.parametrize("sizes", [(0, 1, 2), (-5, 5), (3,), (1e-300, 1e300), tuple(np.arange(3))])
def test_any_numbers_have_their_place(sizes):
    root = drawn(
        comparison(*(timing("cpu", 1.0, values={"n": n}) for n in sizes), sweep={"n": sizes})
    )
    width = float(root.get("width"))
    xs = [float(c.get("cx")) for c in root.iter("circle")]
    assert all(0 < x < width for x in xs)
    assert len(xs) == len(sizes) + 1  # and the mark beside the name


def test_nothing_measured_is_no_plot():
    assert sweep_figure(comparison(sweep={"n": SIZES})) == ""


def test_what_is_shown_is_escaped():
    timings = [timing("<b>", 1.0, values={"n": n}) for n in (1, 2)]
    assert "<b>" not in sweep_figure(comparison(*timings, sweep={"n": (1, 2)}))


@given(
    st.lists(NUMBERS, min_size=1, max_size=30, unique=True),
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=30, max_size=30),
)
def test_whatever_was_measured_is_drawn_within_the_frame(sizes, medians):
    timings = [
        timing(where, seconds, values={"n": n})
        for n, both in zip(sizes, medians, strict=False)
        for where, seconds in zip(("cpu", "cuda:0"), both, strict=True)
    ]
    root = drawn(comparison(*timings, sweep={"n": tuple(sizes)}))
    width, height = map(float, root.get("viewBox").split()[2:])
    for line in root.findall("polyline"):
        for point in line.get("points").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


@given(NUMBERS, st.floats(1.0001, 1e12))
def test_ticks_are_few_round_and_within(low, ratio):
    high = low * ratio
    found = plot.ticks(low, high)
    assert len(found) <= 8
    assert found == sorted(set(found))
    assert all(low * (1 - 1e-9) <= t <= high * (1 + 1e-9) for t in found)
    if ratio > 1.5:
        assert len(found) >= 2


@given(st.lists(st.floats(1e-6, 1e-3), min_size=1, max_size=6))
def test_names_keep_their_distance(medians):
    names = [f"cuda:{n}" for n in range(len(medians))]
    timings = [timing(w, s, values={"n": 1}) for w, s in zip(names, medians, strict=True)]
    root = drawn(comparison(*timings, sweep={"n": (1,)}))
    places = sorted(float(t.get("y")) for t in root.iter("text") if t.text in names)
    assert len(places) == len(names)
    assert all(b - a >= 14.9 for a, b in itertools.pairwise(places))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60, unique=True))
def test_labels_do_not_touch(values):
    sizes = sorted(values)
    root = drawn(
        comparison(*(timing("cpu", 1.0, values={"n": n}) for n in sizes), sweep={"n": sizes})
    )
    labels = [t for t in root.iter("text") if float(t.get("y")) == plot.FOOT + 17]
    places = sorted((float(t.get("x")), plot.LETTER * len(t.text) / 2) for t in labels)
    assert str(sizes[-1]) in {t.text.replace(",", "").replace("_", "") for t in labels}
    for (a, half_a), (b, half_b) in itertools.pairwise(places):
        assert b - half_b > a + half_a


def test_devices_look_different_from_each_other():
    devices = ["cpu", *(f"cuda:{n}" for n in range(16))]
    looks = plot.looks(devices)
    assert list(looks) == devices
    assert len(set(looks.values())) == len(devices)
    assert looks["cuda:1"] == plot.looks(["cuda:1", "cpu"])["cuda:1"]


def contrast(a, b):
    """WCAG 2.1, of relative luminances."""
    a, b = (luminance(c) + 0.05 for c in (a, b))
    return max(a, b) / min(a, b)


def luminance(color):
    parts = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colors_stand_out_in_light_and_in_dark():
    for look in plot.looks(["cpu", *(f"cuda:{n}" for n in range(8))]).values():
        assert contrast(look.color, "#ffffff") >= 3
        assert contrast(look.color, "#111111") >= 3


def test_a_gpu_has_the_color_that_it_has_in_the_monitor():
    plots = (Path(__file__).parents[2] / "js" / "src" / "monitor" / "overview.ts").read_text()
    hues = plots.partition("HUES = [")[2].partition("]")[0]
    assert tuple(re.findall(r"#\w+", hues)) == plot.COLORS
