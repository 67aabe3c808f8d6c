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
from gpumagic.telemetry.virtual_state import is_of, state_folder

_LONGEST = 4096


def publish(death: cuda_state.Death) -> None:
    """Publish it to every process of this user, until this one ends."""
    pid, notebook = os.getpid(), os.path.basename(os.environ.get("JPY_SESSION_NAME", ""))
    whose = f"{notebook} (process {pid})" if notebook else f"process {pid}"
    cause = f"CUDA in the kernel of {whose} is dead: {death.cause}"
    told = {"pid": pid, "started": started(pid), "cause": cause, "cure": death.cure}
    folder = state_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = folder / f"{pid}.incomplete"
    whole.write_text(json.dumps(told))
    os.replace(whole, folder / f"{pid}.dead")


def problems() -> list[Problem]:
    """Return a problem for each live process whose CUDA is dead, this one first."""
    death, found = cuda_state.death(), []  # a thread of the sampler's must not ask CUDA
    if death is not None:
        found.append(Problem("cuda-dead", death.said, death.cure))
    try:
        names = sorted(name for name in os.listdir(state_folder()) if name.endswith(".dead"))
    except OSError:
        names = []
    for name in names:
        if death is None or name != f"{os.getpid()}.dead":
            found += _read(state_folder() / name)
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
