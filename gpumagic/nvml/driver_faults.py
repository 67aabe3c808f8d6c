"""Explain what stands between a person and a GPU: the cause, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DriverFault:
    """Something that is wrong: a stable code for programs, a sentence each for cause and cure."""

    code: str
    cause: str
    cure: str


LIBRARY_MISSING = "library-missing"
DRIVER_NOT_LOADED = "driver-not-loaded"

# By NVML's return code.
_UNREACHABLE = {
    12: DriverFault(
        LIBRARY_MISSING,
        "NVIDIA's driver is not installed",
        "install the driver, or in a container start it with --gpus all",
    ),
    9: DriverFault(
        DRIVER_NOT_LOADED,
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


def unreachable(code: int | None, text: str) -> DriverFault:
    """Why NVML cannot be used, from its return code."""
    return _UNREACHABLE.get(
        code or 0,
        DriverFault(
            "nvml-error", f"NVML cannot be used: {text}", "run %gpus --doctor, and see dmesg"
        ),
    )


def no_pynvml() -> DriverFault:
    return DriverFault(
        "pynvml-missing",
        "the Python package nvidia-ml-py is not installed",
        "pip install nvidia-ml-py",
    )


def wrong_pynvml(path: str | None) -> DriverFault:
    return DriverFault(
        "pynvml-clash",
        f"the module pynvml is not nvidia-ml-py's ({path or 'unknown path'})",
        "pip uninstall -y pynvml nvidia-ml-py3; pip install --force-reinstall nvidia-ml-py",
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
