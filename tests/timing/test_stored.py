"""A comparison in a file: read as it was written, and anything else is refused in a line."""

import json
import math

import pytest
from comparisons import MACHINE, comparison, cubes, two
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.errors import GpuError
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.timing import Agreement, Timing

SECONDS = st.lists(st.floats(0, 1e6), max_size=8).map(tuple)
WORDS = st.text(max_size=12)
ODD = st.none() | st.sampled_from([math.inf, -math.inf, 0.0]) | st.floats(allow_nan=False)
VALUES = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | WORDS | st.booleans()
TIMINGS = st.builds(
    Timing,
    where=st.sampled_from(["cpu", "cuda:0", "cuda:0+cuda:1"]),
    seconds=SECONDS,
    host=SECONDS,
    device=st.none() | SECONDS,
    number=st.integers(1, 10**9),
    values=st.fixed_dictionaries({"n": VALUES}),
    name=st.none() | WORDS,
    virtual=st.booleans(),
    copied=st.integers(0, 2**50),
    peak=st.dictionaries(WORDS, st.integers(0, 2**50), max_size=2),
    energy=ODD,
    alone=SECONDS,
    error=st.none() | WORDS,
    items=st.none() | st.floats(1e-3, 1e9),
    steady=st.booleans(),
)
COMPARISONS = st.builds(
    Comparison,
    code=WORDS,
    timings=st.lists(TIMINGS, max_size=3).map(tuple),
    agreements=st.lists(
        st.builds(Agreement, WORDS, WORDS, st.none() | st.booleans(), ODD, st.none() | WORDS),
        max_size=2,
    ).map(tuple),
    machine=st.just(MACHINE),
    time=st.floats(0, 2.5e11),
    sweep=st.fixed_dictionaries({"n": st.lists(VALUES, min_size=1, max_size=3).map(tuple)}),
    items=st.none() | st.floats(1e-3, 1e9),
    notes=st.lists(WORDS, max_size=2).map(tuple),
    interrupted=st.booleans(),
)


@given(COMPARISONS)
def test_what_was_written_is_read(found):
    text = found.to_json()
    assert "\n" not in text
    assert Comparison.from_json(text) == found


def test_no_number_is_kept_as_that():
    found = two(agreements=(Agreement("cuda:0", "cpu", False, math.nan),))
    text = found.to_json()
    json.loads(text, parse_constant=pytest.fail)  # what other programs read has no NaN
    (agreement,) = Comparison.from_json(text).agreements
    assert math.isnan(agreement.largest)


def test_a_value_that_json_has_not_is_kept_as_words():
    import numpy
    import torch

    values = (torch.float16, numpy.int64(3), [1, 2])
    found = comparison(sweep={"v": values})
    assert Comparison.from_json(found.to_json()).sweep == {"v": ("float16", 3, (1, 2))}


def test_a_file_keeps_it(tmp_path):
    path = tmp_path / "größen.json"
    cubes().save(path)
    assert Comparison.from_json(path) == Comparison.from_json(str(path)) == cubes()


def changed(**changes):
    return json.dumps(json.loads(cubes().to_json()) | changes)


def of_first_timing(**changes):
    document = json.loads(cubes().to_json())
    document["timings"][0] |= changes
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no comparison"),
        ("{}", "is no comparison"),
        ('{"format": NaN}', "is no comparison"),
        ("{" * 100_000, "is no comparison"),
        (changed(format="nbformat"), "is no comparison"),
        (changed(version=2), "version '2'.*knows 1; update gpumagic"),
        (changed(version=None), "version 'None'"),
        (changed(time="noon"), "time is no number"),
        (changed(time=True), "time is no number"),
        (changed(time=67_767_976_233_532_796), "time that a clock"),
        (changed(code=None), "code is no text"),
        (changed(timings={}), "timings is no list"),
        (changed(timings=[3]), r"timings\[0\] is no object"),
        (changed(sweep=[]), "sweep is no object"),
        (changed(sweep={"n": []}), "no values"),
        (changed(sweep={"m": [1]}), "are not the sweep's variables"),
        (changed(surprise=1), "unknown 'surprise'"),
        (changed(machine={}), "machine has no 'host'"),
        (changed(change=[{"where": "cpu", "verdict": "fine"}]), "verdict is not one of faster"),
        (of_first_timing(seconds=[-1]), "seconds has a time that cannot be"),
        (of_first_timing(seconds=[{"float": "inf"}]), "seconds has a time that cannot be"),
        (of_first_timing(seconds=["1"]), r"seconds\[0\] is no number"),
        (of_first_timing(number=0), "has no runs"),
        (of_first_timing(number=1.5), "number is no whole number"),
        (of_first_timing(virtual=1), "virtual is no true or false"),
    ],
)
def test_anything_else_is_refused_in_a_line(text, said):
    with pytest.raises(GpuError, match=said) as caught:
        Comparison.from_json(text)
    assert "\n" not in str(caught.value)


def test_what_is_missing_has_its_default():
    document = json.loads(two().to_json())
    for name in ("notes", "interrupted", "change", "setup"):
        del document[name]
    assert Comparison.from_json(json.dumps(document)) == two()


def test_a_file_that_is_not_there_or_no_text_is_said(tmp_path):
    with pytest.raises(GpuError, match=r"nowhere\.json: No such file"):
        Comparison.from_json(tmp_path / "nowhere.json")
    with pytest.raises(GpuError, match="Is a directory"):
        Comparison.from_json(tmp_path)
    (tmp_path / "x.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(GpuError, match="too long") as caught:
        Comparison.from_json("x" * 5000)
    assert len(str(caught.value)) < 300
    with pytest.raises(GpuError, match="it is no text"):
        Comparison.from_json(tmp_path / "x.png")


@given(
    st.recursive(
        st.none() | st.integers() | WORDS, lambda s: st.lists(s) | st.dictionaries(WORDS, s)
    )
)
def test_no_json_is_worse_than_a_line(given_):
    with pytest.raises(GpuError) as caught:
        Comparison.from_json(
            json.dumps({"format": "gpumagic-comparison", "version": 1, "a": given_})
        )
    assert "\n" not in str(caught.value)


@given(st.sampled_from(sorted(json.loads(cubes().to_json()))), st.none() | st.integers() | WORDS)
def test_any_part_replaced_is_read_or_refused(part, value):
    try:
        found = Comparison.from_json(changed(**{part: value}))
    except GpuError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert repr(found)
        assert found._repr_html_()
