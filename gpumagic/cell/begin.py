"""Make the run of a cell: for torch, and for each other framework that the cell needs."""

import ast
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from gpumagic.cell.array_run import ArrayRun
from gpumagic.cell.runs import OneRun, Runs
from gpumagic.device import Device, cuda_state
from gpumagic.errors import GpuError, torch_needed
from gpumagic.frameworks.bring_arrays import left_alone
from gpumagic.frameworks.known import Needed, imported
from gpumagic.moving.moved import Left, Moves, all_of
from gpumagic.usercode.values import defined_in, is_tensor, torch_here


class CellNeeds(Needed):
    """What a cell is to be placed for, and its run."""

    def __init__(self, tree: ast.AST | None, namespace: dict[str, Any]) -> None:
        super().__init__(tree, namespace)
        self._namespace = namespace

    def find(self, where: object) -> Device:
        """The device that a WHERE names. Raises `GpuError`, also where there is no framework."""
        if not self.torch and not self.others:
            with torch_needed("a placed cell (of none of JAX, TensorFlow, CuPy)"):
                import_module("torch")
        return super().find(where)

    def run(
        self,
        device: Device,
        names: Iterable[str],
        *,
        fix: bool = False,
        recorder: Callable[[], Any] | None = None,
        **options: Any,
    ) -> OneRun:
        """The run of a cell that reads `names`, with the options of its line.

        `recorder` makes what records the peak of torch's memory.
        """
        names, namespace = list(names), self._namespace
        runs: list[OneRun] = []
        foreign = [name for name in names if _is_foreign(type(namespace.get(name)))]
        left = tuple(left_alone(foreign, namespace, device)) if foreign else ()
        if self.torch:
            from gpumagic.cell.run import Run

            made = recorder() if recorder is not None else None
            runs.append(Run(device, namespace, names, fix=fix, recorder=made, left=left, **options))
        elif fix or recorder is not None:
            used = " and ".join(other.name for other in self.others)
            given = "--fix" if fix else "--memory"
            raise GpuError(f"{given} is for cells of torch, and this one uses {used}; leave it out")
        if self.unusable:
            tensors = (name for name in names if is_tensor(namespace.get(name)))
            left += tuple(Left(name, self.unusable) for name in tensors)
        for other in self.others:  # the first run tells
            told = () if runs else left
            runs.append(ArrayRun(other, device, namespace, names, left=told, **options))
        return runs[0] if len(runs) == 1 else Runs(runs)


def _is_foreign(kind: type) -> bool:
    """Whether a class may be of arrays that neither torch nor the notebook has defined."""
    return str(defined_in(kind)).partition(".")[0] not in ("torch", "builtins", "__main__")


def bring_home(namespace: dict[str, Any]) -> tuple[Moves, list[str]]:
    """Bring home what cells brought to a device; and the names of what was made on one."""
    cuda_state.check()
    found: list[Moves] = []
    made: list[str] = []
    if torch_here() is not None:
        from gpumagic.moving import move

        found.append(move.bring_home(namespace))
        made += [n for n, tensor in move.tensors_in(namespace) if tensor.device.type != "cpu"]
    for framework in imported():
        from gpumagic.frameworks import bring_arrays

        every = bring_arrays.homes
        ours = {name: home for (of, name), home in every.items() if of == framework.name}
        found.append(bring_arrays.bring_home(framework, namespace, ours))
        made += bring_arrays.still_there(framework, namespace)
        for name in ours:
            del every[framework.name, name]
    return all_of(found), made
