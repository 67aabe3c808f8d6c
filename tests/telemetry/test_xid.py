"""Xid errors in words, for ten minutes."""

from __future__ import annotations

import pytest

from gpumagic.telemetry import GpuSample
from gpumagic.telemetry.nvml_source import XidLog

GPU = GpuSample("GPU-1", "H100", 3)


@pytest.mark.parametrize("number", [13, 31, 43, 45, 48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 777])
def test_every_number_has_a_cause_and_a_cure(number: int) -> None:
    log = XidLog()
    log.add([("GPU-1", number)], 100.0)
    (problem,) = log.problems([GPU], 101.0)
    assert (problem.code, problem.uuid) == ("xid", "GPU-1")
    assert problem.cause.startswith(f"H100 (NVML 3) reported Xid {number}: ")
    assert problem.cure
    assert "{" not in problem.cure
    assert log.last("GPU-1") == (number, 100.0)


def test_a_problem_for_ten_minutes_and_once_per_number() -> None:
    log = XidLog()
    log.add([("GPU-1", 13), ("GPU-1", 13), ("GPU-1", 31)], 100.0)
    log.add([("GPU-1", 13)], 400.0)
    assert len(log.problems([GPU], 500.0)) == 2
    assert len(log.problems([GPU], 900.0)) == 1
    assert log.problems([GPU], 1001.0) == []
    assert log.last("GPU-1") == (13, 400.0)
    assert log.last("GPU-2") == (None, None)


def test_of_gpus_that_are_there() -> None:
    log = XidLog()
    log.add([("GPU-2", 79)], 100.0)
    assert log.problems([GPU], 100.0) == []
