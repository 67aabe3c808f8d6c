"""Which sources are asked for GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from machines import radeon_and_apu

from gpumagic.telemetry import GpuSample
from gpumagic.telemetry.collect import Collector, chosen


def names(setting: str, platform: str = "linux") -> tuple[list[str], list[str]]:
    sources, problems = chosen({"GPUMAGIC_SOURCES": setting}, platform)
    return [source.name for source in sources], [problem.cause for problem in problems]


def test_all_that_a_machine_can_have_are_asked() -> None:
    assert names("") == (["nvml", "amd", "intel"], [])
    assert names(" , ") == names("")
    assert names("", "darwin") == (["nvml", "apple"], [])


def test_those_that_are_named_are_asked() -> None:
    assert names("amd") == (["amd"], [])
    assert names("nvml, apple") == (["nvml", "apple"], [])


def test_a_source_of_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("theirs")
    theirs.make = lambda: SimpleNamespace(name="tpu")  # type: ignore[attr-defined]
    theirs.fails = lambda: 1 // 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    assert names("nvml,theirs:make") == (["nvml", "tpu"], [])
    found, (cause,) = names("theirs:fails,nvml")
    assert found == ["nvml"]
    assert "'theirs:fails', which is not a source (ZeroDivisionError" in cause


@pytest.mark.parametrize("name", ["rocm", "amd:relative", "nowhere.at.all:make", "nvml:", "a:b c"])
def test_what_is_no_source_is_one_line_of_what_there_is(name: str) -> None:
    sources, (problem,) = chosen({"GPUMAGIC_SOURCES": f"{name},nvml"})
    assert [source.name for source in sources] == ["nvml"]
    assert problem.cause.startswith(f"GPUMAGIC_SOURCES names {name!r}, which is not a source")
    assert problem.cure.startswith("use nvml, amd, intel, apple or package.module")
    assert "\n" not in problem.cause + problem.cure


def test_a_misnamed_source_is_told_and_the_files_of_a_mounted_host_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    radeon_and_apu(tmp_path)
    monkeypatch.setenv("GPUMAGIC_SOURCES", f"amd:{tmp_path},rocm")
    snapshot = Collector(here=list, usable=False).take()
    assert [gpu.vendor for gpu in snapshot.gpus] == ["amd", "amd"]
    assert [problem.code for problem in snapshot.problems] == ["source-unknown"]


def test_of_two_that_tell_of_one_gpu_the_first_is_taken() -> None:
    def source(name: str, utilization: float) -> Any:
        gpu = GpuSample(index=0, uuid="GPU-1", name="H200", utilization=utilization)
        return SimpleNamespace(
            name=name,
            gpus=lambda host, max_age: [gpu],
            processes=lambda max_age: [],
            problems=list,
            software=dict,
        )

    snapshot = Collector([source("a", 42.5), source("b", 7.0)], here=list, usable=False).take()
    assert [gpu.utilization for gpu in snapshot.gpus] == [42.5]
