"""A report on memory as text and HTML: the figures in a line, the most first, the small folded."""

import json
from dataclasses import replace

import pytest

from gpumagic.memory.memory_changes import changes
from gpumagic.memory.memory_report import DeviceMemory, Made, MemoryHolder, MemoryReport

KIB, MIB, GIB = 2**10, 2**20, 2**30


def holder(path, nbytes, kind="tensor", **more):
    return MemoryHolder(path, kind, "cuda:0", nbytes, **more)


DEVICE = DeviceMemory(
    device="cuda:0",
    name="H100",
    virtual=False,
    total=16 * GIB,
    free=4 * GIB,
    allocated=8 * GIB,
    reserved=9 * GIB,
    fragmented=512 * MIB,
    other_in_process=GIB,
    others=2 * GIB,
    holders=(
        holder(
            "net",
            5 * GIB,
            "parameter",
            made=Made("In [3]", 5),
            aliases=("model", "trainer.net"),
            count=24,
            kinds=(("parameter", 3 * GIB), ("gradient", 2 * GIB)),
        ),
        holder("batches", 3 * GIB - 12 * KIB, count=1200, kinds=(("tensor", 1),)),
        holder("x0", KIB, "exception", count=85, kinds=(("exception", KIB),)),
        *(holder(f"x{n}", KIB) for n in range(1, 12)),
    ),
    others_by_name=(("explore.ipynb", GIB), ("grace", GIB)),
)
REPORT = MemoryReport((DEVICE,))


def test_the_line_answers_and_the_top_row_is_the_largest():
    head, below, columns, top, second, third, last = str(REPORT).splitlines()
    assert f"{head} {below.strip()}" == (
        "cuda:0: 8.0 GiB of 16.0 GiB allocated · reserved 9.0 GiB · fragmented 512 MiB · driver "
        "and other libraries 1.0 GiB · others 2.0 GiB (explore.ipynb 1.0 GiB, grace 1.0 GiB)"
        " · free 4.0 GiB"
    )
    assert " ".join(columns.split()) == "holder kind memory share made in also held by"
    said = "net parameters, gradients 5.0 GiB 62 % In [3], line 5 model +1"
    assert " ".join(top.split()) == said
    assert " ".join(second.split()) == "batches 1,200 tensors 3.0 GiB 37 %"
    assert " ".join(third.split()) == "x0 exception 1.0 KiB < 1 %"
    assert " ".join(last.split()) == "11 more 11.0 KiB < 1 %"


def test_html_has_all_behind_the_fold():
    html = REPORT._repr_html_()
    shown, fold, hidden = html.partition("<summary>11 more, 11.0 KiB</summary>")
    assert fold
    assert "trainer.net" in shown
    assert "x11" in hidden
    assert "x11" not in shown
    assert html.count('class="gm-cache"') == 2  # in the bar, and beside its figure
    many = replace(DEVICE, holders=tuple(holder(f"x{n}", KIB) for n in range(10_000)))
    assert len(MemoryReport((many,))._repr_html_()) < 100_000


def test_a_table_of_long_names_is_one_table():
    long = holder(
        "the exception of In [12]: frame step, x" * 2,
        GIB,
        "saved for backward",
        made=Made("a_long_name.py", 1234),
        aliases=("an_optimizer_of_mine",) * 9,
        kinds=(("saved for backward", 1), ("tensor", 1)),
    )
    lines = str(MemoryReport((replace(DEVICE, holders=(long,) * 3),))).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= 100


def test_names_are_escaped():
    named = replace(DEVICE, holders=(holder("d['<b>']", GIB, aliases=("<i>",)),))
    html = MemoryReport((named,))._repr_html_()
    assert "<b>'" not in html
    assert "d[&#x27;&lt;b&gt;" in html


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ({"fragmented": None}, "fragmented N/A"),
        ({"other_in_process": None}, "driver and other libraries N/A"),
        ({"others": None, "others_by_name": (("grace", None),)}, "others N/A (grace N/A)"),
        ({"free": None, "total": None}, "8.0 GiB allocated"),
        ({"allocated": None}, "N/A of 16.0 GiB allocated"),
    ],
)
def test_what_is_not_known_is_not_zero(figure, said):
    report = MemoryReport((replace(DEVICE, **figure),))
    assert said in str(report).replace("\n  ", " ")
    assert "N/A" in report._repr_html_()


