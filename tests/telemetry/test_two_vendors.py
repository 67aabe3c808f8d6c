"""A machine with NVIDIA's library, as the stand-in plays it, and AMD's files, in one snapshot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from machines import GIB, radeon_and_apu

_TAKE = """
os.environ["GPUMAGIC_SOURCES"] = {sources!r}
from gpumagic import snapshot
print(snapshot().to_json())
"""


def taken(stand_in: Any, root: Path, machine: dict[str, object]) -> dict[str, Any]:
    program = _TAKE.format(sources=f"nvml,amd:{root}")
    return json.loads(stand_in.run(program, machine))


def test_both_are_in_one_snapshot(stand_in: Any, tmp_path: Path) -> None:
    radeon_and_apu(tmp_path)
    found = taken(stand_in, tmp_path, {"gpus": 2, "gpu.*.used": 3 * GIB})
    assert found["source"] == "nvml+amd"
    assert (found["driver"], found["software"]) == ("580.159.04", ["amdgpu"])
    assert [(gpu["vendor"], gpu["index"], gpu["ordinal"]) for gpu in found["gpus"]] == [
        ("nvidia", 0, 0),
        ("nvidia", 1, 1),
        ("amd", 0, None),
        ("amd", 1, None),
    ]
    assert [gpu["memory_used"] // GIB for gpu in found["gpus"]] == [3, 3, 9, 0]
    assert found["problems"] == []


@pytest.mark.parametrize(
    ("machine", "codes"),
    [
        ({"gpus": 1, "fail.nvmlInitWithFlags": 9}, ["none-visible"]),  # no driver: just no GPU
        ({"gpus": 1, "fail.nvmlInitWithFlags": 18}, ["version-mismatch", "none-visible"]),
        ({"gpus": 0}, ["none-visible"]),
    ],
)
def test_nvidias_faults_lose_none_of_amds(
    stand_in: Any, tmp_path: Path, machine: dict[str, object], codes: list[str]
) -> None:
    radeon_and_apu(tmp_path)
    found = taken(stand_in, tmp_path, machine)
    assert [gpu["vendor"] for gpu in found["gpus"]] == ["amd", "amd"]
    assert [problem["code"] for problem in found["problems"]] == codes


def test_amds_faults_lose_none_of_nvidias(stand_in: Any, tmp_path: Path) -> None:
    (tmp_path / "sys/class/drm/card0/device").mkdir(parents=True)
    (tmp_path / "sys/class/drm/card1").write_text("")
    found = taken(stand_in, tmp_path, {"gpus": 1})
    assert [gpu["vendor"] for gpu in found["gpus"]] == ["nvidia"]
    assert found["problems"] == []
