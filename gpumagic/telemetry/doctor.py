"""Check every step from the hardware to this process's GPUs, with a cure for the first failure.

Only reads: opens nothing on the GPU, and imports neither torch nor anything else heavy.
AMD's and Intel's files and groups are those of the installation guides of ROCm
(https://rocm.docs.amd.com/projects/install-on-linux) and Intel (https://dgpu-docs.intel.com).
"""

import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from gpumagic import drm, nvml
from gpumagic.device import (
    Device,
    TorchBuild,
    amd_gpus,
    intel_gpus,
    physical_gpus,
    torch_build,
    visible,
)
from gpumagic.errors import as_typed
from gpumagic.telemetry.collect import BUILDS_URL
from gpumagic.telemetry.snapshot import Host
from gpumagic.telemetry.source import AppleSource
from gpumagic.telemetry.state_files import state_folder


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    ok: bool | None  # None for information, or a consequence of a failed check
    found: str
    cure: str = ""  # if ok is False


def leaves(setting: str, left: int, every: int) -> tuple[bool | None, str, str]:
    """Return a check's result for a variable that selects GPUs: it leaves `left` of `every`."""
    cure = "set it right before the kernel starts, or unset it" if every and not left else ""
    return bool(left) if every else None, f"{setting!r} leaves {left} of {every}", cure


def first_cause(checks: Iterable[Check]) -> list[Check]:
    """Return the checks, from the hardware up; failures after the first become consequences."""
    found: list[Check] = []
    for check in checks:
        follows = check.ok is False and any(one.ok is False for one in found)
        found.append(replace(check, ok=None, cure="") if follows else check)
    return found


_Found = tuple[bool | None, str, str]
_FILES = ("NVIDIA card", "driver in the kernel", "device files")
# NVML answers these without the driver.
_NOT_ASKED = ("library-missing", "driver-not-loaded", "pynvml-missing", "pynvml-clash")


