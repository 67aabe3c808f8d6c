"""The object: what it answers, and what it says to questions that it cannot answer."""

import sys
from dataclasses import replace

import pytest
from comparisons import SIZES, comparison, cubes, timing, two

from gpumagic.errors import GpuError
from gpumagic.timing.comparison import Agreement, Timing


@pytest.mark.parametrize(
    ("code", "title"),
    [
        ("A @ B", "A @ B"),
        ("\n\n# the product\n  A @ B\nC", "A @ B"),
        ("x" * 80, "x" * 59 + "…"),
        ("# nothing\n", "no code"),
    ],
)
def test_the_title_is_the_first_line_that_does_something(code, title):
    assert two(code=code).title == title


def test_speedup_and_median_take_devices_in_any_spelling():
    found = two()
    assert found.speedup("cuda:0", "cpu") == found.speedup(0, "CPU") == pytest.approx(8)
    assert found.speedup("cpu", "gpu:0") == pytest.approx(1 / 8)
    assert found.median("cpu") == pytest.approx(8e-3)


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.speedup("cpu", 0),
        lambda c: c.crossover("cuda:0", "cpu"),
        lambda c: c.crossover("0+1", "cpu"),
    ],
)
def test_times_of_virtual_gpus_are_compared_with_nothing(ask):
    there = ("cpu", False), ("cuda:0", True), ("cuda:0+cuda:1", True)
    found = comparison(*(timing(where, 4.0, virtual=virtual) for where, virtual in there))
    with pytest.raises(GpuError, match=r"^cuda:0( and cuda:1)? (is|are) virtual: [^\n]+ nothing"):
        ask(found)
    assert found.median(0) == pytest.approx(4.0)


@pytest.mark.parametrize(("where", "asked"), [("mps", "mps"), ("xpu:1", "xpu:1"), ("xpu:1", 1)])
def test_gpus_of_other_vendors_are_found(where, asked):
    found = comparison(timing("cpu", 8.0), timing(where, 2.0))
    assert found.speedup(asked, "cpu") == pytest.approx(4)


def test_several_at_the_same_time_have_a_name_too():
    found = comparison(timing("cuda:0", 1.0), timing("cuda:1", 1.0), timing("cuda:0+cuda:1", 1.1))
    assert found.median("0+1") == found.median("cuda:1+cuda:0") == pytest.approx(1.1)
    assert found.best == "cuda:0"
    assert comparison(timing("cuda:0+cuda:1", 1.1)).best == "cuda:0+cuda:1"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda c: c.median(1, n=64), "1 is not in this comparison; it has cpu, cuda:0"),
        (lambda c: c.median("mps", n=64), "mps is not in this comparison; it has cpu, cuda:0"),
        (
            lambda c: c.median("cpu"),
            "not timed without a value; see .sweep for its values, such as n=64",
        ),
        (lambda c: c.median("cpu", n=65), "cpu was not timed at n = 65"),
        (lambda c: c.median("cpu", m=64), "cpu was not timed at m = 64; see .sweep"),
        (lambda c: c.median(0, n=512), "cuda:0 has no time: out of memory"),
        (lambda c: c.crossover("cpu", "no\nsense"), "no sense is not in this comparison"),
        (lambda c: c.median("0+1", n=64), "0+1 is not in this comparison"),
    ],
)
def test_a_question_that_has_no_answer_gets_a_line(ask, said):
    with pytest.raises(GpuError) as caught:
        ask(cubes(fails=512))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_sweep_there_is_no_value_to_ask_at():
    with pytest.raises(GpuError, match="not timed at n = 3; omit the value"):
        two().median("cpu", n=3)


def test_the_best_is_the_fastest_with_the_right_numbers():
    assert two().best == "cuda:0"
    wrong = Agreement("cuda:0", "cpu", False, 0.4, "y")
    assert two(agreements=(wrong,)).best == "cpu"
    assert cubes((64, 128, 256, 512, 1024)).best == "cuda:0"  # at three of five values
    assert cubes((64, 128, 512)).best == "cpu"
    assert cubes((512,), fails=512).best == "cpu"
    with pytest.raises(GpuError, match="nothing was measured"):
        _ = comparison(Timing("cpu", error="interrupted")).best


def test_a_row_for_each_timing_in_pandas():
    made = cubes(fails=512)
    made = replace(made, timings=tuple(replace(t, items=10) for t in made.timings))
    frame = made.to_pandas()
    assert list(frame["where"].unique()) == ["cpu", "cuda:0"]
    assert len(frame) == len(SIZES) + 4
    first = frame.iloc[0]
    assert first["n"] == 64
    assert first["median_s"] == pytest.approx(1e-6)
    assert first["items_per_s"] == pytest.approx(1e7)
    assert first["low_s"] < first["median_s"] < first["high_s"]
    failed = frame[frame["error"].notna()]
    assert list(failed["n"]) == [512]
    assert failed["median_s"].isna().all()


def test_pandas_is_named_where_it_is_missing(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "pandas"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing("pandas"), *sys.meta_path])
    with pytest.raises(GpuError, match=r"needs pandas.*pip install pandas"):
        two().to_pandas()


class Missing:
    """An import system in which a library is not installed."""

    def __init__(self, library):
        self.library = library

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.library)


def test_it_can_be_copied_to_another_process():
    import pickle

    found = cubes()
    assert found.crossovers
    assert pickle.loads(pickle.dumps(found)) == found


def test_values_of_any_kind_can_be_asked_for():
    import torch

    kinds = (torch.float16, torch.float32)
    found = comparison(
        *(timing("cpu", s, values={"kind": k}) for s, k in zip((1.0, 2.0), kinds, strict=True)),
        sweep={"kind": kinds},
    )
    assert found.median("cpu", kind=torch.float32) == pytest.approx(2.0)
    assert replace(found, sweep={"kind": kinds}).timing("cpu", kind=kinds[0]).values == {
        "kind": torch.float16
    }
