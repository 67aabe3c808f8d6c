"""Find the frameworks that a cell needs: those that the kernel has imported, or that it imports."""

import ast
import importlib
import sys
from functools import cache
from typing import Any

from gpumagic.frameworks.framework import Framework

# By the module that people import; each class imports it.
_CLASSES = {
    "jax": ("gpumagic.frameworks.jax_framework", "Jax"),
    "tensorflow": ("gpumagic.frameworks.tensorflow_framework", "TensorFlow"),
    "cupy": ("gpumagic.frameworks.cupy_framework", "CuPy"),
}


def imported() -> list[Framework]:
    """The frameworks that this process has imported."""
    return [_made(module) for module in _CLASSES if module in sys.modules]


def needed_by(tree: ast.AST | None) -> list[Framework]:
    """Those, and what a cell imports itself: it is imported now, so that the cell can be placed."""
    named = set() if tree is None else imports_of(tree)
    return [_made(m) for m in _CLASSES if m in sys.modules or (m in named and _importable(m))]


def imports_of(tree: ast.AST) -> set[str]:
    """The packages that code imports anywhere: ``{"jax"}`` of ``import jax.numpy as jnp``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def _importable(module: str) -> bool:
    """Import it; what that raises, the cell's own import is to raise."""
    try:
        importlib.import_module(module)
    except Exception:  # noqa: BLE001  the user's library, whose error the cell shows
        return False
    return True


@cache
def _made(module: str) -> Framework:
    where, name = _CLASSES[module]
    made: Any = getattr(importlib.import_module(where), name)()
    framework: Framework = made
    return framework
