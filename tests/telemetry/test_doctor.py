"""The doctor, on machines that are a folder with a few files."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machines import arc, mac, mi300x

from gpumagic import nvml
from gpumagic.device import TorchBuild
from gpumagic.errors import Problem
from gpumagic.telemetry import doctor
from gpumagic.telemetry.doctor import Check, Doctor
from gpumagic.telemetry.source import AppleSource

GPU = SimpleNamespace(uuid="GPU-1", index=0, name="H100", parent=None, memory_total=None)


def look(
    root: Path,
    *,
    gpus: tuple[object, ...] = (),
    fault: Problem | None = None,
    installed: dict[str, str] | None = None,
    build: TorchBuild = TorchBuild(cuda="13.0"),  # noqa: B008  it does not change
    apple: bytes = b"",
    **env: str,
) -> dict[str, Check]:
    door: Any = SimpleNamespace(
        gpus=lambda: gpus, fault=fault, lost={}, system=lambda _: "580.1", retry=lambda: None
    )

    def version(name: str) -> str:
        try:
            return (installed or {})[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    mac_gpu = AppleSource(lambda: apple)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvml, "shared_nvml", lambda: door)
        patch.setattr(metadata, "version", version)
        patch.setattr("gpumagic.device.torch_build", lambda: build)
        patch.setattr(doctor, "AppleSource", lambda: mac_gpu)
        return {check.name: check for check in Doctor(root, env).checks()}


def machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_anything(tmp_path: Path) -> None:
    found = look(tmp_path, fault=Problem("library-missing", "no driver", "install it"))
    assert found["NVIDIA card"].ok is False
    # What follows from that is told, and is nothing to be done about.
    assert (found["NVML"].ok, found["NVML"].cure) == (None, "")
    assert found["NVML"].found == "no driver"
    assert [check.name for check in found.values() if check.cure] == ["NVIDIA card"]
    assert "%gpus --virtual 2" in found["NVIDIA card"].cure
    assert found["torch"].ok is None


@pytest.mark.parametrize("shut", ["a file", "x" * 300])
def test_a_runtime_directory_that_cannot_be_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shut: str
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("GPUMAGIC_RUNTIME_DIR", str(tmp_path / shut / "runtime"))
    found = look(tmp_path)["state files"]
    assert found.ok is (shut != "a file")
    assert found.ok or found.found.startswith(f"{tmp_path / shut} cannot be written")


def test_a_machine_with_everything(tmp_path: Path) -> None:
    machine(
        tmp_path,
        sys__bus__pci__devices__0__vendor="0x10de\n",
        sys__bus__pci__devices__0__class="0x030200\n",
        sys__bus__pci__devices__1__vendor="0x10de\n",
        sys__bus__pci__devices__1__class="0x040300\n",
    )
    found = look(tmp_path, gpus=(GPU,), installed={"torch": "2.13.0+cu128"})
    assert not [check for check in found.values() if check.ok is False]
    assert found["NVIDIA card"].found == "1 on the PCI bus"
    assert found["NVML"].found == "driver 580.1: H100"
    assert found["torch"].found == "2.13.0+cu128"
    assert not any(check.cure for check in found.values())


CARD = {
    "sys__bus__pci__devices__0__vendor": "0x10de\n",
    "sys__bus__pci__devices__0__class": "0x030200\n",
}
MISSING = Problem("library-missing", "no driver", "install it")


def red(found: dict[str, Check]) -> list[str]:
    return [check.name for check in found.values() if check.ok is False]


def test_the_first_cause_alone_is_wrong_and_has_a_cure(tmp_path: Path) -> None:
    assert red(look(tmp_path, fault=MISSING)) == ["NVIDIA card"]
    machine(tmp_path, **CARD)
    found = look(tmp_path, fault=MISSING)
    assert red(found) == ["NVML"]
    assert found["NVML"].cure == MISSING.cure


def test_a_driver_that_answers_is_believed_whatever_is_not_seen(tmp_path: Path) -> None:
    """In a container or a virtual machine there may be no PCI bus to look at."""
    found = look(tmp_path, gpus=(GPU,))
    assert red(found) == []
    assert found["NVIDIA card"].found == "none on the PCI bus"
    found = look(tmp_path)
    assert red(found) == ["NVML"]
    assert "nvidia-smi" in found["NVML"].cure
    versions = Problem("version-mismatch", "two versions", "restart")
    found = look(tmp_path, fault=versions)
    assert [found[name].cure for name in red(found)] == ["restart"]


def test_a_container_is_named(tmp_path: Path) -> None:
    machine(tmp_path, **CARD, **{".dockerenv": ""})
    assert look(tmp_path, fault=MISSING)["runs in"].found == "a container"


def test_wsl_has_no_pci_bus(tmp_path: Path) -> None:
    machine(tmp_path, proc__sys__kernel__osrelease="5.15-microsoft-standard-WSL2")
    found = look(tmp_path, fault=MISSING)
    assert "NVIDIA card" not in found
    assert red(found) == ["NVML"]
    assert found["runs in"].found == "WSL"


def test_a_build_of_torch_without_cuda_beside_a_gpu(tmp_path: Path) -> None:
    installed = {"torch": "2.13.0+cpu"}
    assert look(tmp_path, gpus=(GPU,), installed=installed, build=TorchBuild())["torch"].ok is False
    assert look(tmp_path, installed=installed, build=TorchBuild())["torch"].ok is True


def test_visible_devices(tmp_path: Path) -> None:
    name = "CUDA_VISIBLE_DEVICES"
    assert name not in look(tmp_path, gpus=(GPU,))
    assert look(tmp_path, gpus=(GPU,), CUDA_VISIBLE_DEVICES="0")[name].ok is True
    assert look(tmp_path, gpus=(GPU,), CUDA_VISIBLE_DEVICES="1")[name].ok is False
    assert look(tmp_path, CUDA_VISIBLE_DEVICES="1")[name].ok is None


ROCM = TorchBuild(hip="6.2.41134")
ON_ROCM = {"torch": "2.8.0+rocm6.2"}


def may_open_all_but(monkeypatch: pytest.MonkeyPatch, *closed: str) -> None:
    """Not by their mode, for root may open them all."""
    monkeypatch.setattr(os, "access", lambda path, mode, **more: Path(path).name not in closed)


def test_an_amd_machine_with_everything(tmp_path: Path) -> None:
    mi300x(tmp_path)
    found = look(tmp_path, fault=MISSING, installed=ON_ROCM, build=ROCM)
    assert red(found) == []
    assert not [name for name in found if "NVIDIA" in name or name in ("NVML", "nvidia-ml-py")]
    assert found["AMD GPU"].found == "8 on the PCI bus: AMD Instinct MI300X OAM"
    assert found["amdgpu"].found == "6.8.5"
    assert found["/dev/kfd"].found == "/dev/kfd"
    assert not any("NVIDIA" in check.found + check.cure for check in found.values())


def no_driver(root: Path) -> None:
    for device in (root / "sys/devices/pci0000:00").iterdir():
        (device / "driver").unlink()


@pytest.mark.parametrize(
    ("wrong", "name", "says", "cure"),
    [
        (("no module",), "amdgpu", "0000:0c:00.0 has no driver", "sudo modprobe amdgpu"),
        (("no driver",), "amdgpu", "0000:0c:00.0 has no driver", "sudo dmesg | grep amdgpu"),
        (("no kfd",), "/dev/kfd", "no /dev/kfd", "sudo dmesg"),
        (("no kfd", "container"), "/dev/kfd", "no /dev/kfd", "--device /dev/kfd"),
        (("kfd",), "/dev/kfd", "this user may not open /dev/kfd", "usermod -aG"),
        (("kfd", "container"), "/dev/kfd", "may not open /dev/kfd", "--group-add"),
        (("renderD129",), "/dev/dri", "may not open /dev/dri/renderD129", "usermod -aG"),
    ],
)
def test_rocms_usual_faults(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: tuple[str, ...],
    name: str,
    says: str,
    cure: str,
) -> None:
    mi300x(tmp_path, 2)
    if "container" in wrong:
        machine(tmp_path, **{".dockerenv": ""})
    if "no kfd" in wrong:
        (tmp_path / "dev/kfd").unlink()
    if wrong[0] in ("no module", "no driver"):
        no_driver(tmp_path)
    if wrong[0] == "no module":
        shutil.rmtree(tmp_path / "sys/module/amdgpu")
        shutil.rmtree(tmp_path / "sys/class/drm")
        shutil.rmtree(tmp_path / "dev")
    may_open_all_but(monkeypatch, *wrong)
    found = look(tmp_path, fault=MISSING, installed=ON_ROCM, build=ROCM)
    assert red(found) == [name], "the first cause alone"
    assert says in found[name].found
    assert cure in found[name].cure
    assert not any("NVIDIA" in check.cure for check in found.values())


def test_a_card_that_another_driver_has(tmp_path: Path) -> None:
    (device,) = mi300x(tmp_path, 1)
    no_driver(tmp_path)
    (device / "driver").symlink_to("../../bus/pci/drivers/vfio-pci")
    found = look(tmp_path, installed=ON_ROCM, build=ROCM)
    assert red(found) == ["amdgpu"]
    assert found["amdgpu"].found == "0000:0c:00.0 has the driver vfio-pci"


def test_a_build_of_torch_without_rocm_beside_an_amd_gpu(tmp_path: Path) -> None:
    mi300x(tmp_path, 1)
    found = look(tmp_path, fault=MISSING, installed={"torch": "2.13.0+cpu"})
    assert red(found) == ["torch"]
    assert found["torch"].found == "2.13.0+cpu, a build without ROCm"
    assert "install a ROCm build" in found["torch"].cure


def test_two_vendors_have_a_first_cause_each(tmp_path: Path) -> None:
    mi300x(tmp_path, 1)
    (tmp_path / "dev/kfd").unlink()
    machine(tmp_path, **CARD)
    found = look(tmp_path, fault=MISSING, installed={"torch": "2.13.0+cu130"})
    assert red(found) == ["NVML", "/dev/kfd"]


XPU = TorchBuild(xpu="20250101")


def test_an_arc_and_its_usual_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arc_card, _ = arc(tmp_path)
    installed = {"torch": "2.8.0+xpu"}
    found = look(tmp_path, fault=MISSING, installed=installed, build=XPU)
    assert found["Intel GPU"].found == "2 on the PCI bus: Intel Arc B580, Intel UHD Graphics 770"
    assert red(found) == []
    may_open_all_but(monkeypatch, "renderD128")
    found = look(tmp_path, fault=MISSING, installed=installed, build=XPU)
    assert red(found) == ["/dev/dri"]
    (arc_card / "driver").unlink()
    found = look(tmp_path, fault=MISSING, installed=installed, build=XPU)
    assert red(found) == ["xe or i915"]
    assert "0000:03:00.0 has no driver" in found["xe or i915"].found


def test_the_gpu_in_a_processor_alone_is_no_gpu_to_a_torch_without_xpu(tmp_path: Path) -> None:
    arc(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:03:00.0").unlink()
    found = look(tmp_path, fault=MISSING, installed={"torch": "2.13.0+cpu"})
    assert "Intel GPU" not in found
    assert red(found) == ["NVIDIA card"]
    assert "%gpus --virtual 2" in found["NVIDIA card"].cure


def test_a_mac_lacks_nothing_of_nvidias(tmp_path: Path) -> None:
    found = look(tmp_path, fault=MISSING, apple=mac())
    assert found["Apple GPU"].found == "Apple M2 Max"
    assert red(found) == []
    assert "NVIDIA card" not in found
