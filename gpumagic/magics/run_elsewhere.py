"""Run a cell elsewhere than in IPython: as a dry run, on several devices, a cluster, or timed.

Line numbers and tracebacks are those of the cell, and its last value is the cell's value. Ctrl-C
keeps the results until then.
"""

from __future__ import annotations

import ast
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from IPython.core.compilerop import PyCF_MASK

from gpumagic.display.progress_line import ProgressLine
from gpumagic.errors import GpuError, cluster_needed, show_as, torch_needed
from gpumagic.magics.ongpu_arguments import Request

# Magics that choose a device, as IPython translates them to Python.
_ELSEWHERE = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\('(ongpu|gputime|gpufit)'")
# The file name of code that is in no cell, such as a set-up.
_TEXT = "<timed "


def compiled_name(shell: Any, text: str, magic: str, setup: str = "") -> tuple[str, str]:
    """Return the code of a cell's text, below the line `magic` if given, and its file's name."""
    code, raw = shell.transform_cell(text), text
    _check(code, text, magic, setup)
    shown = code
    if magic:
        # One more line above gives the lines the cell's numbers. For tracebacks it is a statement,
        # since they take a file to begin at its first one.
        code, raw, shown = f"\n{code}", f"{magic}\n{text}", f"{magic!r}\n{code}"
    running = getattr(shell.displayhook, "exec_result", None)
    count = getattr(running, "execution_count", None) or shell.execution_count
    return code, shell.compile.cache(shown, count, raw_code=raw)


@contextmanager
def progressing(shell: Any, asked: Any, name: str) -> Iterator[ProgressLine]:
    """Yield a progress line; an error's traceback begins in the cell's own code."""
    line = ProgressLine(shell, silent=asked.quiet)
    try:
        yield line
    except BaseException as error:
        line.close()
        if not isinstance(error, GpuError):
            _begin_at(shell, error, name)
        raise


def give(shell: Any, asked: Namespace, line: ProgressLine, made: Any) -> None:
    """Assign and show a result as the line asks; raise KeyboardInterrupt after Ctrl-C."""
    if asked.output:
        shell.user_ns[asked.output] = made
    line.close(None if asked.quiet else made)
    if made.interrupted:
        where = "shown above" if not asked.quiet else asked.output and f"in {asked.output}"
        raise _shown_as_line(KeyboardInterrupt(*[f"what was finished is {where}"] * bool(where)))


def _shown_as_line(error: KeyboardInterrupt) -> KeyboardInterrupt:
    text = ": ".join(["KeyboardInterrupt", *map(str, error.args)])
    show_as(error, lambda: [text])
    return error


def _check(code: str, text: str, magic: str, setup: str) -> None:
    """Raise GpuError for code that cannot be run elsewhere."""
    if text.lstrip().startswith("%%ongpu"):
        raise GpuError("the cell says %%ongpu too; leave that line out")
    _check_code(f"\n{code}" if magic else code, text.count("\n") + bool(magic))
    _check_code(setup, 1, "--setup: ")
    if not ast.parse(code).body:
        raise GpuError("there is no code; put what to time below the line, or after --")
    if found := _ELSEWHERE.search(code):
        line = f"{'%' * (1 + (found[1] == 'cell'))}{found[2]}"
        raise GpuError(f"the cell says {line} too; leave that line out")


def _check_code(code: str, lines: int, what: str = "") -> None:
    """Raise GpuError for a syntax error, with the line's number if there are several `lines`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # An `await` is refused later, with a better message.
            compile(code, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        at = f"line {error.lineno}: " if lines > 1 and error.lineno else ""
        text = (error.text or "").strip()
        raise GpuError(f"{what}{at}{error.msg}{f': {text}' if text else ''}") from None
    except ValueError as error:  # a null byte, before Python 3.12
        raise GpuError(f"{what}{error}") from None


def _begin_at(shell: Any, error: BaseException, name: str) -> None:
    """Make the traceback begin at the user's own line in the file `name`, as a plain cell's."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file == name or file.startswith(_TEXT):
            break
        trace = trace.tb_next
    if trace is not None:
        begin, show = trace, shell.InteractiveTB.structured_traceback
        show_as(error, lambda: list(show(type(error), error, begin, tb_offset=0)))
    elif type(error).__name__ == "OutOfMemoryError":  # while the inputs were copied
        notes = getattr(error, "__notes__", [])
        show_as(error, lambda: ["\n".join([f"{type(error).__name__}: {error}", *notes])])


class Cell(Protocol):
    """A running cell, as ongpu.py has it."""

    tree: ast.AST | None
    handed_over: bool
    report: Any  # shown at its end


_USE_SHARDING = (
    "JAX computes where an array is spread: x = jax.device_put(x, NamedSharding(Mesh("
    "jax.devices('gpu'), 'gpu'), PartitionSpec('gpu'))), all of jax.sharding"
)


def hand_over(
    shell: Any, cell: Cell, asked: Request, file: str, show: Callable[[Any], object]
) -> Any:
    """Run a cell's tree as its line asks, and return its value; `file` is the cell's file."""
    if not cell.handed_over:
        what = "--dry-run" if asked.dry_run else f"%%ongpu {asked.where}"
        raise GpuError(f"{what} must stand above the magic that runs the code")
    if asked.dry_run:
        return _dry_run(shell, cell.tree, asked, file, show)
    refuse_others(f"%%ongpu {asked.where}", shell, cell.tree, _USE_SHARDING)
    run = _on_ranks if asked.on_cluster else _on_several
    value, report = run(shell, cell.tree, asked, file)
    if report.wrong:
        raise GpuError("; ".join(report.wrong))
    cell.report = None if asked.quiet else report
    return value


def refuse_others(
    what: str, shell: Any, tree: Any, of_jax: str = "", *, placed: Sequence[str] = ()
) -> None:
    """Raise GpuError if a cell uses other frameworks than torch, which `what` does not support."""
    if used := _others_used(shell, tree) or placed:
        todo = of_jax if "JAX" in used else ""
        todo = todo or ("leave it out" if what.startswith("--") else "")
        why = f"{what} is for torch; this cell uses {' and '.join(used)}"
        raise GpuError(f"{why}; {todo}" if todo else why)


def _others_used(shell: Any, tree: Any) -> list[str]:
    """Return the other frameworks that a cell uses: ``["JAX"]``."""
    from gpumagic.frameworks.known import imports_of, needed_by
    from gpumagic.usercode.variables import names_read, variables_read

    read = dict(variables_read(names_read(tree, shell.transform_cell), shell.user_ns))
    return [framework.name for framework in needed_by(imports_of(tree), read)]


def _dry_run(
    shell: Any, tree: Any, asked: Request, file: str, show: Callable[[Any], object]
) -> Any:
    from gpumagic.dryrun import OF_JAX

    # In a forked process, as for torch, any of them would wait forever.
    refuse_others("--dry-run", shell, tree, OF_JAX)
    with torch_needed("%%ongpu --dry-run"):
        from gpumagic.dryrun.follow_code import dry_run_cell
    result = dry_run_cell(shell, tree, file, asked.on or asked.where, move=asked.move)
    if shell.displayhook.quiet():  # a semicolon at the end hides only the cell's own value
        show(result)
        return None
    return result


def _on_ranks(shell: Any, tree: Any, asked: Request, file: str) -> tuple[Any, Any]:
    with torch_needed(f"%%ongpu {asked.where}"), cluster_needed("%%ongpu"):
        from gpumagic.cluster.gpu_cluster import current

    ranks = current()
    value, made = ranks.run(tree, asked.where, file=file, asked=asked, quiet=asked.quiet)
    shell.user_ns.update(made)
    return value, ranks.last_report


def _on_several(shell: Any, tree: Any, asked: Request, file: str) -> tuple[Any, Any]:
    with torch_needed(f"%%ongpu {asked.where}"):
        from gpumagic.cluster.threads import CellOnDevices
        from gpumagic.placement.torch_devices import find_several
        from gpumagic.usercode.variables import names_read

    devices, space = find_several(asked.where), shell.user_ns
    names = names_read(tree, shell.transform_cell, space)
    flags = shell.compile.flags & PyCF_MASK
    with progressing(shell, asked, file) as line:
        run = CellOnDevices(tree, file, devices, asked, space, names, flags=flags)
        try:
            value = run.run(line.update)
        except KeyboardInterrupt as error:
            _shown_as_line(error)
            raise
    line.close()
    return value, run.report
