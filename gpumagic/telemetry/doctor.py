"""Check every step from the hardware to this process's GPUs, with a cure for the first failure.

Only reads: opens nothing on the GPU, and imports neither torch nor anything else heavy.
"""

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from gpumagic import drm, nvml
from gpumagic.device import TorchBuild, physical_gpus, torch_build, visible
from gpumagic.errors import as_typed
from gpumagic.telemetry.collect import chosen
from gpumagic.telemetry.drm_source import DrmSource
from gpumagic.telemetry.linux_checks import Check as Check
from gpumagic.telemetry.linux_checks import LinuxChecks, check_jax, first_cause, leaves
from gpumagic.telemetry.other_vendors import AppleSource
from gpumagic.telemetry.snapshot import Host
from gpumagic.telemetry.virtual_state import state_folder

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
            "module pynvml": self._clash,
            "NVML": self._driver,
        }
        rest: dict[str, Callable[[], _Found | None]] = {
            "torch": lambda: self._torch(None if has_nvidias else linux.wanted_build),
            "GPUMAGIC_SOURCES": self._sources,
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
        found += [*others, *_looked(rest), *check_jax(self._env)]
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
        if version is None:
            return False, "not installed", "pip install nvidia-ml-py"
        if version == "12.535.77":
            cure = "pip install --upgrade nvidia-ml-py"
            return False, f"{version} misreads lists of processes", cure
        return True, version, ""

    def _clash(self) -> _Found | None:
        others = []
        for name in ("pynvml", "nvidia-ml-py3"):
            version = self._installed(name)
            # From 12 on, pynvml only requires nvidia-ml-py and brings no module of that name.
            if version and not (name == "pynvml" and int(version.partition(".")[0]) >= 12):
                others.append(f"{name} {version}")
        if not others:
            return None
        cure = "pip uninstall -y pynvml nvidia-ml-py3; pip install --force-reinstall nvidia-ml-py"
        return False, f"{' and '.join(others)} puts another module in its place", cure

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
            cure = f"install a {wanted} build: https://pytorch.org/get-started/locally"
            cure = f"{cure}; or {as_typed('%gpus --virtual 2')}"
            return False, f"{version}, a build without {wanted}", cure
        if version.endswith("+cpu") and self._door.gpus():
            cure = "install a CUDA build: https://pytorch.org/get-started/locally"
            return False, f"{version}, a build without CUDA", cure
        return True, version, ""

    def _sources(self) -> _Found | None:
        if not self._env.get("GPUMAGIC_SOURCES"):
            return None
        sources, problems = chosen(self._env)
        for problem in problems:
            return False, problem.cause, problem.cure
        for root in (one.root for one in sources if isinstance(one, DrmSource)):
            if root != Path("/") and not drm.Folder(root / "sys/class/drm").names():
                cure = f"start the container with the host's / there: -v /:{root}:ro"
                return False, f"there is nothing in {root}/sys/class/drm", cure
        return True, ", ".join(source.name for source in sources), ""

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
        return drm.Folder(self._root).text(name) or ""

    def _wsl(self) -> bool:
        return "microsoft" in self._text("proc/sys/kernel/osrelease").lower()


def _looked(table: Mapping[str, Callable[[], _Found | None]]) -> list[Check]:
    return [Check(name, *said) for name, look in table.items() if (said := look())]
