"""Run cells in place of IPython: dry runs, timed cells, cells on several devices or a cluster."""

from __future__ import annotations

import ast
import re
import traceback
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import getfullargspec
from typing import Any

from IPython.core.compilerop import PyCF_MASK
from IPython.display import display

from gpumagic.display.progress_line import ProgressLine
from gpumagic.errors import GpuError, cluster_needed, show_as, torch_needed
from gpumagic.magics.arguments import on_cluster
from gpumagic.usercode.frames import steps_of
from gpumagic.usercode.sweep import parse, range_of

# Matches the Python code to which IPython translates a magic that chooses a device.
_ELSEWHERE = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\('(ongpu|gputime|gpudiff|gpufit)'")
_TEXT = "<timed "  # prefix of the file names of code outside cells, such as the code of --setup
_USE_SHARDING = (
    "JAX computes on all GPUs of a sharded array: from jax.sharding import *; x = jax.device_put("
    "x, NamedSharding(Mesh(jax.devices('gpu'), 'gpu'), PartitionSpec('gpu')))"
)


def run_elsewhere(shell: Any, cell: Any, asked: Namespace, file: str) -> Any:
    """Run a RunningCell with the parsed options `asked`; return the cell's value."""
    line = "%%ongpu --dry-run" if asked.dry_run else f"%%ongpu {asked.where}"
    if not cell.elsewhere:
        raise GpuError(f"{line} must be the first line, above other magics")
    if asked.dry_run:
        return _dry_run(shell, cell.tree, asked, file)
    only_torch(line, shell, cell.tree, _USE_SHARDING)
    run = _on_ranks if on_cluster(asked.where) else _on_several
    try:
        with torch_needed(line), cluster_needed("%%ongpu"):
            value, report = run(shell, cell.tree, asked, file)
    except KeyboardInterrupt as error:
        _show_briefly(error)
        raise
    if report.wrong:
        raise GpuError("; ".join(report.wrong))
    cell.report = None if asked.quiet else report
    return value


def only_torch(
    what: str, shell: Any, tree: Any, of_jax: str = "", *, placed: Sequence[str] = ()
) -> None:
    """Raise GpuError if a cell uses a framework other than torch; `what` is a magic or option."""
    from gpumagic.frameworks.known import imports_of, needed_by
    from gpumagic.usercode.variables import names_read, variables_read

    read = dict(variables_read(names_read(tree, shell.transform_cell), shell.user_ns))
    if used := [framework.name for framework in needed_by(imports_of(tree), read)] or placed:
        why = f"{what} is for torch; this cell uses {' and '.join(used)}"
        raise GpuError(f"{why}; {of_jax}" if of_jax and "JAX" in used else why)


def _dry_run(shell: Any, tree: Any, asked: Namespace, file: str) -> Any:
    from gpumagic.dryrun import OF_JAX

    # A dry run's fork has no threads, so other frameworks would wait forever for their threads.
    only_torch("--dry-run", shell, tree, OF_JAX)
    with torch_needed("%%ongpu --dry-run"):
        from gpumagic.device.cards import cards
        from gpumagic.dryrun.follow_code import dry_run_cell
    on: Any = asked.where if asked.on is None else cards(asked.on)
    result = dry_run_cell(shell, tree, file, on, move=asked.move)
    if shell.displayhook.quiet():  # a final semicolon must not hide the prediction
        display(result)
        return None
    return result


def _sharing(asked: Namespace) -> Any:
    from gpumagic.cluster.scattered import Sharing

    return Sharing(asked.split, asked.gather, asked.reduce, asked.chunk)


def _on_ranks(shell: Any, tree: Any, asked: Namespace, file: str) -> tuple[Any, Any]:
    from gpumagic.cluster.gpu_cluster import current

    ranks = current()
    value, made = ranks.run(tree, asked.where, file=file, asked=_sharing(asked), quiet=asked.quiet)
    shell.user_ns.update(made)
    return value, ranks.last_report


def _on_several(shell: Any, tree: Any, asked: Namespace, file: str) -> tuple[Any, Any]:
    from gpumagic.cluster.threads import CellOnDevices
    from gpumagic.frameworks.public import explained_at_once
    from gpumagic.placement.torch_devices import find_several
    from gpumagic.usercode.variables import names_read

    devices, space = find_several(asked.where), shell.user_ns
    names = names_read(tree, shell.transform_cell, space)
    flags = shell.compile.flags & PyCF_MASK
    with _progressing(shell, asked, file) as line:
        given = (tree, file, devices, _sharing(asked), space, names)
        run = CellOnDevices(*given, flags=flags, explains=explained_at_once)
        value = run.run(line.update)
    line.close()
    return value, run.report


def time_cell(shell: Any, asked: Namespace, magic: str, text: str, scope: Any = None) -> None:
    """Time the code `text` below the line `magic`; `scope` has the calling function's variables."""
    from gpumagic import timing

    namespace = _names(shell, scope)
    against = _earlier(asked.against, namespace) if asked.against else None
    sweep = parse(asked.sweep, namespace) if asked.sweep else None
    setup = shell.transform_cell(asked.setup) if asked.setup else ""
    code, name = _compiled_name(shell, text, magic)
    with _progressing(shell, asked, name) as line:
        made = timing.compare(
            code,
            tuple(asked.where) or None,
            setup=setup,
            sweep=sweep,
            items=asked.items,
            max_time=asked.max_time,
            namespace=namespace,
            against=against,
            progress=line.update,
            filename=name,
            text=text,
        )
    _give(shell, asked, line, made)


def diff_cell(shell: Any, asked: Namespace, magic: str, text: str, scope: Any = None) -> None:
    """Find the first operation at which two runs of `text` differ; arguments as in `time_cell`."""
    with torch_needed("%%gpudiff"):
        from gpumagic.numerics.numeric_diff import diff
    code, name = _compiled_name(shell, text, magic)
    with _progressing(shell, asked, name) as line:
        line.update(f"comparing {' and '.join(asked.where)}")
        made = diff(code, *asked.where, namespace=_names(shell, scope), filename=name, text=text)
    _give(shell, asked, line, made)


def _names(shell: Any, scope: Any) -> dict[str, Any]:
    names: dict[str, Any] = shell.user_ns
    # Copy only if necessary, because the notebook's functions do not see names assigned in a copy.
    return names if scope is None or scope is names else {**names, **scope}


def _earlier(named: str, names: Mapping[str, Any]) -> Any:
    """Return the result in variable `named`, or "last" itself. GpuError if there is no result."""
    from gpumagic.timing import last_comparison
    from gpumagic.timing.comparison import Comparison

    found = last_comparison() if named == "last" else names.get(named)
    if not isinstance(found, Comparison):
        why = "nothing was timed before" if named == "last" else "no result has that name"
        raise GpuError(f"--against {named}: {why}; type the NAME of an earlier -o NAME")
    return named if named == "last" else found


def fit_cell(shell: Any, asked: Namespace, magic: str, text: str) -> None:
    """Find the largest value of a variable with which the code `text` fits in GPU memory."""
    wheres = [word for word in asked.where if "=" not in word]
    ranges = [word for word in asked.where if "=" in word]
    with suppress(SyntaxError):  # the code below reports the error
        # Assign the swept variable first, so that `only_torch` ignores its present value.
        swept = "".join(f"{word.partition('=')[0]} = 0\n" for word in ranges)
        only_torch("%%gpufit", shell, ast.parse(swept + shell.transform_cell(text)))
    with torch_needed("%%gpufit"):
        from gpumagic.device.cards import cards
        from gpumagic.fitting.fit import fit
        from gpumagic.memory.holders_by_name import memory
        from gpumagic.memory.memory_report import hints

    if len(ranges) != 1:
        raise GpuError("one variable with its values is needed; type batch=1..4096")
    if len(wheres) + (asked.on is not None) > 1:
        instead = "for cards, type only --on CARD, CARD"
        raise GpuError(f"name one GPU: leave out {wheres[-1]}; {instead}")
    variable, values = range_of(ranges[0])
    named = getfullargspec(fit)
    if variable in (*named.args, *named.kwonlyargs):
        raise GpuError(f"{variable} is an option of gpumagic.fit; give the variable another name")
    on: Any = cards(asked.on) if asked.on is not None else next(iter(wheres), None)
    code, name = _compiled_name(shell, text, magic)
    with _progressing(shell, asked, name) as line:
        made = fit(
            code,
            on,
            margin=asked.margin,
            dry=asked.dry,
            namespace=shell.user_ns,
            progress=line.update,
            filename=name,
            text=text,
            **{variable: values},
        )
    _give(shell, asked, line, made)
    for hint in [] if asked.on or asked.quiet else hints(memory()):
        print(hint)


def _compiled_name(shell: Any, text: str, magic: str) -> tuple[str, str]:
    """Translate `text` to Python; return the code and its file name for tracebacks."""
    code, raw = shell.transform_cell(text), text
    if text.lstrip().startswith("%%ongpu"):
        raise GpuError("the cell says %%ongpu too; leave that line out")
    if found := _ELSEWHERE.search(code):
        line = f"{'%' * (1 + (found[1] == 'cell'))}{found[2]}"
        raise GpuError(f"the cell says {line} too; leave that line out")
    shown = code
    if magic:
        # In `code`, an empty first line replaces the magic, so that line numbers match the cell.
        # Tracebacks skip empty lines, so they read `shown`, whose first line is the magic's text.
        code, raw, shown = f"\n{code}", f"{magic}\n{text}", f"# {magic}\n{code}"
    running = getattr(shell.displayhook, "exec_result", None)
    count = getattr(running, "execution_count", None) or shell.execution_count
    return code, shell.compile.cache(shown, count, raw_code=raw)


@contextmanager
def _progressing(shell: Any, asked: Any, name: str) -> Iterator[ProgressLine]:
    """Yield a progress line; make the traceback of an error begin in the cell's code."""
    line = ProgressLine(shell, silent=asked.quiet)
    try:
        yield line
    except BaseException as error:
        line.close()
        file = getattr(error, "filename", None) or ""
        if isinstance(error, SyntaxError) and (file == name or file.startswith(_TEXT)):
            where = f"line {error.lineno}: " if file == name else "--setup: "
            raise GpuError(f"{where}{error.msg}: {(error.text or '').strip()}") from None
        if isinstance(error, KeyboardInterrupt):
            _show_briefly(error)
        elif not isinstance(error, GpuError):
            _begin_at(shell, error, name)
        raise


def _begin_at(shell: Any, error: BaseException, name: str) -> None:
    """Make the traceback begin at the user's line in the file `name`, as in a plain cell."""
    users, steps = (name, _TEXT), steps_of(error.__traceback__)
    begin = next((tb for tb in steps if tb.tb_frame.f_code.co_filename.startswith(users)), None)
    if begin is not None:
        show = shell.InteractiveTB.structured_traceback
        show_as(error, lambda: list(show(type(error), error, begin, tb_offset=0)))
    elif type(error).__name__ == "OutOfMemoryError":  # raised while inputs were copied
        _show_briefly(error)


def _show_briefly(error: BaseException) -> None:
    text = "\n".join(traceback.format_exception_only(error)).rstrip()
    show_as(error, lambda: [text])


def _give(shell: Any, asked: Namespace, line: ProgressLine, made: Any) -> None:
    """Show a result and assign it to the variable of -o; raise KeyboardInterrupt after Ctrl-C."""
    if asked.output:
        shell.user_ns[asked.output] = made
    line.close(None if asked.quiet else made)
    if getattr(made, "interrupted", False):
        error = KeyboardInterrupt()  # the displayed result shows what has finished
        _show_briefly(error)
        raise error
