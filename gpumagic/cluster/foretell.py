"""Foretell a cell of all ranks: rank 0 follows it in a dry run, with the variables that it has."""

import ast
import signal
import time
from typing import Any

import ipyparallel

from gpumagic.cluster import engine
from gpumagic.cluster.engine import CellOrder
from gpumagic.cluster.engines import Engines
from gpumagic.cluster.orders import Orders, Whole
from gpumagic.cluster.ranks_error import interrupt
from gpumagic.display.progress_line import ProgressLine
from gpumagic.dryrun.dry_cell import dry_run_cell
from gpumagic.dryrun.result import DryRun
from gpumagic.errors import GpuError
from gpumagic.usercode.files import shell

_LOOK_S, _PATIENCE_S, _END_S = 0.1, 2.0, 5.0


def foretell(engines: Engines, tree: ast.Module, file: str, on: str | None) -> DryRun:
    """What each rank would need for a cell: of cards, ``"8 x H100 80GB"``, else where it is.

    Raises `GpuError`, and KeyboardInterrupt.
    """
    rank = engines.ranks[0]
    orders = Orders(tree, file, [rank], Whole())
    orders.deliver(engines)
    asked = engines.ask(rank, follow, orders.order(0), on or f"{len(engines.ranks)} x cuda:0")
    try:
        found: DryRun = _awaited(asked)
    except KeyboardInterrupt:
        engines.signal([rank], signal.SIGINT)
        asked.wait(_END_S)
        raise interrupt("the dry run was ended; nothing of yours has changed", ()) from None
    except ipyparallel.error.RemoteError as error:
        raise GpuError(str(error.evalue)) from None
    return found


def _awaited(asked: Any) -> Any:
    began = time.monotonic()
    with ProgressLine(shell()) as line:
        while not asked.ready():
            asked.wait(_LOOK_S)
            seconds = time.monotonic() - began
            if seconds > _PATIENCE_S:
                line.update(f"dry run in rank 0: {seconds:.0f} s; Ctrl-C ends it")
    return asked.get()


def follow(order: CellOrder, on: str) -> DryRun:
    """In an engine: the dry run of a cell."""
    engine.bring(order)
    return dry_run_cell(shell(), order.tree, order.file, on)
