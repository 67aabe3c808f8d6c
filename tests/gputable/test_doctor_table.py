from __future__ import annotations

from gpumagic.gputable.gpu_table import DoctorTable
from gpumagic.telemetry.doctor import Check

CHECKS = [
    Check("card", True, "1 on the bus"),
    Check("driver", False, "not <loaded>", "modprobe nvidia"),
    Check("Python", None, "3.13 " + "at some place " * 20),
]


def test_text() -> None:
    lines = str(DoctorTable(CHECKS)).splitlines()
    assert lines[0] == "✓ card    1 on the bus"
    assert lines[1] == "✗ driver  not <loaded>"
    assert lines[2] == "          → modprobe nvidia"
    assert lines[3].startswith("· Python  3.13 at")
    assert all(len(line) <= 100 for line in lines)


def test_html_is_escaped_and_says_the_cure() -> None:
    html = DoctorTable(CHECKS)._repr_html_()
    assert "not &lt;loaded&gt;" in html
    assert "→ modprobe nvidia" in html
    assert html.count("✓") == html.count("✗") == 1


def test_nothing_checked_is_nothing_said() -> None:
    assert str(DoctorTable([])) == ""