class Doctor:
    """Checks the machine under ``root``, the driver, the packages and the environment."""

    def __init__(
        self,
        root: Path = Path("/"),
        env: Mapping[str, str] | None = None,
        door: nvml.Nvml | None = None,
        version: Callable[[str], str] = metadata.version,
        build: Callable[[], TorchBuild] = torch_build,
        apple: AppleSource | None = None,
    ) -> None:
        self._root = root
        self._env = os.environ if env is None else env
        self._door = door or nvml.door()
        self._version = version
        self._build = build
        self._apple = apple or AppleSource()

    def checks(self) -> list[Check]:
        """Return the checks from hardware to notebook; the first failed one has the cure."""
        self._door.retry()
        linux = LinuxChecks(self._root, self._env, self._build(), self._container())
        apples = [gpu.name or "unknown model" for gpu in self._apple.gpus(Host())]
        others = [*linux.checks(), *(Check("Apple GPU", True, name) for name in apples)]
        nvidias: dict[str, Callable[[], _Found | None]] = {
            "NVIDIA card": self._card,
            "driver in the kernel": self._module,
            "device files": self._nodes,
            "nvidia-ml-py": self._package,
            "NVML": self._driver,
        }
        rest: dict[str, Callable[[], _Found | None]] = {
            "torch": lambda: self._torch(None if has_nvidias else linux.wanted_build),
            "runs in": self._surroundings,
            "state files": self._state_files,
        }
        # With only another vendor's GPU, NVIDIA's checks do not apply.
        asked = "nvml" in (self._env.get("GPUMAGIC_SOURCES") or "nvml")
        nothing = asked and not others
        has_nvidias = nothing or "nvidia" in linux.vendors or bool(self._door.gpus())
        found: list[Check] = []
        if has_nvidias:
            found = first_cause(map(self._unless_answered, _looked(nvidias)))
            found += _looked({"CUDA_VISIBLE_DEVICES": self._visible})
        found += [*others, *_looked(rest)]
        found += [Check("GPU", False, f.cause, f.cure) for f in self._door.lost.values()]
        version = f"{platform.python_version()} at {sys.executable}"
        return [*found, Check("Python", None, version)]

    def _unless_answered(self, check: Check) -> Check:
        """Return the check; if the driver answers, a missing file is no failure."""
        fault = self._door.fault
        answers = fault is None or fault.code not in _NOT_ASKED
        follows = check.ok is False and check.name in _FILES and answers
        return replace(check, ok=None, cure="") if follows else check

    def _card(self) -> _Found:
        cards = sum(vendor == "nvidia" for vendor, _, _ in drm.pci_gpus(self._root))
        if cards:
            return True, f"{cards} on the PCI bus", ""
        if self._wsl():
            return None, "under WSL the PCI bus is not seen", ""
        cure = f"{as_typed('%gpus --virtual 2')} makes two virtual ones"
        return False, "none on the PCI bus", cure

    def _module(self) -> _Found:
        text = self._text("proc/driver/nvidia/version")
        if text:
            words = text.splitlines()[0].split()
            version = next((word for word in words if word[:1].isdigit() and "." in word), "")
            return True, version or text.splitlines()[0], ""
        if self._wsl():
            return None, "under WSL, Windows has the driver", ""
        return False, "not loaded", "install NVIDIA's driver; modprobe nvidia"

    def _nodes(self) -> _Found:
        nodes = sorted(self._root.glob("dev/nvidia[0-9]*")) + sorted(self._root.glob("dev/dxg"))
        if not nodes and self._container():
            return False, "no /dev/nvidia0", "start the container with --gpus all"
        if not nodes:
            return False, "no /dev/nvidia0", "load the driver; nvidia-modprobe makes them"
        closed = [node.name for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
        if closed:
            cure = "add the user to the group that owns them (ls -l /dev/nvidia*)"
            return False, f"this user may not open {', '.join(closed)}", cure
        return True, ", ".join(f"/dev/{node.name}" for node in nodes), ""

    def _package(self) -> _Found:
        version = self._installed("nvidia-ml-py")
        cure = "" if version else "pip install nvidia-ml-py"
        return bool(version), version or "not installed", cure

    def _driver(self) -> _Found:
        gpus = [gpu for gpu in self._door.gpus() if gpu.parent is None]
        fault = self._door.fault
        if fault is not None:
            return False, fault.cause, fault.cure
        version = self._door.system("nvmlSystemGetDriverVersion")
        names = ", ".join(gpu.name or "unknown model" for gpu in gpus) or "no GPU"
        cure = "" if gpus else "see what nvidia-smi -L lists on the host, and dmesg"
        return bool(gpus), f"driver {version or 'of unknown version'}: {names}", cure

    def _visible(self) -> _Found:
        setting = self._env.get("CUDA_VISIBLE_DEVICES")
        if setting is None:
            return None, "not set: all GPUs are visible", ""
        physical = physical_gpus(self._door)
        return leaves(setting, len(visible(physical, self._env)), len(physical))

    def _torch(self, wanted: str | None) -> _Found:
        version = self._installed("torch")
        if version is None:
            return None, 'not installed (pip install "gpumagic[torch]")', ""
        if wanted:
            cure = f"install a {wanted} build: {BUILDS_URL}; or {as_typed('%gpus --virtual 2')}"
            return False, f"{version}, a build without {wanted}", cure
        if version.endswith("+cpu") and self._door.gpus():
            return False, f"{version}, a build without CUDA", f"install a CUDA build: {BUILDS_URL}"
        return True, version, ""

    def _surroundings(self) -> _Found | None:
        marks = (("a container", self._container()), ("WSL", self._wsl()))
        found = [name for name, there in marks if there]
        return (None, " in ".join(found), "") if found else None

    def _state_files(self) -> _Found:
        folder = state_folder()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if os.access(there, os.W_OK):
            return True, f"virtual GPUs are published in {folder}", ""
        found = f"{there} cannot be written: other kernels will not see virtual GPUs"
        return False, found, "set GPUMAGIC_RUNTIME_DIR to a folder of yours"

    def _installed(self, distribution: str) -> str | None:
        try:
            return self._version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def _container(self) -> bool:
        marks = (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io")
        return any((self._root / mark).exists() for mark in marks)

    def _text(self, name: str) -> str:
        return drm.Folder(self._root).text(name)

    def _wsl(self) -> bool:
        return "microsoft" in self._text("proc/sys/kernel/osrelease").lower()


def _looked(table: Mapping[str, Callable[[], _Found | None]]) -> list[Check]:
    return [Check(name, *said) for name, look in table.items() if (said := look())]


_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib")


class LinuxChecks:
    """Checks the machine under ``root``; ``container``: whether this runs in one."""

    def __init__(
        self, root: Path, env: Mapping[str, str], build: TorchBuild, container: bool
    ) -> None:
        self._root = root
        self._env = env
        self._build = build
        self._container = container
        gpus = drm.pci_gpus(root)
        self.vendors = {vendor for vendor, _, _ in gpus}
        self._amd = [gpu for gpu in gpus if gpu[0] == "amd"]
        # An integrated GPU matters only to a torch that can use it.
        self._intel = [
            gpu
            for gpu in gpus
            if gpu[0] == "intel" and (build.xpu or not drm.is_integrated(*gpu[:2]))
        ]

    def checks(self) -> list[Check]:
        """Return the checks of AMD's and Intel's GPUs, if there are some."""
        rocm: list[Check] = []
        if self._amd:
            rocm = [
                self._card("AMD GPU", "amd", self._amd),
                self._driver("amdgpu", ("amdgpu",), self._amd),
                self._open("/dev/kfd", ["dev/kfd"]),
                self._open("/dev/dri", self._render_nodes()),
                *self._visible(("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), amd_gpus),
            ]
        xpu: list[Check] = []
        if self._intel:
            xpu = [
                self._card("Intel GPU", "intel", self._intel),
                self._driver("xe or i915", ("xe", "i915"), self._intel),
                *([] if rocm else [self._open("/dev/dri", self._render_nodes())]),
                self._level_zero(),
                *self._visible(("ZE_AFFINITY_MASK",), intel_gpus),
            ]
        return [*first_cause(rocm), *first_cause(xpu)]

    @property
    def wanted_build(self) -> str | None:
        """Return the build of torch that these GPUs need; None if torch is that build."""
        if self._amd and self._build.hip is None:
            return "ROCm"
        return "XPU" if self._intel and self._build.xpu is None else None

    def _card(self, name: str, vendor: str, gpus: Sequence[tuple[str, str, str | None]]) -> Check:
        models = {card.name or "unknown model" for card in drm.graphics_cards(self._root, vendor)}
        told = f": {', '.join(sorted(models))}" if models else ""
        return Check(name, True, f"{len(gpus)} on the PCI bus{told}")

    def _driver(
        self, name: str, drivers: Sequence[str], gpus: Sequence[tuple[str, str, str | None]]
    ) -> Check:
        without = [(address, driver) for _, address, driver in gpus if driver not in drivers]
        if not without:
            module = drm.Folder(self._root / "sys/module" / (gpus[0][2] or ""))
            return Check(name, True, module.text("version") or f"{gpus[0][2]}, part of the kernel")
        address, other = without[0]
        if other:
            cure = f"bind it to {drivers[0]} (vfio-pci keeps a GPU for a virtual machine)"
            return Check(name, False, f"{address} is bound to the driver {other}", cure)
        if any((self._root / "sys/module" / driver).exists() for driver in drivers):
            cure = f"see why: sudo dmesg | grep {drivers[0]} (a kernel older than the card?)"
            return Check(name, False, f"loaded, but it does not take {address}", cure)
        cure = f"sudo modprobe {drivers[0]}; if that fails, sudo dmesg shows why"
        return Check(name, False, f"not loaded: {address} has no driver", cure)

    def _render_nodes(self) -> list[str]:
        names = drm.Folder(self._root).names("dev/dri")
        return [f"dev/dri/{name}" for name in names if name.startswith("renderD")]

    def _open(self, name: str, nodes: Sequence[str]) -> Check:
        """Check that the device files exist and that this user may open them."""
        there = [node for node in nodes if (self._root / node).exists()]
        share = "start the container with --device /dev/kfd --device /dev/dri --group-add render"
        if not there:
            what = name if name == "/dev/kfd" else f"{name}/renderD128"
            cure = "see why: sudo dmesg | grep -e kfd -e drm"
            return Check(name, False, f"no {what}", share if self._container else cure)
        closed = [n for n in there if not os.access(self._root / n, os.R_OK | os.W_OK)]
        if closed:
            group = _group(self._root / closed[0])
            cure = f"sudo usermod -aG {group},video $USER, then log in again"
            cure = f"start the container with --group-add {group}" if self._container else cure
            found = f"this user may not open /{closed[0]}, which is the group {group}'s"
            return Check(name, False, found, cure)
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        return Check(name, True, f"/{there[0]}{more}")

    def _level_zero(self) -> Check:
        cure = "install it: sudo apt install libze1 libze-intel-gpu1 (on others: level-zero)"
        for library in ("libze_loader.so.1", "libze_intel_gpu.so.1"):
            if not any((self._root / folder / library).exists() for folder in _LIBRARIES):
                return Check("Level Zero", False, f"no {library}", cure)
        return Check("Level Zero", True, "libze_loader.so.1 and libze_intel_gpu.so.1")

    def _visible(
        self, names: Sequence[str], gpus: Callable[[Mapping[str, str], Path], list[Device]]
    ) -> list[Check]:
        """Check each environment variable that is set and selects GPUs."""
        every, found = len(gpus({}, self._root)), []
        for name in (name for name in names if name in self._env):
            left = len(gpus({name: self._env[name]}, self._root))
            found.append(Check(name, *leaves(self._env[name], left, every)))
        return found


def _group(node: Path) -> str:
    try:
        return node.group()
    except KeyError:  # a number of the host, without a name in this container
        return str(node.stat().st_gid)
    except (OSError, NotImplementedError):
        return "render"
