"""No machine's files, however broken, make a source fail, or tell what cannot be."""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import arc, kfd_process, mac, mi300x, opened, radeon_and_apu
from snapshots import snapshot_in

from gpumagic import faults
from gpumagic.device import TorchBuild, amd_gpus, intel_gpus
from gpumagic.telemetry import Snapshot
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.doctor import Doctor
from gpumagic.telemetry.drm_source import AmdSource, IntelSource
from gpumagic.telemetry.sampler import Sampler
from gpumagic.telemetry.source import AppleSource

MACHINES: tuple[Callable[[Path], object], ...] = (
    lambda root: mi300x(root, 1),
    radeon_and_apu,
    arc,
)
NUMBERS = [
    "",
    "-1",
    "0",
    "101",
    "99999999999999999999999",
    "1e9",
    "NaN",
    "0x10",
    "١٢",
    "7 8",
    "5\n5\n5",
]


def gone(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("../nowhere")


def is_now(content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        if path.is_file():
            path.write_bytes(content)

    return change


changes = st.one_of(
    st.sampled_from([gone, folder, loop, elsewhere]),
    st.sampled_from(NUMBERS).map(lambda text: is_now(text.encode())),
    st.binary(max_size=60).map(is_now),
)


def believable(snapshot: Snapshot) -> None:
    assert [p.code for p in snapshot.problems if p.code == "source-failed"] == []
    assert snapshot_in(snapshot.to_json()) == snapshot
    for gpu in snapshot.gpus:
        for percent in (gpu.utilization, gpu.memory_utilization, gpu.fan):
            assert percent is None or 0 <= percent <= 100
        for count in (gpu.memory_total, gpu.memory_used, gpu.power, gpu.sm_clock, gpu.pcie_width):
            assert count is None or count >= 0
    for process in snapshot.processes:
        assert process.memory is None or process.memory >= 0
        assert process.utilization is None or 0 <= process.utilization <= 100


@given(
    build=st.sampled_from(MACHINES),
    broken=st.lists(st.tuples(st.integers(0, 10**6), changes), min_size=1, max_size=30),
    at_once=st.booleans(),
)
def test_no_files_make_a_source_fail(
    build: Callable[[Path], object],
    broken: list[tuple[int, Callable[[Path], None]]],
    at_once: bool,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        build(root)
        kfd_process(root, 5, {1000: 2**30})
        size = {"drm_memory_vram": "8 KiB", "drm_resident_vram0": "8 MiB"}
        opened(root, 5, 3, "0000:03:00.0", 1, drm_engine_gfx="5 ns", **size)
        opened(root, 6, 3, "0000:03:00.0", 2, drm_cycles_ccs=5, drm_total_cycles_ccs=9, **size)
        sources = [AmdSource(root), IntelSource(root, build=lambda: TorchBuild(xpu="1"))]
        collector = Collector(sources, here=list, usable=False)
        if not at_once:
            believable(collector.take())
        files = sorted(path for path in root.rglob("*") if path.is_symlink() or path.is_file())
        for number, change in broken:
            path = files[number % len(files)]
            if path.is_symlink() or path.is_file():
                change(path)
        for _ in range(2):
            believable(collector.take())
        assert isinstance(amd_gpus({}, root) + intel_gpus({}, root), list)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpumagic.device.torch_build", lambda: TorchBuild(hip="6.2"))
            checks = Doctor(root, {}).checks()
        wrong = {check.name for check in checks if check.ok is False}
        assert len(wrong - {"torch", "state files"}) <= 2, "a first cause for each vendor"
        assert faults.all_kept() == []


@pytest.mark.parametrize("said", [b"", b"<?xml", b"bplist00", mac()])
@given(cut=st.integers(0, 2000), flipped=st.integers(0, 2000))
def test_what_ioreg_prints_is_a_gpu_or_a_problem(said: bytes, cut: int, flipped: int) -> None:
    changed = bytearray(said[: max(len(said) - cut, 0)])
    if changed:
        changed[flipped % len(changed)] ^= 0xFF
    source = AppleSource(lambda: bytes(changed))
    snapshot = Collector([source], here=list, usable=False).take()
    assert len(snapshot.gpus) + len(snapshot.problems) == 1
    for gpu in snapshot.gpus:
        assert gpu.utilization is None or 0 <= gpu.utilization <= 100
    faults.forget()


def test_a_read_that_hangs_is_told_with_what_was_known(tmp_path: Path) -> None:
    device, _ = radeon_and_apu(tmp_path)
    file, pipe, other = (device / name for name in ("gpu_busy_percent", "pipe", "other"))
    shutil.copy(file, other)
    heard: queue.Queue[Snapshot] = queue.Queue()
    sampler = Sampler(Collector([AmdSource(tmp_path)], here=list, usable=False), stalled_s=0.1)

    def until(codes: list[str]) -> Snapshot:
        while True:
            snapshot = heard.get(timeout=30)
            if [problem.code for problem in snapshot.problems] == codes:
                return snapshot

    with sampler.subscribe(heard.put, period_s=0.25):
        assert until([]).gpus[0].utilization == 97.0
        os.mkfifo(pipe)
        os.link(pipe, tmp_path / "end")
        pipe.replace(file)
        stalled = until(["stalled"])
        assert stalled.gpus[0].utilization == 97.0
        assert stalled.gpus[0].age > 0
        assert "a GPU's driver has not answered" in stalled.problems[0].cause
        other.replace(file)
        (tmp_path / "end").write_text("12\n")
        assert until([]).gpus[0].age == 0
    sampler.close()
