"""Make the run of a cell: for torch, and for each other framework that the cell needs."""

import ast
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from gpumagic.cell.array_run import ArrayRun
from gpumagic.cell.runs import OneRun, Runs
from gpumagic.device import Device, here, resolve_one
from gpumagic.errors import GpuError, torch_needed
from gpumagic.frameworks.known import imported, imports_of, needed_by
from gpumagic.moving.moved import Left, Moves, all_of
from gpumagic.usercode.torch_classes import is_tensor, torch_here


class Needed:
    """What a cell is to be placed for: torch, unless others are in use and torch is not.

    A framework is needed where the cell imports it, or once the notebook has it in use.
    """

    def __init__(self, tree: ast.AST | None, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self.others = needed_by(tree, namespace)
        named = set() if tree is None else imports_of(tree)
        self._torch = torch_here() is not None or "torch" in named or not self.others
        self._unusable = ""  # why torch is not placed beside others, though it is imported

    def find(self, where: str) -> Device:
        """The device that a WHERE names. Raises `GpuError`."""
        if not self._torch:
            return resolve_one(where, self._devices("free" in where))
        if torch_here() is None:
            with torch_needed("a placed cell (of none of JAX, TensorFlow, CuPy)"):
                import_module("torch")
        from gpumagic.placement.torch_devices import find

        try:
            return find(where)
        except GpuError as error:
            # A torch for the CPU beside a framework that has the GPU: that one is placed.
            if not self.others:
                raise
            device = resolve_one(where, self._devices("free" in where))
            self._torch, self._unusable = False, str(error)
            return device

    def _devices(self, memory: bool) -> list[Device]:
        found = here(memory=memory)
        # NVML is silent (ROCm, Jetson): the framework is what will run the cell.
        return found or next(filter(None, (other.devices() for other in self.others)), [])

    def run(
        self,
        device: Device,
        names: Iterable[str],
        *,
        fix: bool = False,
        recorder: Any = None,
        **options: Any,
    ) -> OneRun:
        """The run of a cell that reads `names`, with the options of its line."""
        names, namespace = list(names), self._namespace
        runs: list[OneRun] = []
        if self._torch:
            from gpumagic.cell.run import Run

            runs.append(Run(device, namespace, names, fix=fix, recorder=recorder, **options))
        elif fix or recorder is not None:
            used = " and ".join(other.name for other in self.others)
            given = "--fix" if fix else "--memory"
            raise GpuError(f"{given} is for cells of torch, and this one uses {used}; leave it out")
        if self._unusable:
            tensors = (name for name in names if is_tensor(namespace.get(name)))
            options["left"] = tuple(Left(name, self._unusable) for name in tensors)
        runs += [ArrayRun(other, device, namespace, names, **options) for other in self.others]
        return runs[0] if len(runs) == 1 else Runs(runs)


def bring_home(namespace: dict[str, Any]) -> tuple[Moves, list[str]]:
    """Bring home what cells brought to a device; and the names of what was made on one."""
    found: list[Moves] = []
    made: list[str] = []
    if torch_here() is not None:
        from gpumagic.moving import move

        found.append(move.bring_home(namespace))
        made += [n for n, tensor in move.tensors_in(namespace) if tensor.device.type != "cpu"]
    for framework in imported():
        from gpumagic.frameworks import bring_arrays

        found.append(bring_arrays.bring_home(framework, namespace))
        arrays = ((n, v) for n, v in namespace.items() if framework.is_array(v) and n[0] != "_")
        made += [name for name, array in arrays if framework.where(array) != "cpu"]
    return all_of(found), made