def test_json_and_pandas():
    import pandas

    told = json.loads(REPORT.to_json())
    assert told["devices"][0]["holders"][0]["made"] == {"cell": "In [3]", "line": 5, "ran_in": ""}
    frame = pandas.DataFrame(REPORT.holders)
    assert list(frame.path[:2]) == ["net", "batches"]
    assert frame.nbytes.sum() == DEVICE.allocated


def test_what_changed_is_told_by_name():
    before = MemoryReport(
        (
            replace(
                DEVICE,
                allocated=7 * GIB,
                holders=(
                    holder("model", 4 * GIB),
                    holder("gone", 2 * GIB, aliases=("also",)),
                    holder("same", MIB),
                    holder("losses", KIB),
                ),
            ),
        )
    )
    after = MemoryReport(
        (
            replace(
                DEVICE,
                holders=(
                    holder("net", 4 * GIB, aliases=("model",)),
                    holder("new", 3 * GIB, made=Made("In [9]", 1)),
                    holder("same", MIB),
                    holder("losses", 2 * KIB),
                ),
            ),
        )
    )
    found = changes(before, after)
    told = [(c.holder.path, c.before, c.after) for c in found.changes]
    assert told == [("new", 0, 3 * GIB), ("gone", 2 * GIB, 0), ("losses", KIB, 2 * KIB)]
    assert found.unchanged == 2
    said = str(found)
    assert "cuda:0: +1.0 GiB since the last %gpumem (7.0 GiB → 8.0 GiB allocated)" in said
    assert "−2.0 GiB" in said
    assert "In [9], line 1" in found._repr_html_()
    assert "2 holders unchanged" in said
    assert str(changes(before, before)).startswith("unchanged since the last %gpumem")


def test_a_change_has_the_kind_that_changed():
    """As after `loss.backward()`: the net's parameters are as large as before."""
    old, new = (
        replace(DEVICE, holders=(replace(holder("net", total), kind="parameter", kinds=kinds),))
        for total, kinds in (
            (2 * GIB, (("parameter", 2 * GIB),)),
            (3 * GIB, (("parameter", 2 * GIB), ("gradient", GIB))),
        )
    )
    for before, after in ((old, new), (new, old)):
        found = changes(MemoryReport((before,)), MemoryReport((after,)))
        assert [each.kind for each in found.changes] == ["gradient"]
        assert "gradient" in str(found)
    assert changes(MemoryReport(()), MemoryReport((new,))).changes[0].kind == "parameter"


def test_a_name_that_now_holds_another_thing_is_matched_once():
    """What `net` held before is not told twice, though `net` and `x` now hold parts of it."""
    before = MemoryReport((replace(DEVICE, holders=(holder("net", GIB, aliases=("x",)),)),))
    apart = replace(DEVICE, holders=(holder("net", GIB), holder("x", MIB)))
    told = [(c.holder.path, c.before) for c in changes(before, MemoryReport((apart,))).changes]
    assert told == [("x", 0)]


def test_a_new_holder_does_not_take_the_figures_of_one_that_is_still_there():
    """As where a list's tensors become a net's buffers, which come first among the holders."""
    before = MemoryReport((replace(DEVICE, holders=(holder("data", 3 * MIB),)),))
    rows = holder("net", 2 * MIB, aliases=("data",)), holder("data", MIB)
    after = MemoryReport((replace(DEVICE, holders=rows),))
    told = [(c.holder.path, c.before, c.after) for c in changes(before, after).changes]
    assert sorted(told) == [("data", 3 * MIB, MIB), ("net", 0, 2 * MIB)]


def test_names_that_swap_what_they_hold_change_nothing():
    """`y` was shown by its own name, and is now shown by its new one: `x = y`."""
    rows = holder("a", GIB, aliases=("x",)), holder("y", MIB)
    before = MemoryReport((replace(DEVICE, holders=rows),))
    rows = holder("a", GIB), holder("x", MIB, aliases=("y",))
    found = changes(before, MemoryReport((replace(DEVICE, holders=rows),)))
    assert (found.changes, found.unchanged) == ((), 2)


def test_what_gpufree_would_give_back_is_told():
    rows = (holder("net", GIB), holder("Out[3]", MIB, "output"), holder("x", MIB, "exception"))
    left = MemoryReport((replace(DEVICE, holders=rows),))
    hint = "%gpufree` gives back 2.0 MiB: what outputs and errors hold"
    assert hint in str(left)
    assert hint.replace("`", "</code>") in left._repr_html_()
    assert "gpufree" not in str(REPORT)
