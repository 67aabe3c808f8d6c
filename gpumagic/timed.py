"""`%%gputime`: the cell's text to `compare`, its progress to a line and to the board, its result to
the notebook."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpumagic.board import board
from gpumagic.display.units import duration
from gpumagic.errors import NO_TORCH, GpuError
from gpumagic.progress_line import ProgressLine, caption

if TYPE_CHECKING:
    from gpumagic.tensors.timing.comparison import Comparison
    from gpumagic.tensors.timing.progress import Progress


@dataclass(frozen=True)
class TimingRequest:
    """What a `%%gputime` line asks for; see `compare`, whose parameters these are."""

    where: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()
    setup: str = ""
    items: float | None = None
    max_time: float = 5.0
    in_place: bool = False
    output: str | None = None
    against: str | None = None
    quiet: bool = False


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
    items: float | None = None,
    max_time: float = 5.0,
    in_place: bool = False,
    namespace: dict[str, Any] | None = None,
    against: Comparison | None = None,
    progress: Callable[[Progress], None] | None = None,
    filename: str | None = None,
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
    items : float, optional
        What one run works through, for the throughput.
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
        from gpumagic.tensors import timing
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
    return {"line": f"{now.title} · {caption(now)}", "bars": bars}


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
        if not text.strip():
            raise GpuError("there is no code; put what to time below the line, or after --")
        if text.lstrip().startswith("%%ongpu"):
            raise GpuError("the cell says %%ongpu too; leave that line out")
        _engine("%%gputime")
        namespace = self._shell.user_ns
        if scope is not None and scope is not namespace:
            namespace = {**namespace, **scope}
        against = None if request.against is None else _earlier(request.against, namespace)
        sweep = _sweep(request.sweep)
        code, raw = self._shell.transform_cell(text), text
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
                setup=self._shell.transform_cell(request.setup) if request.setup else "",
                sweep=sweep,
                items=request.items,
                max_time=request.max_time,
                in_place=request.in_place,
                namespace=namespace,
                against=against,
                progress=line.update,
                filename=name,
            )
        except GpuError:
            line.close()
            raise
        except BaseException as error:
            line.close()
            self._begin_at(error, name)
            raise
        if request.output:
            self._shell.user_ns[request.output] = made
        line.close(None if request.quiet else made)
        if made.interrupted:
            stopped = KeyboardInterrupt("what was finished is shown above")
            _render(stopped, lambda: [f"KeyboardInterrupt: {stopped}"])
            raise stopped

    def _begin_at(self, error: BaseException, name: str) -> None:
        """Have the traceback begin at the user's own line, as that of a plain cell does."""
        trace: TracebackType | None = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        if trace is None:
            return
        begin, show = trace, self._shell.InteractiveTB.structured_traceback
        _render(error, lambda: list(show(type(error), error, begin, tb_offset=0)))


def _earlier(named: str, names: Mapping[str, Any]) -> Comparison:
    """What `--against` names, among the notebook's names or the files."""
    if named == "last":
        if not _last:
            raise GpuError("--against last: nothing was timed before in this kernel")
        return _last[0]
    from gpumagic.tensors.timing.comparison import Comparison

    if isinstance(value := names.get(named), Comparison):
        return value
    path = Path(named).expanduser()
    if not path.is_file():
        raise GpuError(
            f"--against {named}: neither a comparison of this notebook nor a file;"
            " type --against last, or the NAME of an earlier -o NAME"
        )
    return Comparison.from_json(path)


def _render(error: BaseException, lines: Callable[[], list[str]]) -> None:
    # IPython asks an exception for its own rendering.
    try:
        error._render_traceback_ = lines  # type: ignore[attr-defined]
    except AttributeError:  # it has slots: then it is shown with our frames
        return


def _sweep(given: tuple[str, ...]) -> dict[str, Any] | None:
    if not given:
        return None
    from gpumagic.tensors.timing.sweep import parse

    return dict(parse(given))
