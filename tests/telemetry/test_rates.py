"""A counter of Intel's driver to a rate: by the clock, and never what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import arc, write

from gpumagic.device import TorchBuild
from gpumagic.telemetry import Host, drm_source
from gpumagic.telemetry.drm_source import IntelSource


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def moved_by_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drm_source, "time", CLOCK)


class At:
    """A card with a counter of energy that a test sets, as it sets the clock."""

    def __init__(self, root: Path) -> None:
        self.card, _ = arc(root)
        self.source = IntelSource(root, build=TorchBuild)

    def power(self, joules: float | None, now: float) -> Any:
        """Watts: the increase of the counter."""
        CLOCK.now = now
        text = "" if joules is None else int(joules * 1e6)
        write(self.card, {"hwmon/hwmon2/energy1_input": text})
        (gpu,) = self.source.gpus(Host())
        return gpu.power


def test_the_increase_over_the_time(tmp_path: Path) -> None:
    at = At(tmp_path)
    assert at.power(100, 10.0) is None
    assert at.power(400, 11.5) == 200
    assert at.power(400, 12.0) == 0


def test_a_reset_and_a_pause_are_not_known(tmp_path: Path) -> None:
    at = At(tmp_path)
    at.power(2**30, 1.0)
    assert at.power(5, 2.0) is None
    assert at.power(10, 3.0) == 5
    assert at.power(20, 300.0) is None
    assert at.power(None, 301.0) is None
    assert at.power(40, 302.0) is None


def test_more_than_is_possible_is_not_known(tmp_path: Path) -> None:
    at = At(tmp_path)
    at.power(0, 1.0)
    assert at.power(2001, 2.0) is None


@given(st.lists(st.integers(0, 2**40), max_size=9))
def test_never_negative_and_never_too_much(tmp_path_factory: Any, values: list[int]) -> None:
    at = At(tmp_path_factory.mktemp("arc"))
    for second, value in enumerate(values):
        power = at.power(value, float(second))
        assert power is None or 0 <= power <= 2000
