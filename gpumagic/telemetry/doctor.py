"""Check every step from the hardware to torch, and give a cure for the first failure.

The checks allocate nothing on a GPU. The expected device files, libraries and Unix groups are from
the guides of AMD (rocm.docs.amd.com/projects/install-on-linux) and Intel (dgpu-docs.intel.com).
"""

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from gpumagic import device, drm, nvml
from gpumagic.errors import as_typed
from gpumagic.telemetry.snapshot import Host
from gpumagic.telemetry.source import AppleSource
from gpumagic.telemetry.state_files import state_folder


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool | None  # None: information, or a failure after the first failure
    found: str
    cure: str = ""  # only if `ok` is False


class _Vendor(NamedTuple):
    """The requirements of a vendor's GPUs."""

    name: str
    drivers: tuple[str, ...]
    nodes: tuple[str, ...]  # keys of _NODES
    build: str  # the build of torch that supports these GPUs


_VENDORS = {
    "amd": _Vendor("AMD", ("amdgpu",), ("/dev/kfd", "/dev/dri"), "ROCm"),
    "intel": _Vendor("Intel", ("xe", "i915"), ("/dev/dri",), "XPU"),
}
_NODES = {"/dev/kfd": "dev/kfd", "/dev/dri": "dev/dri/renderD*"}  # patterns of device files
_BUILDS = "https://pytorch.org/get-started/locally"
# These NVML faults mean that no driver has answered, so a missing card counts as a failure.
_NO_ANSWER = ("library-missing", "driver-not-loaded", "pynvml-clash")
_CHOICE = "CUDA_VISIBLE_DEVICES"
_Card = tuple[str, str, str | None]  # vendor, PCI address, driver


