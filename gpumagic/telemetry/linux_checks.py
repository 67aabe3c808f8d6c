"""Check the steps from the hardware to ROCm and Level Zero, and JAX's preallocation.

The files and groups are named in the installation guides of ROCm
(https://rocm.docs.amd.com/projects/install-on-linux) and Intel (https://dgpu-docs.intel.com).
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpumagic import drm
from gpumagic.device import Device, TorchBuild, amd_gpus, intel_gpus
from gpumagic.telemetry.snapshot import GpuSample, Problem, ProcessSample


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


# JAX takes 75 % of a GPU by default.
_MOST = 0.65
# JAX loads this library when it starts on a GPU, not on import.
_PLUGIN = b"/jax_plugins/"
_TAKES, _SHARE = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_OFF = ("false", "0")
CURE = f"set {_TAKES}=false, or {_SHARE}=.5, in its environment before JAX starts there"


def preallocated(
    gpus: Sequence[GpuSample], processes: Iterable[ProcessSample], proc: Path = Path("/proc")
) -> list[Problem]:
    """Return problems for GPUs that JAX preallocated and another process or torch uses."""
    found = []
    held = list(processes)
    for gpu in gpus:
        here = [each for each in held if each.uuid == gpu.uuid and not gpu.virtual]
        for each in here:
            most = (each.memory or 0) >= _MOST * (gpu.memory_total or float("inf"))
            if most and _is_wanted(here, each) and _took_all(each, proc):
                found.append(Problem("jax-preallocated", _cause(gpu, each), CURE, gpu.uuid))
    return found


def _is_wanted(here: Sequence[ProcessSample], holder: ProcessSample) -> bool:
    others = ("torch",) if holder.mine else ("torch", "jax")
    return len(here) > 1 or any(name in sys.modules for name in others)


def _took_all(holder: ProcessSample, proc: Path) -> bool:
    """Whether JAX has started in a process with preallocation."""
    try:
        if _PLUGIN not in (proc / str(holder.pid) / "maps").read_bytes():
            return False
        if holder.mine:
            return not _preallocation_changed(os.environ)
        words = (proc / str(holder.pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or ended
        return False
    return not _preallocation_changed(dict(os.fsdecode(word).partition("=")[::2] for word in words))


def _preallocation_changed(env: Mapping[str, str]) -> bool:
    return env.get(_TAKES, "").lower() in _OFF or bool(env.get(_SHARE))


def _cause(gpu: GpuSample, holder: ProcessSample) -> str:
    who = "this notebook" if holder.mine else holder.notebook or holder.name or f"pid {holder.pid}"
    where = f"cuda:{gpu.ordinal}" if gpu.ordinal is not None else f"GPU {gpu.index}"
    share = (holder.memory or 0) / (gpu.memory_total or 1)
    return (
        f"JAX in {who} holds {share:.0%} of {where}: it takes 75 % of each GPU when it starts, "
        "needed or not"
    )


def check_jax(env: Mapping[str, str]) -> list[Check]:
    """Return the doctor's check of preallocation if JAX is imported."""
    if "jax" not in sys.modules:
        return []
    if _preallocation_changed(env):
        said = [f"{name}={env[name]}" for name in (_TAKES, _SHARE) if env.get(name)]
        return [Check("JAX", True, " ".join(said))]
    cure = f"{_TAKES}=false or {_SHARE}=.5 before it starts changes that"
    return [Check("JAX", None, f"takes 75 % of each GPU when it starts; {cure}")]


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
                self._rocm(),
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

    def _rocm(self) -> Check:
        version = drm.Folder(self._root).text("opt/rocm/.info/version")
        system = (version or "").partition("-")[0]
        included = ".".join((self._build.hip or "").split(".")[:2])
        parts = [
            f"{system} in /opt/rocm" if system else "none in /opt/rocm",
            f"torch includes {included}" if included else "",
        ]
        if system and included and system.split(".")[0] != included.split(".")[0]:
            parts.append("compile code for torch with the same version")
        return Check("ROCm", True if system or included else None, "; ".join(filter(None, parts)))

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
