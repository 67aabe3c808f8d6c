"""Find the frameworks that a cell needs: those that it imports, and those that are in use."""

import ast
import importlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

from gpumagic.device import here
from gpumagic.errors import GpuError
from gpumagic.frameworks import on_import
from gpumagic.frameworks.framework import Framework
from gpumagic.usercode.files import is_users
from gpumagic.usercode.values import defined_in, of_function

# By the module that people import: the class, which imports it; and packages that build on it.
_CLASSES = {
    "jax": ("gpumagic.frameworks.jax_framework", "Jax"),
    "tensorflow": ("gpumagic.frameworks.tensorflow_framework", "TensorFlow"),
    "cupy": ("gpumagic.frameworks.cupy_framework", "CuPy"),
}
_PACKAGES = {
    "jax": {"jax", "jaxlib", "flax", "optax", "equinox"},
    "tensorflow": {"tensorflow", "keras"},
    "cupy": {"cupy", "cupyx", "cudf"},
}

# The fields of a statement that hold statements.
_BLOCKS = {"body", "orelse", "finalbody", "handlers", "cases"}


def imported() -> list[Framework]:
    """The frameworks that this process has imported."""
    return [_made(module) for module in _CLASSES if module in sys.modules]


def needed_by(named: set[str], namespace: Mapping[str, Any]) -> list[Framework]:
    """Those that a cell imports by these names, which is done now; and those that are in use.

    A library may import one for reasons of its own (tensorboard imports TensorFlow): to place what
    nobody uses would start it, and JAX then takes most of each GPU's memory.
    """
    return [
        _made(module)
        for module in _CLASSES
        if (named & _PACKAGES[module] and _importable(module))
        or (module in sys.modules and holds(namespace, _PACKAGES[module]))
    ]


def holds(namespace: Mapping[str, Any], packages: set[str], also_modules: bool = True) -> bool:
    """Whether a name stands for something of these packages, also in modules of the user's."""
    for value in list(namespace.values()):
        if type(value) is not ModuleType:
            named = of_function(value, "__module__") or defined_in(type(value))
            found = str(named).partition(".")[0] in packages
        elif also_modules and is_users(getattr(value, "__file__", None)):
            found = holds(vars(value), packages, also_modules=False)
        else:
            found = value.__name__.partition(".")[0] in packages
        if found:
            return True
    return False


def versions() -> dict[str, str]:
    """Of those that this process has imported, by name: ``{"JAX": "0.10.2"}``."""
    there = [module for module in _CLASSES if module in sys.modules]
    return {_made(m).name: str(getattr(sys.modules[m], "__version__", "")) for m in there}


def imports_of(tree: ast.AST | None) -> set[str]:
    """The packages that code imports anywhere: ``{"jax"}`` of ``import jax.numpy as jnp``."""
    found: set[str] = set()
    waiting = [] if tree is None else [tree]
    while waiting:  # an expression holds no statement: most of a tree is passed over
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
        for block in _BLOCKS.intersection(node._fields):
            waiting += getattr(node, block)
    return found


def _importable(module: str) -> bool:
    """Import it; what that raises, the cell's own import is to raise."""
    try:
        importlib.import_module(module)
    except Exception:  # noqa: BLE001  the user's library, whose error the cell shows
        return False
    return True


def make_virtual(count: int) -> None:
    """Have each framework make so many virtual GPUs, now or once it is imported."""
    for module in _CLASSES:

        def make(module: str = module) -> None:
            with suppress(GpuError):  # a cell that is placed there says it, and so does `%gpus`
                _made(module).make_virtual(count)

        on_import.when_imported(module, make)


def forget_virtual() -> None:
    """What is imported from now on has no virtual GPUs."""
    on_import.forget()
    for framework in imported():
        with suppress(GpuError):
            framework.make_virtual(0)


def too_late() -> list[str]:
    """What the frameworks say that started before virtual GPUs were there."""
    said = []
    for framework in imported():
        try:
            framework.make_virtual(len(here(memory=False)))
        except GpuError as error:
            said.append(str(error))
    return said


def started() -> list[Framework]:
    """The frameworks that have started: what they are asked starts nothing."""
    return [framework for framework in imported() if framework.started()]


def jax_here() -> Any:
    """JAX, which this process has imported."""
    return _made("jax")


@cache
def _made(module: str) -> Framework:
    where, name = _CLASSES[module]
    made: Any = getattr(importlib.import_module(where), name)()
    framework: Framework = made
    return framework
