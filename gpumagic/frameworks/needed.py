"""Find what code is run with: torch, and the other frameworks; and the devices that they can use.

torch is needed unless others are in use and it is not imported: so a cell which imports it by way
of another module is placed too.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gpumagic.device import Device, here, resolve_one
from gpumagic.errors import GpuError
from gpumagic.frameworks.known import imports_of, needed_by
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    import torch


class Needed:
    """What code is to be placed for: where it imports it, or once the notebook has it in use."""

    def __init__(self, tree: ast.AST | None, namespace: dict[str, Any]) -> None:
        named = imports_of(tree)
        self.others = tuple(needed_by(named, namespace))
        self.torch = torch_here() is not None or (
            ("torch" in named or not self.others) and find_spec("torch") is not None
        )
        self.unusable = ""  # why torch is not placed beside others, though it is imported

    @classmethod
    def by(cls, namespace: dict[str, Any], *codes: object) -> Needed:
        """What the texts among these need, one after the other; no Python is refused elsewhere."""
        with suppress(SyntaxError, ValueError):
            text = "\n".join(code for code in codes if isinstance(code, str))
            return cls(ast.parse(text), namespace)
        return cls(None, namespace)

    def find(self, where: object) -> Device:
        """The one device that `where` names. Raises `GpuError`."""
        memory = "free" in str(where)
        if not self.torch:
            return resolve_one(where, self.devices(memory))
        from gpumagic.placement.torch_devices import find

        try:
            return find(where)
        except GpuError as error:
            # A torch for the CPU beside a framework that has the GPU: that one is placed.
            if not self.others:
                raise
            device = resolve_one(where, self._of_others(memory))
            self.torch, self.unusable = False, str(error)
            return device

    def devices(self, memory: bool = False) -> list[Device]:
        """The GPUs that they can use here, by ordinal."""
        if not self.torch:
            return self._of_others(memory)
        from gpumagic.placement import torch_devices

        return torch_devices.devices(memory=memory)

    def of_torch(self, device: Device) -> torch.device | None:
        """The device as torch has it; None where code is not run with torch."""
        if not self.torch:
            return None
        from gpumagic.placement import torch_devices

        return torch_devices.as_torch(device)

    def _of_others(self, memory: bool) -> list[Device]:
        found = here(memory=memory)
        # NVML is silent (ROCm, Jetson): the framework is what will run the code.
        return found or next(filter(None, (other.devices() for other in self.others)), [])
