"""What is said of a cell that ranks, or several devices of this process, have shared."""

from dataclasses import replace

import pytest

from gpumagic.cluster.output import RanksReport, RankTime, sent_in_words

KIB = 2**10
PLAIN = RanksReport((RankTime("cuda:0", 1.0), RankTime("cuda:1", 2.5)), 2.6, ("17 x: 9 + 8",))
RANKS = replace(PLAIN, ranks=(RankTime("rank 0", 1.0, KIB), RankTime("rank 1", 2.5, 3 * KIB)))


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (
            PLAIN,
            "cuda:0, cuda:1 · 2.60 s (slowest: cuda:1, 2.50 s; fastest: cuda:0, 1.00 s)"
            " · 17 x: 9 + 8",
        ),
        (
            RANKS,
            "2 ranks · 2.60 s (slowest: rank 1, 2.50 s; fastest: rank 0, 1.00 s) · 17 x: 9 + 8"
            " · peak 3.0 KiB on rank 1",
        ),
        (replace(RANKS, ranks=RANKS.ranks[1:]), "rank 1 · 2.60 s · 17 x: 9 + 8 · peak 3.0 KiB"),
        (
            replace(
                PLAIN,
                ranks=(
                    RankTime("cuda:0", 1.0, KIB),
                    RankTime("cpu", 0, parts=0),
                ),
                said=("17 x: 9 + 8", sent_in_words(["net", "x"], 2 * KIB, 0.01), "gathered y"),
                notes=("y: copied without its autograd graph",),
            ),
            "cuda:0, cpu · 2.60 s (cpu had no items) · 17 x: 9 + 8 · sent net, x: 2.0 KiB"
            " in 10 ms · gathered y · peak 1.0 KiB\n  → y: copied without its autograd graph",
        ),
    ],
)
def test_the_line(report, line):
    assert repr(report) == line
    html = report._repr_html_()
    assert all(f"{each.name}<" in html for each in report.ranks)
