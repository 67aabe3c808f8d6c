"""Find devices in a program, each as its framework has it: d2l.ai's functions for them.

They answer for torch, or for the framework that the caller's names are of where none is torch's.
"""

import sys
from importlib import import_module
from typing import Any

from gpumagic.device import CPU, Device
from gpumagic.errors import torch_needed
from gpumagic.frameworks.known import holds, imported
from gpumagic.frameworks.needed import Needed


def devices(*, memory: bool = True) -> list[Device]:
    """The GPUs that the framework can use here, by ordinal; without `memory` no driver is asked."""
    return _callers("devices").devices(memory)


def cpu() -> Any:
    """The CPU: ``device(type='cpu')``, JAX's ``CpuDevice(id=0)``, ``tf.device("/CPU:0")``."""
    return own(_callers("cpu"), CPU)


def gpu(i: int = 0) -> Any:
    """GPU `i`: ``device(type='cuda', index=i)``, whether or not it exists; of JAX one that does."""
    return own(_callers("gpu"), Device("cuda", i))


def num_gpus() -> int:
    """The number of GPUs that the framework can use."""
    return len(_gpus(_callers("num_gpus")))


def try_gpu(i: int = 0) -> Any:
    """GPU `i` if it exists, else the CPU."""
    needed = _callers("try_gpu")
    return own(needed, dict(enumerate(_gpus(needed))).get(i, CPU))


def try_all_gpus() -> list[Any]:
    """All GPUs; an empty list where there is none."""
    needed = _callers("try_all_gpus")
    return [own(needed, device) for device in _gpus(needed)]


def needed_in(namespace: dict[str, Any], what: str) -> Needed:
    """The frameworks that code with these names is run with; GpuError where there is none."""
    needed = Needed(None, namespace)
    if needed.others and not holds(namespace, {"torch"}):
        needed.torch = False  # imported by something else: by virtual GPUs, for one
    needed.others = needed.others or (() if needed.torch else tuple(imported()))
    if not needed.torch and not needed.others:
        with torch_needed(f"{what} (of none of JAX, TensorFlow, CuPy)"):
            import_module("torch")
    return needed


def own(needed: Needed, device: Device) -> Any:
    """A device as the framework has it that code is run with."""
    return needed.of_torch(device) or needed.others[0].own(device)


def _callers(name: str) -> Needed:
    return needed_in(sys._getframe(2).f_globals, f"gpumagic.{name}")


def _gpus(needed: Needed) -> list[Device]:
    return needed.devices() if needed.torch else needed.others[0].devices()
