"""Offer `%%ongpu` as a cell magic: its help, and `run_cell_magic("ongpu", line, text)`.

A cell that begins with the line does not come through here: see `gpumagic.magics.ongpu`.
"""

import ast
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import no_var_expand

from gpumagic.errors import GpuError
from gpumagic.magics.ongpu import CellHooks, RunningCell
from gpumagic.magics.ongpu_line import request


def ongpu_magic(cells: CellHooks) -> Any:
    """The magic of one shell."""

    @no_var_expand
    def ongpu(line: str, cell: str) -> Any:
        """Run this cell on one device.

        New tensors and modules are made there, a bare "cuda" means that GPU, batches of a
        DataLoader land there, and the tensors, modules and optimizers that the cell reads are
        brought there first, each staying the object it is. An explicit `device=` wins. A line
        under the cell says what moved, how long it took and the peak memory.

        Usage::

            %%ongpu WHERE [--no-move] [--quiet] [--report] [--strict] [--fix] [--dry-run]

            WHERE        1   cuda:1   gpu:1   /gpu:1   cuda   cpu   mps   GPU-4f2a…
                         free   the GPU with the most free memory
                         1?     GPU 1, or else the CPU, and say so
            --no-move    leave variables and batches where they are
            --quiet      no report; gpumagic.last_report() has it
            --report     with a table of the copies between devices and the waits, by line, with
                         advice
            --strict     the first copy or wait that is implicit (no device is named: .item(),
                         print, a mask, an index on the CPU) is an error at its line
            --fix        bring operands on several devices to where most bytes are, and say so
            --dry-run    compute nothing and change nothing: say what the cell would assign, copy
                         and need in memory, and where it would fail

        Examples::

            %%ongpu 1
            net = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 10))
            loss = F.cross_entropy(net(X), y)      # X and y are brought to cuda:1

            %%ongpu free
            %%time
            train(net, loader)

        Peak memory is counted from the start of the cell, as after
        `torch.cuda.reset_peak_memory_stats()`. For all cells from now on: `%ongpu 1`. In a
        program: `with gpumagic.on(1):`.
        """
        return _run(cells, line, cell)

    return ongpu


def _run(cells: CellHooks, line: str, text: str) -> Any:
    """Run the text as a cell of its own; the value is that of the last expression."""
    shell, asked = cells.shell, request(line)
    if not text.strip():
        raise UsageError("%%ongpu: the cell is empty; put the code to run below that line")
    code = shell.transform_cell(text)
    name = shell.compile.cache(code, raw_code=text)
    tree = shell.transform_ast(shell.compile.ast_parse(code, filename=name))
    cell = RunningCell(tree)
    cells.stack.append(cell)
    error: BaseException | None = None
    try:
        if asked.dry_run:
            return cells.dry_run(cell, asked, name)
        cells.place(cell, asked)
        *body, last = tree.body
        value = last.value if isinstance(last, ast.Expr) else None
        if value is None:
            body.append(last)
        exec(compile(ast.Module(body, []), name, "exec"), shell.user_ns)
        if value is not None:
            return eval(compile(ast.Expression(value), name, "eval"), shell.user_ns)
    except GpuError as refused:
        raise UsageError(f"%%ongpu: {refused}") from None
    except BaseException as raised:
        error = raised
        raise
    finally:
        cells.stack.remove(cell)
        cells.finish(cell, error)
