"""The table of GPUs that are not NVIDIA's: torch's names for them, and no word of CUDA's."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machines import GIB, arc, kfd_process, mac, mi300x, radeon_and_apu

from gpumagic.device import Device, TorchBuild, amd_gpus, intel_gpus
from gpumagic.gputable.gpu_table import GpuTable
from gpumagic.telemetry import Host, ProcessSample
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.drm_source import AmdSource, IntelSource
from gpumagic.telemetry.source import AppleSource


def table(source: Any, *here: Device, processes: bool = False) -> GpuTable:
    owners: Any = SimpleNamespace(
        look_up=lambda pids: {pid: ProcessSample("", pid, user="ada", name="py") for pid in pids},
        ordinals={},
    )
    host = Host("box", memory_total=64 * GIB, memory_used=20 * GIB)
    made = Collector([source], owners, lambda: here, host=lambda: host)
    return GpuTable(made.take(), processes=processes)


def test_rocms_torch_has_them_as_cuda(tmp_path: Path) -> None:
    mi300x(tmp_path, 2)
    kfd_process(tmp_path, os.getpid(), {1000: 2 * GIB})
    shown = table(AmdSource(tmp_path), *amd_gpus({}, tmp_path))
    caption, _, first, second, *_, mine = repr(shown).replace("\n\n", "\n").splitlines()
    assert caption == "box · ROCm 6.2.4 · amdgpu 6.8.5 · 2 GPUs · RAM 20.0 / 64.0 GiB"
    assert first.startswith("cuda:1    0  AMD Instinct MI…")
    assert "1.0 / 192.0 GiB   0 %  41 °C  140 / 750 W" in first
    assert second.startswith("cuda:0    1  AMD Instinct MI…")
    assert mine.split() == ["this", "process", "cuda:0", "2.0", "GiB"] or "system" in mine
    html = shown._repr_html_()
    assert "the number in amd-smi" in html
    for word in ("CUDA", "MIG", "NVIDIA", "nvidia-smi"):
        assert word not in repr(shown) + html


def test_where_torch_cannot_use_them_each_has_its_vendors_number(tmp_path: Path) -> None:
    radeon_and_apu(tmp_path)
    shown = repr(table(AmdSource(tmp_path)))
    assert "not visible    0  AMD Radeon " in shown
    assert "AMD GPU 0 9.0 GiB · AMD GPU 1 384 MiB" in shown
    assert "This process can use none of these GPUs; run %gpus --doctor." in shown
    assert "CUDA" not in shown


def test_intels(tmp_path: Path) -> None:
    arc(tmp_path)
    shown = repr(
        table(IntelSource(tmp_path, build=lambda: TorchBuild(xpu="1")), *intel_gpus({}, tmp_path))
    )
    assert shown.startswith("box · i915 · xe · 2 GPUs")
    assert "xpu:0          1  Intel Arc B580" in shown
    assert "A GPU without memory of its own shows the host's memory." in shown


def test_a_number_that_level_zero_may_have_otherwise(tmp_path: Path) -> None:
    arc(tmp_path)
    (one,) = intel_gpus({}, tmp_path)
    unsure = Device("xpu", 0, one.uuid, ordinal_certain=False)
    shown = repr(table(IntelSource(tmp_path, build=TorchBuild), unsure))
    assert "xpu:0?" in shown
    assert "xpu:N? is uncertain" in shown
    assert "CUDA" not in shown


def test_a_macs() -> None:
    shown = repr(table(AppleSource(mac)))
    assert "mps     Apple M2 Max" in shown
    assert "2.0 / 64.0 GiB  34 %   N/A    N/A" in shown
    assert "memory of its own" not in shown
