"""`%%gputime`: the cell's text to `compare`, its progress to a line and to the board, its result to
the notebook."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumagic.display.progress_line import ProgressLine
from gpumagic.display.units import duration
from gpumagic.errors import NO_TORCH, GpuError
from gpumagic.magics.tracebacks import begin_at, check_code, render
from gpumagic.telemetry.measurements import board

if TYPE_CHECKING:
    from gpumagic.timing.comparison import Comparison
    from gpumagic.timing.progress import Progress


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
_PLACES = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\('(ongpu|gputime)'")
# In the words of a view, where those of the engine are too short.
_STATES = {"copy": "copying"}
_last: list[Comparison] = []


def last_comparison() -> Comparison | None:
    """What `%%gputime` or `compare` gave last in this process; None before the first."""
    return _last[0] if _last else None


def compare(
    code: str | Callable[[], Any],
    devices: Iterable[object] | str | None = None,
    *,
    setup: str = "",
    sweep: Mapping[str, Iterable[Any]] | None = None,
    items: float | str | None = None,
    max_time: float = 5.0,
    in_place: bool = False,
    namespace: dict[str, Any] | None = None,
    against: Comparison | None = None,
    progress: Callable[[Progress], None] | None = None,
    filename: str | None = None,
    text: str | None = None,
) -> Comparison:
    """Time code on several devices, fairly, as `%%gputime` does.

    Parameters
    ----------
    code : str or callable
        What one run is. It works on copies of the variables that it reads.
    devices : iterable or str, optional
        ``"cpu"``, ``"cuda:1"``, ``0``, ``"0+1"`` for two at the same time; the CPU and every GPU
        if None.
    setup : str
        Run before on each device, untimed.
    sweep : mapping, optional
        Of one or two variables, the values that each takes: ``{"n": [64, 256]}``.
    items : float or str, optional
        What one run works through, for the throughput; or an expression for it, such as
        ``"len(sentences)"`` or ``"n * n"``, in which a sweep's variables have their values.
    max_time : float
        Seconds for each device and value, as far as one run allows.
    in_place : bool
        Work on the variables themselves.
    namespace : dict, optional
        Where the code finds its names; if None, those of a function, or the caller's globals.
    against : Comparison, optional
        An earlier one, to say what changed.
    progress : callable, optional
        Called with a `Progress` some ten times a second, never while something is timed.
    filename : str, optional
        Where `code` is from, for tracebacks.
    text : str, optional
        How `code` is shown, where it was made of other text.

    Returns
    -------
    Comparison
        Half of one (``interrupted``) after Ctrl-C.

    Raises
    ------
    GpuError
        No such device, the same one twice, a sweep of three variables, no code, no torch.
    """
    timing = _engine("gpumagic.compare")
    if namespace is None and (isinstance(code, str) or not _has_globals(code)):
        namespace = sys._getframe(1).f_globals

    def told(now: Progress) -> None:
        board.post(posted(now))
        if progress is not None:
            progress(now)

    try:
        made: Comparison = timing.compare(
            code,
            devices,
            setup=setup,
            sweep=sweep,
            items=items,
            max_time=max_time,
            in_place=in_place,
            namespace=namespace,
            against=against,
            progress=told,
            filename=filename,
            text=text,
        )
    finally:
        board.post(None)
    _last[:] = [made]
    # What took minutes is not lost because a view of it fails.
    with suppress(Exception):
        board.keep(made.title, repr(made), made._repr_html_(), made.time)
    return made


def _has_globals(function: Callable[[], Any]) -> bool:
    return hasattr(inspect.unwrap(function), "__globals__")


def _engine(asked: str) -> Any:
    try:
        from gpumagic import timing
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise GpuError(NO_TORCH.format(asked)) from None
    return timing


def posted(now: Progress) -> dict[str, Any]:
    """A `Progress` as JSON, for the board: its line, and a bar for each device, out of the slowest.

    ``{"line": …, "bars": [{"where": "cuda:0", "share": 0.25, "text": "1.2 ms"}, …]}``
    """
    slowest = max((seconds for _, seconds, _ in now.bars if seconds), default=0.0)
    bars = [
        {
            "where": where,
            "share": seconds / slowest if seconds else 0.0,
            "text": _STATES.get(state, state) if seconds is None else duration(seconds),
        }
        for where, seconds, state in now.bars
    ]
    return {"line": f"{now.title} · {now}", "bars": bars}


class Timed:
    """Times the cells of one IPython shell.

    Parameters
    ----------
    shell : InteractiveShell
    clock : callable
        Seconds that only grow.
    """

    def __init__(self, shell: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._shell = shell
        self._clock = clock

    def run(self, request: TimingRequest, magic: str, text: str, scope: Any = None) -> None:
        """Time `text`, show the Comparison and bind it as the request says.

        Parameters
        ----------
        request : TimingRequest
        magic : str
            The line that stands above the text, or ``""`` where the text is on it.
        text : str
            As the user typed it, with magics.
        scope : dict, optional
            The names of the function that the magic is called in.

        Raises
        ------
        GpuError
            As of `compare`.
        KeyboardInterrupt
            After what was finished has been shown and bound.
        """
        _engine("%%gputime")
        namespace = self._shell.user_ns
        if scope is not None and scope is not namespace:
            namespace = {**namespace, **scope}
        against = None if request.against is None else _earlier(request.against, namespace)
        sweep = _sweep(request.sweep, namespace)
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
            made = compare(
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
    if found := _PLACES.search(code):
        line = f"{'%' * (1 + (found[1] == 'cell'))}{found[2]}"
        raise GpuError(f"the cell says {line} too; leave that line out")


def _earlier(named: str, names: Mapping[str, Any]) -> Comparison:
    """What `--against` names, among the notebook's names or the files."""
    if named == "last":
        if not _last:
            raise GpuError("--against last: nothing was timed before in this kernel")
        return _last[0]
    from gpumagic.timing.comparison import Comparison

    if isinstance(value := names.get(named), Comparison):
        return value
    path = Path(named).expanduser()
    if not path.is_file():
        raise GpuError(
            f"--against {named}: neither a comparison of this notebook nor a file;"
            " type --against last, or the NAME of an earlier -o NAME"
        )
    return Comparison.from_json(path)


def _sweep(given: tuple[str, ...], names: Mapping[str, Any]) -> dict[str, Any] | None:
    if not given:
        return None
    from gpumagic.timing.ask.sweep import parse

    return dict(parse(given, names))
