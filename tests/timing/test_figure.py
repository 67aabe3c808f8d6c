"""The same drawn with matplotlib."""

import pytest
from comparisons import SIZES, comparison, cubes, timing, two


@pytest.fixture
def pyplot():
    """Imported here: it takes each process that collects the tests a second."""
    made = pytest.importorskip("matplotlib.pyplot")
    made.switch_backend("agg")
    return made


@pytest.fixture
def ax(pyplot):
    figure, ax = pyplot.subplots()
    yield ax
    pyplot.close(figure)


def test_bars_are_the_medians(ax):
    assert two().plot(ax) is ax
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([8e-3, 1e-3])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["cpu", "cuda:0"]
    assert ax.get_title() == "cuda:0 is 8.00 × faster than cpu"


def test_a_sweep_is_curves_on_logarithmic_axes_with_the_crossing(ax):
    cubes(fails=512).plot(ax)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    by_label = {line.get_label(): line for line in ax.lines}
    assert list(by_label["cpu"].get_xdata()) == list(SIZES)
    assert list(by_label["cuda:0"].get_xdata()) == [64, 128, 256]
    assert [t.get_text() for t in ax.texts] == ["n ≈ 200"]
    assert [list(line.get_xdata()) for line in ax.lines if line.get_marker() == "x"] == [[512]]


def test_words_and_two_variables_and_nothing_can_be_drawn(ax):
    timings = [
        timing("cpu", n * 1e-3, values={"how": how, "n": n})
        for how in ("mean", "sum")
        for n in (1, 2, 4)
    ]
    comparison(*timings, sweep={"how": ("mean", "sum"), "n": (1, 2, 4)}).plot(ax)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "cpu, how = mean",
        "cpu, how = sum",
    ]
    comparison(sweep={"n": (1, 2)}).plot(ax)
    words = [timing("cpu", 1.0, values={"how": how}) for how in ("mean", "sum")]
    comparison(*words, sweep={"how": ("mean", "sum")}).plot(ax)


def test_it_makes_a_figure_of_its_own(pyplot):
    made = two().plot()
    assert len(made.patches) == 2
    pyplot.close(made.figure)
