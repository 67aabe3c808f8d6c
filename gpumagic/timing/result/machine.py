"""Describe the machine that this process runs on, for what was measured on it."""

import os
import platform
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from gpumagic import nvml

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """Where it was measured: what it has, and how many threads torch uses."""

    host: str | None
    cpu: str | None
    cpu_count: int | None
    threads: int | None
    python: str
    torch: str
    cuda: str | None = None
    driver: str | None = None


def here(cpuinfo: Path = _CPUINFO) -> Machine:
    """What this machine is, without starting CUDA: the driver is known by NVML."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    # ARM's kernels give none there, and `platform` the architecture at most.
    cpu = named[1] if named else platform.processor() or platform.machine()
    cuda = torch.version.cuda
    driver = nvml.door().system("nvmlSystemGetDriverVersion") if cuda else None
    return Machine(
        host=socket.gethostname() or None,
        cpu=" ".join(cpu.split()) or None,
        cpu_count=os.cpu_count(),
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=cuda,
        driver=driver.decode() if isinstance(driver, bytes) else driver,
    )
