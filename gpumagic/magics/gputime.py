"""Hand the text of a `%%gputime` cell to `compare`, and show and bind what it gives.

The engine is imported with the first of them: it needs torch.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumagic.display.progress_line import ProgressLine
from gpumagic.errors import GpuError, torch_needed
from gpumagic.magics.tracebacks import begin_at, check_code, render

if TYPE_CHECKING:
    from gpumagic.timing.comparison import Comparison


@dataclass(frozen=True)
class TimingRequest:
    """What a `%%gputime` line asks for; see `compare`, whose parameters these are."""

    where: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()
    setup: str = ""
    items: float | str | None = None
    max_time: float = 5.0
    in_place: bool = False
    output: str | None = None
    against: str | None = None
    quiet: bool = False


# Magics that say where code runs, as IPython has made Python of them.
_ELSEWHERE = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\('(ongpu|gputime)'")


def _engine(asked: str) -> Any:
    with torch_needed(asked):
        from gpumagic import timing
    return timing


class Timed:
    """Times the cells of one IPython shell."""

    def __init__(self, shell: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._shell = shell
        self._clock = clock

    def run(self, request: TimingRequest, magic: str, text: str, scope: Any = None) -> None:
        """Time `text`, as it was typed, show the Comparison and bind it as the request says.

        `magic` is the line above the text, `""` where the text is on it; `scope` has the names of
        the function that the magic is called in. Raises as `compare`, and KeyboardInterrupt after
        what was finished has been shown and bound.
        """
        timing = _engine("%%gputime")
        from gpumagic.magics.sweep_option import parse

        namespace = self._shell.user_ns
        if scope is not None and scope is not namespace:
            namespace = {**namespace, **scope}
        against = _earlier(request.against, namespace, timing.last_comparison())
        sweep = parse(request.sweep, namespace) if request.sweep else None
        code, raw = self._shell.transform_cell(text), text
        setup = self._shell.transform_cell(request.setup) if request.setup else ""
        _check(code, text, magic, setup)
        shown = code
        if magic:
            # A line more above, so that the numbers are those of the cell. For tracebacks it is a
            # statement: they take a file to begin where its first one does.
            code, raw, shown = f"\n{code}", f"{magic}\n{text}", f"{magic!r}\n{code}"
        running = getattr(self._shell.displayhook, "exec_result", None)
        count = getattr(running, "execution_count", None) or self._shell.execution_count
        name = self._shell.compile.cache(shown, count, raw_code=raw)
        line = ProgressLine(self._shell, self._clock, silent=request.quiet)
        try:
            made = timing.compare(
                code,
                request.where or None,
                setup=setup,
                sweep=sweep,
                items=request.items,
                max_time=request.max_time,
                in_place=request.in_place,
                namespace=namespace,
                against=against,
                progress=line.update,
                filename=name,
                text=text,
            )
        except GpuError:
            line.close()
            raise
        except BaseException as error:
            line.close()
            begin_at(self._shell, error, name)
            raise
        if request.output:
            self._shell.user_ns[request.output] = made
        line.close(None if request.quiet else made)
        if made.interrupted:
            where = (
                "shown above" if not request.quiet else request.output and f"in {request.output}"
            )
            told = [f"what was finished is {where}"] if where else []
            stopped = KeyboardInterrupt(*told)
            render(stopped, lambda: [": ".join(["KeyboardInterrupt", *told])])
            raise stopped


def _check(code: str, text: str, magic: str, setup: str) -> None:
    """Refuse what cannot be timed, in one line."""
    if text.lstrip().startswith("%%ongpu"):
        raise GpuError("the cell says %%ongpu too; leave that line out")
    # The magic's own line is above, so that the numbers are those of the cell.
    check_code(f"\n{code}" if magic else code, text.count("\n") + bool(magic))
    check_code(setup, 1, "--setup: ")
    if not ast.parse(code).body:
        raise GpuError("there is no code; put what to time below the line, or after --")
    if found := _ELSEWHERE.search(code):
        line = f"{'%' * (1 + (found[1] == 'cell'))}{found[2]}"
        raise GpuError(f"the cell says {line} too; leave that line out")


def _earlier(
    named: str | None, names: Mapping[str, Any], last: Comparison | None
) -> Comparison | None:
    """What `--against` names, among the notebook's names or the files."""
    from gpumagic.timing.comparison import Comparison

    if named is None:
        return None
    if named == "last":
        if last is None:
            raise GpuError("--against last: nothing was timed before in this kernel")
        return last
    if isinstance(value := names.get(named), Comparison):
        return value
    path = Path(named).expanduser()
    if not path.is_file():
        raise GpuError(
            f"--against {named}: neither a comparison of this notebook nor a file;"
            " type --against last, or the NAME of an earlier -o NAME"
        )
    return Comparison.from_json(path)
