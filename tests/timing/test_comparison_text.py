"""A comparison as text: the answer first, then numbers that are never more than was measured."""

from dataclasses import replace

import pytest
from comparisons import SIZES, comparison, cubes, timing, two
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.display import table
from gpumagic.timing.comparison import Agreement, Timing


def first(found):
    return repr(found).splitlines()[0]


def rows(found):
    """The lines, with one blank between columns."""
    return [" ".join(line.split()) for line in repr(found).splitlines()]


def virtual(*wheres):
    return [timing(where, 8e-3, virtual=True, name="Virtual GPU") for where in wheres]


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (two(), "cuda:0 is 8.00 × faster than cpu"),
        (
            comparison(timing("cpu", 8e-3), timing("cuda:0", 1e-3), timing("cuda:1", 1.001e-3)),
            "cuda:0 is 8.00 × faster than cpu",
        ),
        (
            comparison(timing("cpu", 8e-3), timing("cuda:0", 1e-3), timing("cuda:1", 2e-3)),
            "cuda:0 is 8.00 × faster than cpu",
        ),
        (
            comparison(timing("cpu", 1e-3), timing("cuda:0", 8e-3)),
            "cpu is 8.00 × faster than cuda:0",
        ),
        (
            comparison(timing("cpu", 1e-3, 0.3), timing("cuda:0", 1.05e-3, 0.3)),
            "cpu and cuda:0 do not differ by more than the spread",
        ),
        (
            comparison(timing("cpu", 1.234e-3)),
            "cpu takes 1.23 ms (IQR 1.0 %)",
        ),
        (
            comparison(*virtual("cuda:0")),
            "cuda:0 (virtual) takes 8.00 ms (IQR 1.0 %)",
        ),
        (comparison(Timing("cpu", error="interrupted")), "nothing was measured"),
        (
            comparison(timing("cpu", 8e-3), *virtual("cuda:0", "cuda:1")),
            "cuda:0 and cuda:1 are virtual: their times are the CPU's and say nothing about a GPU",
        ),
        (
            comparison(timing("cpu", 8e-3), *virtual("cuda:0")),
            "cuda:0 is virtual: its times are the CPU's and say nothing about a GPU",
        ),
        (
            two(agreements=(Agreement("cuda:0", "cpu", False, 0.4, "y", "more"),)),
            "! cuda:0 gives different numbers from cpu: more",
        ),
        (cubes(), "cuda:0 is faster than cpu from n ≈ 200"),
        (cubes((512, 1024)), "cuda:0 is 137 × faster than cpu at n = 1,024"),
        (cubes((64, 128)), "cpu is 3.75 × faster than cuda:0 at n = 128"),
    ],
)
def test_the_first_line_is_the_answer(found, answer):
    assert first(found) == answer


def test_of_an_order_that_flips_twice_the_last_place_is_said():
    sizes = (1, 10, 100)
    timings = [
        timing(where, seconds, values={"n": n})
        for n, cpu in zip(sizes, (1e-3, 4e-3, 1e-3), strict=True)
        for where, seconds in (("cpu", cpu), ("cuda:0", 2e-3))
    ]
    found = comparison(*timings, sweep={"n": sizes})
    assert first(found) == "cpu is faster than cuda:0 from n ≈ 32"


@pytest.mark.parametrize(
    ("seconds", "answer"),
    [
        ((2e-3, 8e-3), "cpu is 2.00 × faster than cuda:0 at kind = sum"),
        ((4.01e-3, 8e-3), "cpu is 2.00 × faster than cuda:0 at kind = sum"),
        ((4.01e-3, 4.01e-3), "cpu and cuda:0 do not differ by more than the spread"),
    ],
)
def test_a_sweep_over_words(seconds, answer):
    timings = [
        timing(where, s, values={"kind": kind})
        for kind, gpu in zip(("mean", "sum"), seconds, strict=True)
        for where, s in (("cpu", 4e-3), ("cuda:0", gpu))
    ]
    assert first(comparison(*timings, sweep={"kind": ("mean", "sum")})) == answer


