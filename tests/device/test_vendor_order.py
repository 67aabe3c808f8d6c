"""Which of AMD's and Intel's GPUs torch has, in which order, by the rules of HIP and Level Zero."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import GIB, arc, kfd_node, mi300x, radeon_and_apu

from gpumagic import device
from gpumagic.device import TorchBuild, discover
from gpumagic.device.discover import read_build
from gpumagic.errors import GpuError

FIRST, LAST = "GPU-eb9f1a5c0c3d1e00", "GPU-eb9f1a5c0c3d1e07"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    device.set_cuda_order(None)


def torch_for(monkeypatch: pytest.MonkeyPatch, root: Path, **build: str) -> None:
    """This process has a torch that was built for this, on the machine in that folder."""
    monkeypatch.setattr(discover, "torch_build", lambda: TorchBuild(**build))
    for name in ("amd_gpus", "intel_gpus"):
        real = getattr(discover, name)
        monkeypatch.setattr(discover, name, lambda env, real=real: real(env, root))
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mi300x")
    mi300x(root)
    return root


@pytest.mark.parametrize(
    ("env", "indices"),
    [
        ({}, [7, 6, 5, 4, 3, 2, 1, 0]),  # ROCm's first is the last on the PCI bus
        ({"ROCR_VISIBLE_DEVICES": "0,2"}, [7, 5]),
        ({"ROCR_VISIBLE_DEVICES": f"1,{FIRST}"}, [6, 0]),
        ({"ROCR_VISIBLE_DEVICES": "0,2,4", "HIP_VISIBLE_DEVICES": "2,0"}, [3, 7]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "5"}, [6]),
        ({"CUDA_VISIBLE_DEVICES": "5"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "3,9,0"}, [4]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "2,2,1"}, [5, 6]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-eb9f"}, []),  # eight of them begin so
    ],
)
def test_what_hip_shows(eight: Path, env: dict[str, str], indices: list[int]) -> None:
    found = device.amd_gpus(env, eight)
    assert [gpu.index for gpu in found] == indices
    assert [str(gpu) for gpu in found] == [f"cuda:{n}" for n in range(len(indices))]


def test_a_gpu_that_rocm_cannot_use_has_no_number(tmp_path: Path) -> None:
    radeon_and_apu(tmp_path)
    assert device.amd_gpus({}, tmp_path) == []
    kfd_node(tmp_path, 1, 5678, "0000:03:00.0")
    (gpu,) = device.amd_gpus({}, tmp_path)
    assert (gpu.uuid, gpu.memory_total, gpu.memory_free) == (
        "GPU-35a4f1c2d8e97b60",
        24 * GIB,
        15 * GIB,
    )


def test_rocms_torch_says_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mi300x(tmp_path, 2)
    torch_for(monkeypatch, tmp_path, hip="6.2.41134")
    assert device.resolve_one("1").uuid == FIRST
    assert device.resolve_one("cuda").uuid == device.resolve_one("gpu:0").uuid != FIRST
    assert device.resolve_one(FIRST.lower()).ordinal == 1
    assert device.resolve_one("free").ordinal == 1, "the one with more free memory"
    with pytest.raises(GpuError) as caught:
        device.resolve("cuda:7")
    assert str(caught.value).startswith(
        "no cuda:7: there are cuda:0 and cuda:1 (AMD Instinct MI300X OAM); type 0, 1, cpu"
    )
    with pytest.raises(GpuError, match=r"no xpu:0: there are cuda:0 and cuda:1 \(AMD"):
        device.resolve("xpu:0")


def test_xpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arc(tmp_path)
    torch_for(monkeypatch, tmp_path, xpu="20250101")
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
    (gpu,) = device.here()
    assert (str(gpu), gpu.name) == ("xpu:0", "Intel Arc B580")
    for where in ("xpu", "xpu:0", "XPU:0", "0", "gpu", "all", str(gpu.uuid)[:12]):
        assert device.resolve_one(where) == gpu
    with pytest.raises(
        GpuError, match=r"no cuda:0: there is only xpu:0 \(Intel Arc B580\); type 0"
    ):
        device.resolve("cuda:0")
    assert "xpu:0" in device.complete("x")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1")
    assert device.here() == []


def test_without_a_card_xpu_is_the_processors(tmp_path: Path) -> None:
    arc(tmp_path)
    (tmp_path / "sys/class/drm/card1").unlink()
    (gpu,) = device.intel_gpus({}, tmp_path)
    assert (str(gpu), gpu.name) == ("xpu:0", "Intel UHD Graphics 770")


def test_a_tile_of_a_card_is_the_card(tmp_path: Path) -> None:
    arc(tmp_path)
    assert len(device.intel_gpus({"ZE_AFFINITY_MASK": "0.1"}, tmp_path)) == 1


@pytest.mark.parametrize("where", ["xpu", "xpu:1", "xpu:1?", "PCI-0000:03:00.0"])
def test_what_is_a_where(where: str) -> None:
    assert device.is_where(where)


def test_what_torch_was_built_for() -> None:
    text = (
        "__version__ = '2.8.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4.4'\n"
    )
    assert read_build(text) == TorchBuild(hip="6.4.4")
    assert read_build("cuda = '12.8'\nhip = None\n") == TorchBuild(cuda="12.8")
    assert read_build("") == TorchBuild()


def test_the_torch_that_is_installed() -> None:
    import torch

    build = device.torch_build()
    assert (build.cuda, build.hip) == (torch.version.cuda, torch.version.hip)
