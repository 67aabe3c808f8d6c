"""What is said of a cell that ranks, or several devices of this process, have shared."""

from dataclasses import replace

import pytest

from gpumagic.cluster.ranks_report import RanksReport, RankTime

KIB = 2**10
PLAIN = RanksReport(
    (RankTime(0, 1.0, device="cuda:0"), RankTime(1, 2.5, device="cuda:1")), 2.6, "17 x: 9 + 8"
)
RANKS = replace(PLAIN, ranks=(RankTime(0, 1.0, KIB), RankTime(1, 2.5, 3 * KIB)))


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (
            PLAIN,
            "cuda:0, cuda:1 · 2.60 s (cuda:1 took longest, 2.50 s; cuda:0 1.00 s) · 17 x: 9 + 8",
        ),
        (
            RANKS,
            "2 ranks · 2.60 s (rank 1 took longest, 2.50 s; rank 0 1.00 s) · 17 x: 9 + 8"
            " · peak 1.0 KiB on rank 0, 3.0 KiB on rank 1",
        ),
        (replace(RANKS, ranks=RANKS.ranks[1:]), "rank 1 · 2.60 s · 17 x: 9 + 8 · peak 3.0 KiB"),
        (
            replace(
                PLAIN,
                ranks=(
                    RankTime(0, 1.0, KIB, device="cuda:0"),
                    RankTime(1, 0, parts=0, device="cpu"),
                ),
                sent=("net", "x"),
                sent_bytes=2 * KIB,
                sent_seconds=0.01,
                made=("gathered y",),
                notes=("y: copied without its autograd graph",),
            ),
            "cuda:0, cpu · 2.60 s (cpu had nothing to do) · 17 x: 9 + 8 · sent net, x: 2.0 KiB"
            " in 10 ms · gathered y · peak 1.0 KiB\n  → y: copied without its autograd graph",
        ),
    ],
)
def test_the_line(report, line):
    assert repr(report) == line
    html = report._repr_html_()
    assert all(f"{each.name}<" in html for each in report.ranks)