def test_the_table_of_one_point():
    gpu = timing("cuda:0", 1e-3, peak={"cuda:0": 3 * 2**20}, name="H200", items=100)
    gpu = replace(gpu, host=(1e-4,) * 21, copied=2**20, copy_seconds=3e-3, transfers="1 transfer")
    same = Agreement("cuda:0", "cpu", True, 3e-7, "_")
    pair = timing("cuda:0+cuda:1", 1.1e-3, alone=(2e-3,) * 9, items=100, first=0.05)
    found = comparison(timing("cpu", 8e-3, items=100), gpu, pair, agreements=(same,))
    text = repr(found)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "device median IQR speed-up host throughput first run peak numbers" in lines
    assert "cpu 8.00 ms 1.0 % 1.00 × 12.5 k/s N/A reference" in lines
    assert "cuda:0 1.00 ms 1.0 % 8.00 × 100 µs 100 k/s 3.0 MiB same to 3e-07" in lines
    # Two at the same time do twice the work.
    assert "cuda:0+cuda:1 1.10 ms 1.0 % 182 k/s 50 ms N/A" in lines
    assert lines[1] == (
        "cuda:0 + cuda:1 at the same time: 1.82 times as fast as one after the other"
    )
    assert lines[-1] == found.remarks[0]
    assert found.remarks == [
        "in each run on cuda:0: 1 transfer",
        "not timed: copying the inputs (1.0 MiB to cuda:0 in 3.0 ms)",
        "host: time until Python continued, with the device still working",
        "first run: not in the median, may have compiled",
        "peak: memory that the code allocated, without its inputs",
        "cuda:0: H200",
    ]


def test_what_is_known_of_no_device_has_no_column():
    heading = repr(two(agreements=())).splitlines()[2].split()
    assert heading == ["device", "median", "IQR", "speed-up"]


def test_the_time_of_a_wrong_answer_and_of_a_virtual_gpu_is_no_speed_up():
    wrong = repr(two(agreements=(Agreement("cuda:0", "cpu", False, 0.4, "y"),)))
    assert "×" not in wrong
    assert "DIFFERS" in wrong
    text = repr(comparison(timing("cpu", 8e-3), *virtual("cuda:0")))
    assert "faster" not in text
    assert "speed-up" not in text
    assert "cuda:0 (virtual)" in text


def test_crossings_of_virtual_gpus_are_not_said():
    found = cubes()
    found = replace(
        found, timings=tuple(replace(t, virtual=t.where != "cpu") for t in found.timings)
    )
    assert "faster" not in repr(found)
    assert "fastest" not in repr(found)
    assert "≈" not in found._repr_html_()


def test_the_table_of_a_sweep():
    lines = rows(cubes(fails=512))
    assert "n cpu cuda:0 fastest" in lines
    assert "64 1.00 µs 30.0 µs cpu 30.0 ×" in lines
    assert "256 64.0 µs 30.0 µs cuda:0 2.13 ×" in lines
    assert "512 512 µs ✕ out of memory" in lines
    assert "1,024 4.10 ms –" in lines
    assert "cuda:0: out of memory at n = 512" in lines


def test_half_a_sweep_is_shown_and_said_to_be_half():
    found = cubes((64, 128, 256), sweep={"n": SIZES}, interrupted=True)
    text = repr(found)
    assert text.splitlines()[:2] == [
        "! interrupted: 6 timings finished",
        "cuda:0 is faster than cpu from n ≈ 200",
    ]
    assert "512" not in text


def test_a_long_sweep_is_cut():
    text = repr(cubes(tuple(range(100, 200))))
    assert "… 64 more; to_pandas() has all" in text
    assert " 100 " in text
    assert " 135 " in text
    assert " 136 " not in text
    assert " 150 " not in text


