"""A cell's report as a line and as HTML."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gpumagic.cell.report import Batches, Report
from gpumagic.device import CPU, Device
from gpumagic.ledger.entry import Memory
from gpumagic.moving.moved import Left, Moved

MIB = 2**20
PLAIN = Report(Device("cuda", ordinal=1), seconds=1.24)
FULL = replace(
    PLAIN,
    moved=(Moved("X", 3 * MIB, ("cpu",)), Moved("net", 1024, ("cuda:0",))),
    move_seconds=0.0031,
    batches=Batches(2, 512),
    memory=(Memory("cuda:0", MIB, 0, 0), Memory("cuda:1", 12 * MIB, MIB, 0)),
)


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (PLAIN, "cuda:1 · 1.24 s"),
        (
            FULL,
            "cuda:1 · 1.24 s · peak 12.0 MiB · cuda:0 peak 1.0 MiB"
            " · moved X, net: 3.0 MiB from cpu, cuda:0 in 3.1 ms · 2 batches: 512 B copied",
        ),
        (replace(PLAIN, batches=Batches(1, 8)), "cuda:1 · 1.24 s · 1 batch: 8 B copied"),
        (replace(PLAIN, error="KeyError"), "cuda:1 · KeyError after 1.24 s"),
        (
            replace(PLAIN, waited=False, fault="lost"),
            "cuda:1 · 1.24 s, not synchronized · the device reports: lost",
        ),
        (
            replace(PLAIN, left=(Left("loss", "autograd tracks it"),)),
            "cuda:1 · 1.24 s · left loss: autograd tracks it",
        ),
        (
            replace(PLAIN, device=replace(CPU, note="asked for GPU 7, which is not here")),
            "cpu: asked for GPU 7, which is not here · 1.24 s",
        ),
    ],
)
def test_the_line(report, line):
    assert str(report) == repr(report) == line


def test_the_line_has_two_clauses_and_the_others_are_behind_it():
    stays = Left("data", "a dataset stays where it is")
    report = replace(FULL, taken=("accelerate's cuda:0",), left=(stays,))
    line, more = str(report).splitlines()
    assert line.endswith(" in 3.1 ms · accelerate's cuda:0 was replaced by cuda:1")
    assert more == "  more: left data: a dataset stays where it is · 2 batches: 512 B copied"
    folded = report._repr_html_().partition("</summary>")
    assert "replaced by" in folded[0]
    assert "<div>left data: a dataset" in folded[2]
    assert "<div>2 batches" in folded[2]
    two = replace(PLAIN, taken=("trainer's cuda:0", "transformers' cuda:0"))
    assert str(two).endswith(" · trainer's cuda:0 and transformers' cuda:0 were replaced by cuda:1")


def test_many_names_are_cut():
    many = replace(PLAIN, moved=tuple(Moved(f"x{n}", 1, ("cpu",)) for n in range(9)))
    assert "moved x0, x1, x2, x3 and 5 more: 9 B" in str(many)


def test_no_time_on_a_virtual_gpu_passes_for_a_gpus():
    virtual = replace(PLAIN, device=Device("cuda", ordinal=0, virtual=True))
    assert str(virtual).startswith("cuda:0 (virtual) · ")
    assert "(virtual)" in virtual._repr_html_()
    on_cpu = replace(virtual, elsewhere="all work was on cpu")  # which is not virtual
    assert str(on_cpu).startswith("asked for cuda:0; all work was on cpu · ")


def test_work_on_another_gpu_is_told_first_as_trouble_and_what_to_do():
    report = replace(PLAIN, elsewhere="96 % of the cell's allocations were on cuda:0")
    first, advice = str(report).splitlines()
    assert first.startswith("asked for cuda:1; 96 % of the cell's allocations were on cuda:0 · ")
    assert advice.endswith("chose that device itself: tell it to use cuda:1")
    assert 'gm-bad">asked for cuda:1; 96 %' in report._repr_html_()
    assert 'gm-bad">' not in PLAIN._repr_html_()


class Words(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.said, self._in_style = [], [], False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._in_style = tag == "style"

    def handle_endtag(self, tag):
        self._in_style = False

    def handle_data(self, data):
        if not self._in_style:
            self.said.append(data)


def test_html_says_the_same_and_folds_the_details():
    words = Words(FULL._repr_html_())
    assert "".join(words.said).startswith(str(FULL))
    assert {"details", "summary", "table"} <= set(words.tags)
    assert "12.0 MiB" in "".join(words.said)
    assert "details" not in Words(PLAIN._repr_html_()).tags
    assert len(FULL._repr_html_()) < 3000  # each report of a saved notebook brings it


def test_html_is_escaped():
    evil = replace(PLAIN, left=(Left("<img src=x>", "<script>alert(1)</script>"),))
    tags = Words(evil._repr_html_()).tags
    assert "img" not in tags
    assert "script" not in tags
