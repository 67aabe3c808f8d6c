"""Find the tensors in what is copied, and where each copy goes; or bring the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from gpumagic.errors import GpuError
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.move import move_all


def homes(
    namespace: Mapping[str, Any], values: Mapping[str, Any], device: torch.device
) -> tuple[dict[int, torch.device], list[str]]:
    """Where the copy of each tensor goes, by its id; and a line of each that autograd tracks."""
    finder = TensorFinder(namespace.get("__name__") or "__main__")
    finder.variables(values.items())
    tracked = (found.path for found in finder.tensors if found.tensor.grad_fn is not None)
    notes = [f"{path}: copied without its autograd graph" for path in tracked]
    return {id(found.tensor): found.home or device for found in finder.tensors}, notes


class TensorsInPlace:
    """Tensors of variables on another device, until they are taken back."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._origins: list[tuple[torch.device, list[Any]]] = []

    def bring(self, variables: Iterable[tuple[str, Any]], device: torch.device) -> int:
        """Bring them; the bytes. Raises torch.OutOfMemoryError, and nothing is elsewhere."""
        variables = list(variables)
        finder = TensorFinder()
        finder.variables(variables)
        origins: dict[torch.device, list[Any]] = {}
        for found in finder.found:
            if found.must_move(device):
                origins.setdefault(found.tensor.device, []).append(found.tensor)
        for held in finder.movable:
            origins.setdefault(held.tensors[0].tensor.device, []).append(held.value)
        self._origins = list(origins.items())
        try:
            return move_all(variables, device, followers=self._optimizers()).nbytes
        except GpuError as error:
            self._origins = []
            raise torch.OutOfMemoryError(str(error)) from None
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Bring each where it was; to call it twice does no harm."""
        origins, self._origins = self._origins, []
        for device, tensors in origins:
            move_all([("", tensors)], device, followers=self._optimizers())

    def _optimizers(self) -> list[tuple[str, Optimizer]]:
        return [(n, v) for n, v in self._namespace.items() if issubclass(type(v), Optimizer)]