class Doctor:
    """Checks a machine's files below ``root``, its packages and its environment variables."""

    def __init__(self, root: Path = Path("/"), env: Mapping[str, str] | None = None) -> None:
        self._files = drm.Folder(root)
        self._root = root
        self._env = os.environ if env is None else env
        self._nvml = nvml.shared_nvml()
        marks = (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io")
        self._container = any((root / mark).exists() for mark in marks)
        self._wsl = "microsoft" in self._files.text("proc/sys/kernel/osrelease").lower()

    def checks(self) -> list[Check]:
        """Return all checks; for each vendor, only the first failure has a cure."""
        self._nvml.retry()
        cards = self._cards()
        others = [check for vendor, its in cards.items() for check in self._of_vendor(vendor, its)]
        apples = AppleSource().gpus(Host())
        others += [Check("Apple GPU", True, gpu.name or "unknown model") for gpu in apples]
        is_nvidia = "nvidia" in cards or bool(self._nvml.gpus()) or not others
        places = ["a container"] * self._container + ["WSL"] * self._wsl
        return [
            *first_cause(self._nvidia(len(cards.get("nvidia", ()))) if is_nvidia else ()),
            *others,
            self._torch({} if is_nvidia else cards),
            *(Check("runs in", None, place) for place in places),
            _state_files(),
            *(Check("GPU", False, fault.cause, fault.cure) for fault in self._nvml.lost.values()),
            Check("Python", None, f"{platform.python_version()} at {sys.executable}"),
        ]

    def _cards(self) -> dict[str, list[_Card]]:
        found: dict[str, list[_Card]] = {}
        for card in drm.pci_gpus(self._root):
            # Intel's integrated GPUs count only if the installed torch supports Intel's GPUs.
            if device.torch_build().xpu or not drm.is_integrated(*card[:2]):
                found.setdefault(card[0], []).append(card)
        return found

    def _nvidia(self, cards: int) -> Iterator[Check]:
        names = [gpu.name or "unknown model" for gpu in self._nvml.gpus() if not gpu.parent]
        fault = self._nvml.fault
        answers = fault is None or fault.code not in _NO_ANSWER
        if not self._wsl:  # WSL shows no PCI bus
            cure = f"{as_typed('%gpus --virtual 2')} makes two virtual ones"
            # A missing card is no failure if NVML answers: a container may hide the PCI bus.
            ok = cards > 0 or (None if answers else False)
            yield Check("NVIDIA card", ok, f"{cards or 'none'} on the PCI bus", cure)
        driver = self._nvml.system("nvmlSystemGetDriverVersion") or "of unknown version"
        found, cure = ", ".join(names), "see what nvidia-smi -L lists on the host, and dmesg"
        known = Check("NVML", bool(names), f"driver {driver}: {found or 'no GPU'}", cure)
        yield known if fault is None else Check("NVML", False, fault.cause, fault.cure)
        yield from self._chosen()

    def _chosen(self) -> Iterator[Check]:
        """Yield a check of the variable that selects GPUs, if it is set."""
        if _CHOICE in self._env:
            every = device.physical_gpus(self._nvml)
            left = device.visible(every, self._env)
            text = f"{self._env[_CHOICE]!r} selects {len(left)} of {len(every)} GPUs"
            cure = "correct or unset the variable, then restart the kernel"
            yield Check(_CHOICE, bool(left) if every else None, text, cure)

    def _of_vendor(self, vendor: str, cards: Sequence[_Card]) -> list[Check]:
        if (needs := _VENDORS.get(vendor)) is None:
            return []
        models = {card.name or "unknown model" for card in drm.graphics_cards(self._root, vendor)}
        names = f": {', '.join(sorted(models))}" if models else ""
        found = [
            Check(f"{needs.name} GPU", True, f"{len(cards)} on the PCI bus{names}"),
            self._driver(needs, cards),
            *(self._nodes(name, needs.nodes) for name in needs.nodes),
        ]
        return first_cause(found)

    def _driver(self, needs: _Vendor, cards: Sequence[_Card]) -> Check:
        name, first = " or ".join(needs.drivers), needs.drivers[0]
        for _, address, driver in cards:
            if driver not in needs.drivers:
                found = f"{address} has {f'the driver {driver}' if driver else 'no driver'}"
                cure = f"sudo modprobe {first}; if that fails, sudo dmesg | grep {first} shows why"
                return Check(name, False, found, cure)
        version = self._files.text(f"sys/module/{cards[0][2]}/version")
        return Check(name, True, version or f"{cards[0][2]}, part of the kernel")

    def _nodes(self, name: str, needed: Sequence[str]) -> Check:
        nodes = sorted(self._root.glob(_NODES[name]))
        paths = ", ".join(f"/{node.relative_to(self._root)}" for node in nodes)
        closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
        cure = "sudo dmesg | grep -e kfd -e drm"
        if self._container:
            options = " ".join(f"--device {node}" for node in needed)
            cure = f"start the container with {options} --group-add render"
        elif closed:
            cure = "sudo usermod -aG render,video $USER, then log in again"
        if closed:
            path = closed[0].relative_to(self._root)
            return Check(name, False, f"this user may not open /{path} (see ls -l)", cure)
        return Check(name, bool(nodes), paths or f"no /{_NODES[name]}", cure)

    def _torch(self, cards: Mapping[str, Sequence[_Card]]) -> Check:
        build = device.torch_build()
        try:
            version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            return Check("torch", None, 'not installed (pip install "gpumagic[torch]")')
        has = {"amd": build.hip, "intel": build.xpu}
        lacks = [needs.build for name, needs in _VENDORS.items() if name in cards and not has[name]]
        lacks += ["CUDA"] if not build.cuda and self._nvml.gpus() else []
        if lacks:
            cure = f"install a {lacks[0]} build: {_BUILDS}; or {as_typed('%gpus --virtual 2')}"
            return Check("torch", False, f"{version}, a build without {lacks[0]}", cure)
        return Check("torch", True, version)


def first_cause(checks: Iterable[Check]) -> list[Check]:
    """Return the checks. Only the first failure keeps its cure; later failures have `ok` None."""
    checks = [*checks]
    first = next((check for check in checks if check.ok is False), None)
    return [one if one is first else replace(one, ok=one.ok or None, cure="") for one in checks]


def _state_files() -> Check:
    folder = state_folder()
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if os.access(there, os.W_OK | os.X_OK):
        return Check("state files", True, f"virtual GPUs are published in {folder}")
    found = f"{there} cannot be written: other kernels will not see virtual GPUs"
    return Check("state files", False, found, "set GPUMAGIC_RUNTIME_DIR to a writable folder")
