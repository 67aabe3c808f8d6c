"""The doctor, on machines that are a folder with a few files."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumagic.nvml import DriverFault
from gpumagic.telemetry.doctor import Check, Doctor

GPU = SimpleNamespace(uuid="GPU-1", index=0, name="H100", parent=None, memory_total=None)


def look(
    root: Path,
    *,
    gpus: tuple[object, ...] = (),
    fault: DriverFault | None = None,
    installed: dict[str, str] | None = None,
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

    return {check.name: check for check in Doctor(root, env, door, version).checks()}


def machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_anything(tmp_path: Path) -> None:
    found = look(tmp_path, fault=DriverFault("library-missing", "no driver", "install it"))
    assert found["NVIDIA card"].ok is False
    # What follows from that is told, and is nothing to be done about.
    for name in ("driver in the kernel", "device files", "nvidia-ml-py", "NVML"):
        assert (found[name].ok, found[name].cure) == (None, ""), name
    assert found["NVML"].found == "no driver"
    assert [check.name for check in found.values() if check.cure] == ["NVIDIA card"]
    assert "%gpus --virtual 2" in found["NVIDIA card"].cure
    assert found["torch"].ok is None


def test_a_machine_with_everything(tmp_path: Path) -> None:
    machine(
        tmp_path,
        proc__driver__nvidia__version="NVRM version: NVIDIA UNIX Module  580.159.04  Tue\nGCC 13",
        dev__nvidia0="",
        sys__bus__pci__devices__0__vendor="0x10de\n",
        sys__bus__pci__devices__0__class="0x030200\n",
        sys__bus__pci__devices__1__vendor="0x10de\n",
        sys__bus__pci__devices__1__class="0x040300\n",
    )
    found = look(tmp_path, gpus=(GPU,), installed={"nvidia-ml-py": "13.1", "torch": "2.13.0+cu128"})
    assert not [check for check in found.values() if check.ok is False]
    assert found["NVIDIA card"].found == "1 on the PCI bus"
    assert found["driver in the kernel"].found == "580.159.04"
    assert found["NVML"].found == "driver 580.1: H100"
    assert found["torch"].found == "2.13.0+cu128"
    assert not any(check.cure for check in found.values())


CARD = {
    "sys__bus__pci__devices__0__vendor": "0x10de\n",
    "sys__bus__pci__devices__0__class": "0x030200\n",
}
MISSING = DriverFault("library-missing", "no driver", "install it")
PACKAGE = {"nvidia-ml-py": "13.1"}


def red(found: dict[str, Check]) -> list[str]:
    return [check.name for check in found.values() if check.ok is False]


def test_the_first_cause_alone_is_wrong_and_has_a_cure(tmp_path: Path) -> None:
    machine(tmp_path, **CARD)
    assert red(look(tmp_path, fault=MISSING, installed=PACKAGE)) == ["driver in the kernel"]
    machine(tmp_path, proc__driver__nvidia__version="NVRM version: 580.1")
    found = look(tmp_path, fault=MISSING, installed=PACKAGE)
    assert red(found) == ["device files"]
    assert found["NVML"].cure == ""
    machine(tmp_path, dev__nvidia0="")
    assert red(look(tmp_path, fault=MISSING)) == ["nvidia-ml-py"]
    assert red(look(tmp_path, fault=MISSING, installed=PACKAGE)) == ["NVML"]


def test_a_driver_that_answers_is_believed_whatever_is_not_seen(tmp_path: Path) -> None:
    """In a container or a virtual machine there may be no PCI bus to look at."""
    found = look(tmp_path, gpus=(GPU,), installed=PACKAGE)
    assert red(found) == []
    assert found["NVIDIA card"].found == "none on the PCI bus"
    found = look(tmp_path, installed=PACKAGE)
    assert red(found) == ["NVML"]
    assert "nvidia-smi" in found["NVML"].cure
    versions = DriverFault("version-mismatch", "two versions", "restart")
    found = look(tmp_path, fault=versions, installed=PACKAGE)
    assert [found[name].cure for name in red(found)] == ["restart"]


def test_device_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, dev__nvidia0="")
    # Not by their mode, for root may open them all.
    monkeypatch.setattr(os, "access", lambda path, mode: "dev" not in Path(path).parts)
    found = look(tmp_path, fault=MISSING)["device files"]
    assert "may not open nvidia0" in found.found


def test_a_container_without_gpus(tmp_path: Path) -> None:
    machine(tmp_path, **CARD, **{".dockerenv": ""}, proc__driver__nvidia__version="NVRM 580.1")
    found = look(tmp_path, fault=MISSING, installed=PACKAGE)
    assert found["runs in"].found == "a container"
    assert "--gpus all" in found["device files"].cure


def test_wsl_has_no_pci_bus_and_no_module(tmp_path: Path) -> None:
    machine(tmp_path, proc__sys__kernel__osrelease="5.15-microsoft-standard-WSL2", dev__dxg="")
    found = look(tmp_path)
    assert found["NVIDIA card"].ok is None
    assert found["driver in the kernel"].ok is None
    assert found["device files"].ok is True
    assert found["runs in"].found == "WSL"


@pytest.mark.parametrize(
    ("package", "version", "clashes"),
    [
        ("pynvml", "11.5.3", True),
        ("pynvml", "12.0.0", False),
        ("pynvml", "13.0.1", False),
        ("nvidia-ml-py3", "7.352.0", True),
    ],
)
def test_packages_that_put_another_module_in_place(
    tmp_path: Path, package: str, version: str, clashes: bool
) -> None:
    found = look(tmp_path, installed={package: version})
    assert ("module pynvml" in found) == clashes
    assert not clashes or version in found["module pynvml"].found


def test_the_release_that_misreads(tmp_path: Path) -> None:
    found = look(tmp_path, gpus=(GPU,), installed={"nvidia-ml-py": "12.535.77"})
    assert found["nvidia-ml-py"].ok is False


def test_a_build_of_torch_without_cuda_beside_a_gpu(tmp_path: Path) -> None:
    installed = {"torch": "2.13.0+cpu"}
    assert look(tmp_path, gpus=(GPU,), installed=installed)["torch"].ok is False
    assert look(tmp_path, installed=installed)["torch"].ok is True


def test_visible_devices(tmp_path: Path) -> None:
    name = "CUDA_VISIBLE_DEVICES"
    assert look(tmp_path, gpus=(GPU,))[name].ok is None
    assert look(tmp_path, gpus=(GPU,), CUDA_VISIBLE_DEVICES="0")[name].ok is True
    assert look(tmp_path, gpus=(GPU,), CUDA_VISIBLE_DEVICES="1")[name].ok is False
    assert look(tmp_path, CUDA_VISIBLE_DEVICES="1")[name].ok is None
