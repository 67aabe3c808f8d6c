"""A dry run in words and in HTML."""

import pytest

from gpumagic.dryrun.result import Assigned, DryRun, Mismatch, Peak, Unknown, html, text
from gpumagic.ledger.entry import Entry, Ledger
from gpumagic.moving.moved import Moved
from gpumagic.usercode.files import UserLine

GIB = 2**30
ITEM = Entry(
    *("wait", "item", "cuda:1", "cpu", 1000, 4000, None, True),
    where=UserLine(4, "log.append(x.item())"),
    code="x.item()",
    calls=1000,
)


def run(**changes):
    values = {
        "device": "cuda:1",
        "assigned": (Assigned("Y", "float32[2]", "cuda:1", 8),),
        "peak": {
            "cpu": Peak("cpu", 100, 100, None, None),
            "cuda:1": Peak("cuda:1", 15 * GIB, 14 * GIB, 16 * GIB, UserLine(7, "loss.backward()")),
        },
        "moved": (Moved("X", 2048, ("cpu",)),),
        "ledger": Ledger((ITEM,), virtual=True),
        "unknown": (),
        "mismatches": (),
        "error": None,
        "error_at": None,
        "printed": "",
        "operators": 3,
        "seconds": 0.085,
        "virtual": True,
    }
    return DryRun(**(values | changes))


def test_the_text():
    assert text(run(printed="a\nb\n")).splitlines()[:8] == [
        "dry run on cuda:1 (virtual): nothing was computed · 2 lines printed, not shown · 85 ms",
        "  cuda:1: at least 14.0 GiB of 16.0 GiB free; peak 15.0 GiB in all, at line 7: "
        "loss.backward()",
        "  assigns",
        "    Y  float32[2]  cuda:1",
        "  moves",
        "    X  2.0 KiB  cpu → cuda:1",
        "  copies and waits",
        "    line  source                what                               count    bytes  time",
    ]


def test_what_went_wrong_comes_before_the_details():
    ended = Unknown(UserLine(9, "if x > 0:"), "a condition on a tensor depends on data", True)
    left = Unknown(UserLine(2, "get_ipython().system('ls')"), "!ls was skipped", False)
    lines = text(run(unknown=(ended, left), error="KeyError: 'k'", error_at=UserLine(3, "d['k']")))
    assert lines.splitlines()[2:5] == [
        "  would fail at line 3: d['k']: KeyError: 'k'",
        "  line 2: !ls was skipped",
        "  ended at line 9: a condition on a tensor depends on data · if x > 0:",
    ]


def test_an_error_before_the_first_line_has_no_place():
    assert "\n  would fail: TypeError: f()" in text(run(error="TypeError: f() takes no arguments"))


def test_a_mismatch_without_an_explanation_has_torchs_words():
    mismatch = Mismatch(UserLine(3, "a + b"), "RuntimeError: found at least two devices")
    shown = run(mismatches=(mismatch,))
    assert "    RuntimeError: found at least two devices" in text(shown)
    assert "<pre>RuntimeError: found" in html(shown)


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (None, "at least 14.0 GiB more; peak"),
        (10 * GIB, "at least 14.0 GiB of 10.0 GiB free: does not fit; peak"),
    ],
)
def test_room(free, words):
    peak = {"cuda:1": Peak("cuda:1", 15 * GIB, 14 * GIB, free, None)}
    assert words in text(run(peak=peak))
    assert ("gm-bad" in html(run(peak=peak, ledger=Ledger())).split("</style>")[1]) == (
        free is not None
    )


def test_a_gpu_that_the_code_does_not_use_has_no_line():
    other = run().peak | {"cuda:0": Peak("cuda:0", 2 * GIB, 0, 9 * GIB, None)}
    assert text(run(peak=other)) == text(run())
    assert "cuda:0: at least 0 B" in text(run(peak=other, device="cuda:0"))
    assert "cuda:0" not in text(run(peak={"cuda:0": other["cuda:0"]}))
    assert "cuda:0: at least 0 B" in text(run(peak={"cuda:0": other["cuda:0"]}, device=""))


def test_long_lists_are_folded():
    many = tuple(Assigned(f"v{n}", "int") for n in range(30))
    assert "    and 18 more" in text(run(assigned=many))
    assert "<summary>assigns: 30</summary>" in html(run(assigned=many))


def test_the_cpu_is_shown_where_the_code_runs_there():
    peak = {"cpu": Peak("cpu", 512, 512, GIB, None)}
    assert "cpu: at least 512 B of 1.0 GiB free" in text(run(device="cpu", peak=peak))
    assert "cpu:" not in text(run(peak=peak))


def test_html_is_escaped():
    place = UserLine(1, "<script>")
    shown = html(run(unknown=(Unknown(place, "<b>", True),), assigned=(Assigned("<i>", "<u>"),)))
    for word in ("<script>", "<b>&", "<i>", "<u>"):
        assert word not in shown.split("</style>")[1]
