"""What is said of a cell that several devices have shared."""

from dataclasses import replace

import pytest

from gpumagic.cluster.devices_report import DevicesReport, DeviceTime, PartsDone
from gpumagic.device import Device

KIB = 2**10
GPUS = tuple(Device("cuda", ordinal=n) for n in range(2))
PLAIN = DevicesReport(
    (DeviceTime(GPUS[0], 1.0, None, 1), DeviceTime(GPUS[1], 2.0, None, 1)), 2.1, "17 x: 9 + 8"
)


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (PLAIN, "cuda:0, cuda:1 · 2.1 s (cuda:1 the slowest, 2.0 s) · 17 x: 9 + 8"),
        (
            replace(
                PLAIN,
                devices=(DeviceTime(GPUS[0], 1.0, KIB, 1), DeviceTime(GPUS[1])),
                sent=("net", "x"),
                sent_bytes=2 * KIB,
                sent_seconds=0.01,
                made=("gathered y",),
                notes=("y: copied without its autograd graph",),
            ),
            "cuda:0, cuda:1 · 2.1 s (cuda:1 had nothing to do) · 17 x: 9 + 8 · sent net, x: 2.0 KiB"
            " in 10 ms · gathered y · peak 1.0 KiB on cuda:0\n"
            "  → y: copied without its autograd graph",
        ),
    ],
)
def test_the_line(report, line):
    assert repr(report).replace("2.10 s", "2.1 s").replace("2.00 s", "2.0 s") == line
    html = report._repr_html_()
    assert "17 x: 9 + 8" in html
    assert "N/A" in html


def test_how_far_it_is():
    done = PartsDone(3, 12, "cuda:0, cuda:1")
    assert (str(done), done.share) == ("cuda:0, cuda:1: 3 of 12 parts", 0.25)
