"""Publish that CUDA in this process is dead, and read which of the user's processes did so.

Each such process has one small file, in the folder of virtual GPUs' files, so that a Jupyter server
learns about its kernels. A reader removes the file of a process that has ended.
"""

import json
import os
from pathlib import Path

from gpumagic.device import cuda_state
from gpumagic.telemetry.processes import started
from gpumagic.telemetry.snapshot import Problem
from gpumagic.telemetry.virtual_state import is_of, state_files, state_folder, write_file

_LONGEST = 4096


def publish(death: cuda_state.Death) -> None:
    """Publish it to every process of this user, until this one ends."""
    pid, notebook = os.getpid(), os.path.basename(os.environ.get("JPY_SESSION_NAME", ""))
    whose = f"{notebook} (process {pid})" if notebook else f"process {pid}"
    cause = f"CUDA in the kernel of {whose} is dead: {death.cause}"
    told = {"pid": pid, "started": started(pid), "cause": cause, "cure": death.cure}
    write_file(state_folder() / f"{pid}.dead", json.dumps(told).encode())


def problems() -> list[Problem]:
    """Return a problem for each live process whose CUDA is dead, this one first."""
    death, found = cuda_state.death(), []  # a thread of the sampler's must not ask CUDA
    if death is not None:
        found.append(Problem("cuda-dead", death.said, death.cure))
    for path in state_files(".dead"):
        if death is None or path.stem != str(os.getpid()):
            found += _read(path)
    return found


def _read(path: Path) -> list[Problem]:
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(_LONGEST))
        if not is_of(path, int(told["pid"]), float(told["started"])):
            return []
        return [Problem("cuda-dead", str(told["cause"]), str(told["cure"]))]
    except (OSError, ValueError, TypeError, LookupError):
        return []
