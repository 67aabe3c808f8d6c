"""Bring the arrays of variables to a device for code that runs on the variables themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpumagic.device import CPU
from gpumagic.frameworks.beside import Beside
from gpumagic.frameworks.bring_arrays import bring_all
from gpumagic.frameworks.framework import Framework


class ArraysInPlace:
    """Arrays of variables on another device, until they are taken back."""

    def __init__(self, namespace: dict[str, Any], beside: Beside) -> None:
        self._namespace, self._beside = namespace, beside
        self.left: list[str] = []  # what stays where it is, and why, a line each
        # Of each framework the variables that were brought, by where they were.
        self._origins: list[tuple[Framework, str, list[str]]] = []

    def bring(self, variables: Iterable[tuple[str, Any]]) -> int:
        """Bring them, binding names anew; the bytes."""
        nbytes, variables = 0, list(variables)
        for framework in self._beside.frameworks:
            moves = bring_all(framework, variables, self._beside.device, self._namespace)
            nbytes += moves.nbytes
            self.left += [f"{left.name} stays where it is: {left.reason}" for left in moves.left]
            by_source: dict[str, list[str]] = {}
            for moved in moves.moved:
                by_source.setdefault(moved.sources[0], []).append(moved.name)
            self._origins += [(framework, source, names) for source, names in by_source.items()]
        return nbytes

    def take_back(self) -> None:
        """Bring what the variables hold now where it was; to call it twice does no harm."""
        origins, self._origins = self._origins, []
        for framework, source, names in origins:
            devices = {str(device): device for device in (CPU, *framework.devices())}
            if source in devices:
                held = [(n, self._namespace[n]) for n in names if n in self._namespace]
                bring_all(framework, held, devices[source], self._namespace)
