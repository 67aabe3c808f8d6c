"""Say why no GPU can be used here, to somebody who has these GPUs or none."""

import os
from collections.abc import Sequence
from dataclasses import replace

from gpumagic.device import torch_build
from gpumagic.errors import as_typed
from gpumagic.telemetry.snapshot import GpuSample, Problem

# On a machine without GPUs there is nothing wrong in these; they only say why there is none.
_JUST_NO_GPU = ("library-missing", "driver-not-loaded", "pynvml-missing")
_NO_NVML = Problem(
    "nvml-missing",
    "NVML is missing: no more than the name and the memory of these GPUs is known",
    "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; %gpus --doctor says more",
)
_BUILDS = {"amd": "ROCm", "intel": "XPU"}
_SHOW = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def explain(gpus: Sequence[GpuSample], problems: Sequence[Problem], named: bool) -> list[Problem]:
    """The problems as somebody who has these GPUs, or none, should read them; ``named`` where
    those that can be used have ordinals."""
    gpus = [gpu for gpu in gpus if not gpu.lost]
    usable = any(gpu.ordinal is not None or not named for gpu in gpus)
    if gpus and all(gpu.virtual or gpu.vendor != "nvidia" for gpu in gpus):
        problems = [problem for problem in problems if problem.code not in _JUST_NO_GPU]
    if usable:  # CUDA alone has told of them
        return [_NO_NVML if problem.code in _JUST_NO_GPU else problem for problem in problems]
    if gpus and not all(gpu.virtual for gpu in gpus):
        return [*problems, _none_visible({gpu.vendor for gpu in gpus if not gpu.virtual})]
    offer = f"{as_typed('%gpus --virtual 2')} makes virtual ones"
    why = f"{offer} (why: %gpus --doctor)"
    if not problems and not gpus:
        return [Problem("no-gpu", "no driver finds a GPU on this machine", why)]
    if any(gpu.virtual for gpu in gpus):
        return list(problems)
    # Most often nothing is wrong: the machine has no GPU. The doctor has the cures.
    return [
        replace(problem, cure=why)
        if problem.code in _JUST_NO_GPU
        else replace(problem, cure=f"{problem.cure}; or {offer}")
        for problem in problems
    ]


def _none_visible(vendors: set[str | None]) -> Problem:
    cause = "this process can use none of these GPUs"
    build = torch_build()
    wanted = [name for vendor, name in _BUILDS.items() if vendor in vendors]
    if wanted and "nvidia" not in vendors and build.hip is None and build.xpu is None:
        cause = f"{cause}: no torch here is built for {' or '.join(wanted)}"
        cure = (
            f"install a build for {' or '.join(wanted)} (https://pytorch.org/get-started/locally)"
        )
        return Problem("none-visible", cause, f"{cure}, or {as_typed('%gpus --virtual 2')}")
    setting = next((name for name in _SHOW if name in os.environ), None)
    if setting is None:
        shows = "ROCm" if build.hip else "Level Zero" if build.xpu else "CUDA"
        return Problem("none-visible", f"{cause}: {shows} shows it none", "run %gpus --doctor")
    cause = f"{cause}: {setting} is {os.environ[setting]!r}"
    cure = "set it right before the kernel starts, then restart the kernel"
    return Problem("none-visible", cause, cure)
