"""Tell of a GPU of which JAX took most when it started, as it does unless it is told not to."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpumagic.telemetry.check import Check
from gpumagic.telemetry.snapshot import GpuSample, Problem, ProcessSample

# It takes 75 % of a GPU, unless it is told another share.
_MOST = 0.65
# The library of JAX's that is loaded when it starts on a GPU, not when it is imported.
_PLUGIN = b"/jax_plugins/"
_TAKES, _SHARE = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_OFF = ("false", "0")
CURE = f"set {_TAKES}=false, or {_SHARE}=.5, in its environment before JAX starts there"


def preallocated(
    gpus: Sequence[GpuSample], processes: Iterable[ProcessSample], proc: Path = Path("/proc")
) -> list[Problem]:
    """The GPUs that JAX took for itself, where another process, or torch in this one, is too."""
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
    """Whether JAX has started in a process, and was not told to take what it needs."""
    try:
        if _PLUGIN not in (proc / str(holder.pid) / "maps").read_bytes():
            return False
        if holder.mine:
            return not _told(os.environ)
        words = (proc / str(holder.pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return False
    return not _told(dict(os.fsdecode(word).partition("=")[::2] for word in words))


def _told(env: Mapping[str, str]) -> bool:
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
    """What the doctor says of it where JAX is imported."""
    if "jax" not in sys.modules:
        return []
    if _told(env):
        said = [f"{name}={env[name]}" for name in (_TAKES, _SHARE) if env.get(name)]
        return [Check("JAX", True, " ".join(said))]
    cure = f"{_TAKES}=false or {_SHARE}=.5 before it starts changes that"
    return [Check("JAX", None, f"takes 75 % of each GPU when it starts; {cure}")]
