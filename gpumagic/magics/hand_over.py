"""Hand the tree of a cell to what runs it in IPython's place; its value is the cell's.

A dry run, several devices of this process, or the engines of a cluster.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, Protocol

from gpumagic.errors import GpuError, torch_needed
from gpumagic.magics.placing import Request


class Cell(Protocol):
    """A running cell, whose tree may be kept out of IPython's hands."""

    tree: ast.AST | None
    handed_over: bool


def hand_over(
    shell: Any, cell: Cell, asked: Request, file: str, show: Callable[[Any], object]
) -> Any:
    """Run a cell's tree, in the file of that name, as its line asks; `GpuError` for what cannot."""
    if not cell.handed_over:
        what = "--dry-run" if asked.dry_run else f"%%ongpu {asked.where}"
        raise GpuError(f"{what} must stand above the magic that runs the code")
    if asked.on_cluster or asked.on_several:
        raise GpuError(f"{asked.where}: a cell runs on one device as yet; type one of them")
    return _dry_run(shell, cell.tree, asked, file, show)


def _dry_run(
    shell: Any, tree: Any, asked: Request, file: str, show: Callable[[Any], object]
) -> Any:
    with torch_needed("%%ongpu"):
        from gpumagic.dryrun import dry_run_cell
    result = dry_run_cell(shell, tree, file, asked.on or asked.where, move=asked.move)
    if shell.displayhook.quiet():  # a semicolon at the end is about the cell's own value
        show(result)
        return None
    return result