def test_what_is_not_certain_is_said():
    wide = comparison(timing("cpu", 1e-3, 0.5), timing("cuda:0", 1e-5, 0.09))
    text = " ".join(repr(wide).split())
    assert "cpu: noisy (IQR 50 % of the median): other work on the machine" in text
    assert text.index(" 1.00 ms ") < text.index("cpu: noisy")  # the table does not move
    assert "cuda:0: noisy" not in text
    assert "!" not in text
    once = comparison(Timing("cpu", (30.0,)), Timing("cuda:0", (2.0,)))
    assert "cpu 30.0 s 1 run" in " ".join(repr(once).split())


def test_numbers_that_were_not_compared_are_said_with_the_reason():
    text = repr(two(agreements=(Agreement("cuda:0", "cpu", None, reason="it draws"),)))
    assert "not compared" in text
    assert "numbers not compared: it draws" in text


def test_the_change_against_an_earlier_run_is_a_column():
    earlier = comparison(timing("cpu", 4e-3), code="A @ A")
    changed = two().against(earlier)
    lines = rows(changed)
    assert "device median IQR speed-up change numbers" in lines
    assert "cpu 8.00 ms 1.0 % 1.00 × 2.00 × slower reference" in lines
    assert "cuda:0 1.00 ms 1.0 % 8.00 × new same to 3e-07" in lines
    assert "differs from the earlier run: the code" in lines
    assert 'change: from the earlier run; "same": the spreads overlap' in changed.remarks


def test_the_change_of_a_sweep_is_a_column_of_each_device():
    earlier = cubes()
    halved = tuple(
        replace(t, seconds=tuple(s * 2 for s in t.seconds)) if t.values["n"] > 128 else t
        for t in earlier.timings
    )
    lines = rows(earlier.against(replace(earlier, timings=halved)))
    assert "n cpu change cuda:0 change fastest" in lines
    assert "128 8.00 µs same 30.0 µs same cpu 3.75 ×" in lines
    assert "256 64.0 µs 2.00 × faster 30.0 µs 2.00 × faster cuda:0 2.13 ×" in lines


def test_one_device_with_no_options_is_one_line():
    assert repr(comparison(timing("cpu", 1e-3))).count("\n") == 0
    noted = comparison(timing("cpu", 1e-3, 0.5), notes=("nothing to compare with",))
    assert repr(noted).splitlines()[0] == "cpu takes 1.00 ms (IQR 50 %)"
    assert noted.remarks[0] == repr(noted).splitlines()[1] == "nothing to compare with"
    assert repr(noted).splitlines()[2].startswith("cpu: noisy")
    counted = comparison(timing("cpu", 1e-3, items=8), setup="x = 1")
    assert repr(counted) == "cpu takes 1.00 ms (IQR 1.0 %, throughput 8.00 k/s)"


def test_a_gpu_is_named_by_its_model():
    assert two().remarks[-1] == cubes().remarks[-1] == "cuda:0: H200"


# Lines of words are broken by their characters, whatever room these take: here each takes one.
NARROW = st.characters(max_codepoint=0x2FF)


@given(
    st.lists(
        st.builds(
            timing,
            st.sampled_from(["cpu", "cuda:0", "cuda:1", "cuda:0+cuda:1", "cuda:10"]),
            st.floats(1e-9, 1e4),
            st.floats(0, 1.5),
            st.integers(3, 30).map(lambda n: 2 * n + 1),
            peak=st.just({}) | st.just({"cuda:0": 2**40 - 1}),
            virtual=st.booleans(),
            error=st.none() | st.text(NARROW, max_size=90),
            items=st.none() | st.just(1e6),
            name=st.none() | st.text(NARROW, max_size=200),
        ),
        max_size=5,
        unique_by=lambda t: t.where,
    ),
    st.text(NARROW),
)
def test_any_comparison_fits_in_a_hundred_columns(timings, code):
    text = repr(comparison(*timings, code=code))
    assert all(table.width(line) <= 100 for line in text.split("\n"))
