"""Explain what stands between a person and a GPU: the cause, and how to fix it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DriverFault:
    """Something that is wrong: a stable code for programs, a sentence each for cause and cure."""

    code: str
    cause: str
    cure: str


# By NVML's return code.
_UNREACHABLE = {
    12: DriverFault(
        "library-missing",
        "NVIDIA's driver is not installed",
        "install the driver, or in a container start it with --gpus all",
    ),
    9: DriverFault(
        "driver-not-loaded",
        "NVIDIA's driver is installed but not loaded",
        "sudo modprobe nvidia; if that fails, see dmesg, or reinstall the driver for this kernel",
    ),
    18: DriverFault(
        "version-mismatch",
        "the driver in the kernel and its libraries are of different versions "
        "(the driver was updated while it ran)",
        "restart the machine; or unload and load the nvidia modules, and then restart this program",
    ),
    4: DriverFault(
        "no-permission",
        "this user may not open the GPU's device files",
        "give this user access to /dev/nvidia* (often the group video or render)",
    ),
    999: DriverFault(
        "unknown-error",
        "NVIDIA's driver answers 'Unknown Error', as it does when a container has lost its devices",
        "restart the container; on a host, see dmesg for Xid errors",
    ),
    15: DriverFault(
        "gpu-lost",
        "a GPU has fallen off the bus",
        "see dmesg for its Xid error; the machine must be restarted",
    ),
}


def unreachable(error: Exception, pynvml: Any) -> DriverFault:
    """Why NVML cannot be started by this module, or asked for its GPUs."""
    if isinstance(error, ImportError) and pynvml is None:
        return DriverFault(
            "pynvml-missing",
            "the Python package nvidia-ml-py is not installed",
            "pip install nvidia-ml-py",
        )
    if isinstance(error, ImportError):
        path = getattr(pynvml, "__file__", None) or "unknown path"
        return DriverFault(
            "pynvml-clash",
            f"the module pynvml is not nvidia-ml-py's ({path})",
            "pip uninstall -y pynvml nvidia-ml-py3; pip install --force-reinstall nvidia-ml-py",
        )
    return _UNREACHABLE.get(getattr(error, "value", 0)) or DriverFault(
        "nvml-error", f"NVML cannot be used: {error}", "see dmesg"
    )


def gpu_lost(name: str | None, index: int, error: str | None = None) -> DriverFault:
    """A GPU that no longer answers; ``error`` is NVML's text where it is not just lost."""
    who = f"{name or 'a GPU'} (NVML {index})"
    if error:
        return DriverFault("gpu-unreachable", f"{who} cannot be opened: {error}", "see dmesg")
    return DriverFault(
        "gpu-lost",
        f"{who} has fallen off the bus; what ran on it has failed",
        "see dmesg for its Xid error; restart the machine, or reset the GPU",
    )


def gpu_silent(name: str | None, index: int, error: str) -> DriverFault:
    """A GPU that is there and answers no question."""
    return DriverFault(
        "gpu-silent",
        f"{name or 'a GPU'} (NVML {index}) answers no question: {error}",
        "see dmesg for Xid errors; it is asked again by itself",
    )
