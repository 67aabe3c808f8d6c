"""AMD's, Intel's and Apple's GPUs, on machines that are a folder of files: each field as it is."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machines import (
    GIB,
    MIB,
    arc,
    kfd_process,
    mac,
    mi300x,
    opened,
    radeon_and_apu,
    write,
)

from gpumagic.device import TorchBuild
from gpumagic.telemetry import GpuSample, Host, ProcessSample, Snapshot, drm_source
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.drm_source import AmdSource, IntelSource
from gpumagic.telemetry.source import AppleSource

HOST = Host("box", memory_total=64 * GIB, memory_used=20 * GIB)
REAL = GpuSample("GPU-r", "NVIDIA H100", 0, memory_total=80 * GIB, memory_used=GIB)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def take(*sources: Any) -> Snapshot:
    owners: Any = SimpleNamespace(
        look_up=lambda pids: {pid: ProcessSample("", pid) for pid in pids}, ordinals={}
    )
    return Collector(sources, owners, tuple, host=lambda: HOST, usable=False).take()


def known(gpu: GpuSample) -> dict[str, Any]:
    """What is told of a GPU; the rest is N/A."""
    blank = vars(GpuSample(gpu.uuid))
    return {name: value for name, value in vars(gpu).items() if value != blank[name]}


def test_eight_mi300x(tmp_path: Path) -> None:
    mi300x(tmp_path)
    kfd_process(tmp_path, 4242, {1007: 3 * GIB, 1000: GIB, 55: 7})
    opened(tmp_path, 4242, 9, "0000:0c:00.0", 7, drm_memory_vram=f"{GIB // 1024} KiB")
    snapshot = take(AmdSource(tmp_path))
    assert snapshot.source == "amd"
    assert (snapshot.driver, snapshot.cuda) == (None, None)
    assert snapshot.software == ("ROCm 6.2.4", "amdgpu 6.8.5")
    assert snapshot.problems == ()
    assert [gpu.index for gpu in snapshot.gpus] == list(range(8))
    assert [gpu.memory_used for gpu in snapshot.gpus] == [n * GIB for n in range(1, 9)]
    assert known(snapshot.gpus[2]) == {
        "name": "AMD Instinct MI300X OAM",
        "vendor": "amd",
        "index": 2,
        "memory_total": 192 * GIB,
        "memory_used": 3 * GIB,
        "utilization": 20.0,
        "memory_utilization": 2.0,
        "temperature": 43.0,
        "temperature_limit": 100.0,
        "power": 140.0,
        "power_limit": 750.0,
        "sm_clock": 132,
        "sm_clock_limit": 2100,
        "memory_clock": 900,
        "ecc_corrected": 2,
        "ecc_uncorrected": 0,
    }
    assert snapshot.gpus[2].uuid == "GPU-eb9f1a5c0c3d1e02"
    # KFD knows more of who computes than fdinfo; what both tell of is not added up.
    assert [(p.uuid, p.pid, p.memory) for p in snapshot.processes] == [
        ("GPU-eb9f1a5c0c3d1e00", 4242, 3 * GIB),
        ("GPU-eb9f1a5c0c3d1e07", 4242, GIB),
    ]


def test_a_radeon_beside_an_apu(tmp_path: Path) -> None:
    radeon_and_apu(tmp_path)
    snapshot = take(AmdSource(tmp_path))
    big, small = snapshot.gpus
    assert snapshot.software == ("amdgpu",)
    assert big.uuid == "GPU-35a4f1c2d8e97b60"
    assert known(big) == {
        "name": "AMD Radeon RX 7900 XTX",
        "vendor": "amd",
        "index": 0,
        "memory_total": 24 * GIB,
        "memory_used": 9 * GIB,
        "utilization": 97.0,
        "memory_utilization": 41.0,
        "temperature": 54.0,
        "temperature_limit": 100.0,
        "power": 205.0,
        "power_limit": 327.0,
        "fan": 40.0,
        "sm_clock": 2365,
        "sm_clock_limit": 2526,
        "memory_clock": 1249,
    }
    # It has no id of its own; its address is one of this machine.
    assert small.uuid == "PCI-0000:11:00.0-5f0c8a52"
    assert known(small) == {
        "name": "AMD Raphael",
        "vendor": "amd",
        "index": 1,
        # The memory set aside for it, and what of the host's it may use.
        "memory_total": 15 * GIB + 512 * MIB,
        "memory_used": 384 * MIB,
        "utilization": 3.0,
        "temperature": 47.0,
        "power": 32.0,
        "sm_clock": 600,
    }


def test_who_holds_a_radeon(tmp_path: Path) -> None:
    radeon_and_apu(tmp_path)
    source = AmdSource(tmp_path)

    lines = {"drm_memory_vram": "2048 KiB", "drm_memory_gtt": "9 MiB"}
    for fd in (4, 5):  # opened once, and duplicated
        opened(tmp_path, 41, fd, "0000:03:00.0", 1, **lines)
    opened(tmp_path, 42, 4, "0000:03:00.0", 1, **lines)  # a child that shares it
    opened(tmp_path, 41, 6, "0000:11:00.0", 1, drm_resident_vram="1 MiB", drm_memory_gtt="1 MiB")
    opened(tmp_path, 43, 3, "0000:03:00.0", 8, drm_memory_vram=0)
    opened(tmp_path, 44, 3, "0000:99:00.0", 9, drm_memory_vram="1 GiB")
    assert {(p.uuid[:7], p.pid): p.memory for p in take(source).processes} == {
        ("GPU-35a", 41): 2 * MIB,
        ("PCI-000", 41): 2 * MIB,
    }


def test_an_arc_with_xe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arc_card, _ = arc(tmp_path)
    clock = Clock()
    monkeypatch.setattr(drm_source, "time", clock)
    source = IntelSource(tmp_path, build=TorchBuild)
    (first,) = take(source).gpus
    assert first.utilization is first.power is None, "rates are known from the second look on"
    clock.now += 2
    write(arc_card, {"tile0/gt0/gtidle/idle_residency_ms": 50_500})
    write(arc_card, {"hwmon/hwmon2/energy1_input": 360_000_000})
    snapshot = take(source)
    assert snapshot.software == ("xe",)
    (gpu,) = snapshot.gpus
    assert known(gpu) == {
        "name": "Intel Arc B580",
        "vendor": "intel",
        "index": 0,
        "utilization": 75.0,
        "temperature": 61.0,
        "power": 135.0,
        "power_limit": 190.0,
        "sm_clock": 2400,
        "sm_clock_limit": 2850,
    }


def test_an_arc_that_slept_was_not_busy_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arc_card, _ = arc(tmp_path)
    clock = Clock()
    monkeypatch.setattr(drm_source, "time", clock)
    source = IntelSource(tmp_path, build=TorchBuild)
    for state, utilization in (("active", None), ("suspended", None), ("active", None)):
        write(arc_card, {"power/runtime_status": state})
        (gpu,) = take(source).gpus
        assert (gpu.utilization, gpu.lost) == (utilization, False)
        clock.now += 5
    assert take(source).gpus[0].utilization == 100.0, "awake all the time, and not idle"


def test_who_computes_on_an_arc(tmp_path: Path) -> None:
    arc(tmp_path)
    size = {"drm_total_vram0": "40 MiB", "drm_resident_vram0": "24 MiB"}
    opened(tmp_path, 7, 5, "0000:03:00.0", 3, drm_resident_gtt="1 MiB", **size)
    (process,) = take(IntelSource(tmp_path, build=TorchBuild)).processes
    assert process.memory == 24 * MIB


def test_the_gpu_in_a_processor_is_listed_where_torch_can_use_it(tmp_path: Path) -> None:
    arc(tmp_path)
    inner, outer = take(IntelSource(tmp_path, build=lambda: TorchBuild(xpu="1"))).gpus
    assert (inner.name, outer.name) == ("Intel UHD Graphics 770", "Intel Arc B580")
    assert known(inner) == {
        "name": "Intel UHD Graphics 770",
        "vendor": "intel",
        "unified": True,
        "index": 0,
        "memory_total": 64 * GIB,
        "memory_used": 20 * GIB,
        "sm_clock": 300,
        "sm_clock_limit": 1550,
    }


def test_two_vendors_in_one_snapshot(tmp_path: Path) -> None:
    radeon_and_apu(tmp_path)
    nvidia: Any = SimpleNamespace(
        name="nvml",
        gpus=lambda host, max_age: [REAL],
        processes=lambda max_age: [ProcessSample("GPU-r", 5, GIB)],
        problems=list,
        software=lambda: {"driver": "580.1", "cuda": "13.0"},
    )
    opened(tmp_path, 41, 4, "0000:03:00.0", 1, drm_memory_vram="2 MiB")
    snapshot = take(nvidia, AmdSource(tmp_path))
    assert snapshot.source == "nvml+amd"
    assert (snapshot.cuda, snapshot.driver, snapshot.software) == ("13.0", "580.1", ("amdgpu",))
    assert [gpu.vendor for gpu in snapshot.gpus] == ["nvidia", "amd", "amd"]
    assert [p.uuid[:6] for p in snapshot.processes] == ["GPU-r", "GPU-35"]


@pytest.mark.parametrize("question", ["gpus", "processes", "problems", "software"])
def test_a_source_that_fails_costs_the_others_nothing(tmp_path: Path, question: str) -> None:
    radeon_and_apu(tmp_path)
    broken: Any = SimpleNamespace(
        name="nvml",
        gpus=lambda host, max_age: [REAL],
        processes=lambda max_age: [],
        problems=list,
        software=dict,
    )
    setattr(broken, question, lambda *arguments: 1 // 0)
    snapshot = take(broken, AmdSource(tmp_path))
    assert [gpu.vendor for gpu in snapshot.gpus if gpu.vendor == "amd"] == ["amd", "amd"]
    (problem,) = snapshot.problems
    assert problem.code == "source-failed"
    assert "the source nvml failed (ZeroDivisionError" in problem.cause


def test_a_mac() -> None:
    source = AppleSource(mac)
    (gpu,) = take(source).gpus
    assert gpu.uuid == "MPS-box"
    assert known(gpu) == {
        "name": "Apple M2 Max",
        "vendor": "apple",
        "index": 0,
        "ordinal": 0,
        "unified": True,
        "memory_total": 64 * GIB,
        "memory_used": 2 * GIB,
        "utilization": 34.0,
    }
    assert (gpu.kind, gpu.called(0)) == ("mps", "mps")


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has the command")
def test_elsewhere_than_on_a_mac_there_is_no_command() -> None:
    assert take(AppleSource()).gpus == ()


def test_a_mac_without_a_gpu_of_apples() -> None:
    assert take(AppleSource(lambda: b"")).gpus == ()


def test_a_mac_whose_figures_are_none() -> None:
    said = mac(**{"Device Utilization %": "many", "In use system memory": -1})
    (gpu,) = take(AppleSource(lambda: said)).gpus
    assert gpu.utilization is gpu.memory_used is None


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read anything, so for a while this is somebody else."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that everybody may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_permission_denied_is_not_known_and_no_lost_gpu(open_folder: Path) -> None:
    device, _ = radeon_and_apu(open_folder)
    closed = [path for path in device.rglob("*") if path.is_file() and path.name != "vendor"]
    for path in closed:
        path.chmod(0)
    opened(open_folder, 41, 4, "0000:03:00.0", 1, drm_memory_vram="2 MiB")
    (open_folder / "proc/41/fd").chmod(0)
    with as_nobody():
        snapshot = take(AmdSource(open_folder))
    big, small = snapshot.gpus
    assert (big.lost, big.memory_used) == (False, None)
    assert small.memory_used == 384 * MIB
    assert snapshot.processes == ()


def without(device: Path, *names: str) -> None:
    for name in names:
        (device / name).unlink()


def emptied(device: Path) -> None:
    for path in device.rglob("*"):
        if path.is_file() and path.name not in ("vendor", "device", "unique_id"):
            path.unlink()


FAULTS: list[tuple[Callable[[Path], object], dict[str, object]]] = [
    (lambda d: without(d, "gpu_busy_percent"), {"utilization": None, "memory_used": 9 * GIB}),
    (lambda d: write(d, {"gpu_busy_percent": 4294967295}), {"utilization": None}),
    (lambda d: write(d, {"gpu_busy_percent": "-22"}), {"utilization": None}),
    (lambda d: write(d, {"mem_info_vram_used": "lots"}), {"memory_used": None, "power": 205.0}),
    (lambda d: write(d, {"mem_info_vram_used": "9" * 5000}), {"memory_used": None}),
    (lambda d: (d / "mem_info_vram_used").write_bytes(b"\xff\0\n"), {"memory_used": None}),
    (lambda d: shutil.rmtree(d / "hwmon"), {"temperature": None, "power": None, "fan": None}),
    (lambda d: write(d, {"hwmon/hwmon3/fan1_max": 0}), {"fan": None}),
    (lambda d: write(d, {"hwmon/hwmon3/power1_cap": 0}), {"power_limit": None}),
    (lambda d: write(d, {"current_link_speed": "Unknown"}), {"pcie_generation": None}),
    (lambda d: write(d, {"current_link_width": 255}), {"pcie_width": None}),
    (lambda d: write(d, {"pp_dpm_sclk": "S: 19Mhz *\n\n0:"}), {"sm_clock_limit": 19}),
    (lambda d: write(d, {"power/runtime_status": "suspended"}), {"power": None, "lost": False}),
    (emptied, {"memory_used": None, "utilization": None, "power": None}),
]


@pytest.mark.parametrize(("break_", "then"), FAULTS)
def test_what_breaks_is_not_known_and_all_else_is(
    tmp_path: Path, break_: Callable[[Path], object], then: dict[str, object]
) -> None:
    device, _ = radeon_and_apu(tmp_path)
    source = AmdSource(tmp_path)
    take(source)
    break_(device)
    snapshot = take(source)
    gpu, other = snapshot.gpus
    assert {name: getattr(gpu, name) for name in then} == then
    assert other.utilization == 3.0


def test_a_gpu_that_is_unplugged_is_not_listed(tmp_path: Path) -> None:
    radeon_and_apu(tmp_path)
    source = AmdSource(tmp_path)
    take(source)
    (tmp_path / "sys/class/drm/card1").unlink()
    (small,) = take(source).gpus
    assert small.memory_used == 384 * MIB


def test_a_model_that_only_the_list_of_pci_ids_knows(tmp_path: Path) -> None:
    device, _ = radeon_and_apu(tmp_path)
    write(device, {"revision": "0x01"})
    big, _ = take(AmdSource(tmp_path)).gpus
    assert big.name == "AMD Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M"
    fresh = tmp_path / "other"
    radeon_and_apu(fresh)
    shutil.rmtree(fresh / "usr")
    big, _ = take(AmdSource(fresh)).gpus
    assert big.name == "AMD GPU 744c"
