from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.display.units import age, duration, fine, rate, share, size, times


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "N/A"),
        (0, "0 B"),
        (80, "80 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (512 * 2**20, "512 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (int(1.2 * 2**30), "1.2 GiB"),
        (141 * 2**30, "141 GiB"),
        (-3 * 2**20, "-3.0 MiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_size(count: int | None, text: str) -> None:
    assert size(count) == text


@given(st.integers(0, 2**59))
def test_a_size_is_short_and_near(count: int) -> None:
    number, unit = size(count).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert len(number) <= 4
    assert abs(float(number) * scale - count) <= 0.051 * scale + 0.006 * count


@pytest.mark.parametrize(
    ("used", "total", "text"),
    [
        (None, None, "N/A"),
        (5 * 2**30, None, "5.0 GiB"),
        (None, 24 * 2**30, "N/A / 24.0 GiB"),
        (0, 24 * 2**30, "0.0 / 24.0 GiB"),
        (2**20, 512 * 2**20, "1.0 / 512.0 MiB"),
        (2**40, 2 * 2**40, "1024 / 2048 GiB"),
    ],
)
def test_share(used: int | None, total: int | None, text: str) -> None:
    assert share(used, total) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "N/A"),
        (0, "0 ns"),
        (120e-9, "120 ns"),
        (45e-6, "45 µs"),
        (3.14e-3, "3.1 ms"),
        (31.4e-3, "31 ms"),
        (0.9999, "1.00 s"),
        (1.24, "1.24 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3660, "1 h 1 min"),
        (-0.002, "−2.0 ms"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (4.9, "4 s"),
        (500, "8 min"),
        (7500, "2 h 5 min"),
        (400_000, "4 d 15 h"),
    ],
)
def test_age(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (fine, None, "N/A"),
        (fine, 0, "0 s"),
        (fine, 1.1e-3, "1.10 ms"),
        (fine, 12.44e-3, "12.4 ms"),
        (fine, 448.4e-6, "448 µs"),
        (fine, 999.6e-6, "1.00 ms"),
        (fine, 120.4e-9, "120 ns"),
        (fine, 3.4e-10, "0 ns"),
        (fine, 59.9, "59.9 s"),
        (fine, 125, "2 min 5 s"),
        (rate, 448, "448 /s"),
        (rate, 80_600, "80.6 k/s"),
        (rate, 0.05, "0.05 /s"),
        (times, 1.0, "1.00 ×"),
        (times, 1.004, "1.004 ×"),
        (times, 1.3249, "1.32 ×"),
        (times, 11.26, "11.3 ×"),
        (times, 1240.4, "1,240 ×"),
        (times, 0.125, "0.12 ×"),
    ],
)
def test_what_is_compared_has_three_digits(show, value, text) -> None:
    assert show(value) == text


@given(st.floats(1e-7, 59))
def test_three_digits_are_within_half_a_percent(seconds: float) -> None:
    number, unit = fine(seconds).split()
    scale = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(seconds, rel=5.1e-3)
