"""Describe the machine that this process runs on, for what was measured on it."""

import os
import platform
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpumagic import nvml
from gpumagic.frameworks import known
from gpumagic.usercode.values import torch_here

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """Where it was measured: what it has, and how many threads torch uses."""

    host: str | None
    cpu: str | None
    cpu_count: int | None
    threads: int | None
    python: str
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    # The versions of those beside torch: {"JAX": "0.10.2"}.
    frameworks: Mapping[str, str] = field(default_factory=dict)


def here(cpuinfo: Path = _CPUINFO) -> Machine:
    """What this machine is, without starting CUDA: the driver is known by NVML."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    # ARM's kernels give none there, and `platform` the architecture at most.
    cpu = named[1] if named else platform.processor() or platform.machine()
    torch, frameworks = torch_here(), known.versions()
    cuda = torch.version.cuda if torch else None
    driver = nvml.door().system("nvmlSystemGetDriverVersion") if cuda or frameworks else None
    return Machine(
        host=socket.gethostname() or None,
        cpu=" ".join(cpu.split()) or None,
        cpu_count=os.cpu_count(),
        threads=torch.get_num_threads() if torch else None,
        python=platform.python_version(),
        torch=torch.__version__ if torch else None,
        cuda=cuda,
        driver=driver.decode() if isinstance(driver, bytes) else driver,
        frameworks=frameworks,
    )
