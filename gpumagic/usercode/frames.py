"""Read a traceback: the user's frames, their source, and the expression that failed in each.

At most our frames are removed from the exception. None of the user's code is run.
"""

import ast
import builtins
import inspect
import linecache
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from operator import attrgetter
from types import FrameType, TracebackType
from typing import Any

from executing import Source

from gpumagic.usercode.files import is_ours, is_torchs, is_users, stands_in
from gpumagic.usercode.values import Scope

_FRAMES = 200
_ERRORS = 20
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", None)  # Python 3.11
_place = attrgetter("lineno", "end_lineno", "col_offset", "end_col_offset")
_HIDE = "__tracebackhide__"
_TIMED = ("<timed exec>", "<timed eval>")


def errors(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, each once, the original last."""
    seen: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue and len(seen) < _ERRORS:
        current = queue.pop(0)
        if current is None or any(current is e for e in seen):
            continue
        seen.append(current)
        yield current
        queue.append(current.__cause__)
        if not current.__suppress_context__:
            queue.append(current.__context__)
        if _GROUP is not None and issubclass(type(current), _GROUP):
            queue.extend(current.exceptions)  # type: ignore[attr-defined]


def cut_ours(error: BaseException) -> None:
    """Remove our frames that replace torch's or Python's code from an error's tracebacks."""
    for each in errors(error):
        trace = each.__traceback__
        while trace is not None:
            after = trace.tb_next
            while after is not None and stands_in(after.tb_frame.f_code.co_filename):
                after = after.tb_next
            if after is not trace.tb_next:
                trace.tb_next = after
            trace = after


def end_at_user(error: BaseException) -> None:
    """End an error's traceback at the user's innermost frame, as if that had raised it."""
    chain = _chain(error.__traceback__)
    users = (tb for tb in reversed(chain) if is_users(tb.tb_frame.f_code.co_filename))
    if (last := next(users, None)) is not None:
        last.tb_next = None


@contextmanager
def libraries_hidden(error: BaseException) -> Iterator[None]:
    """Within, IPython counts the libraries' frames in a traceback instead of showing them."""
    frames = [tb.tb_frame for each in errors(error) for tb in _chain(each.__traceback__)]
    libraries = [frame for frame in frames if not is_users(frame.f_code.co_filename)]
    hidden = [frame for frame in libraries if not frame.f_locals.get(_HIDE)]
    for frame in hidden:
        frame.f_locals[_HIDE] = True
    try:
        yield
    finally:
        for frame in hidden:  # %debug shows them; Python 3.13 cannot delete a name
            frame.f_locals[_HIDE] = False


def _chain(trace: TracebackType | None) -> list[TracebackType]:
    chain = []
    while trace is not None:
        chain.append(trace)
        trace = trace.tb_next
    return chain


class FailedFrame:
    """One frame of a traceback: the failed expression, and the names in scope."""

    def __init__(
        self, tb: TracebackType, *, library: FrameType | None, timed: str | None = None
    ) -> None:
        frame = tb.tb_frame
        self.scope = Scope(_names(frame), frame.f_globals)
        self.code = frame.f_code
        self.filename = frame.f_code.co_filename
        self.line = tb.tb_lineno or frame.f_code.co_firstlineno
        self.direct = library is None  # only torch's code is between this frame and the error
        # The names in scope of the deepest frame of another library.
        self.library = _names(library) if library is not None else {}
        # The code of a cell or file, not of a function.
        self.at_top = not frame.f_code.co_flags & inspect.CO_OPTIMIZED
        found = _executing(tb, timed)
        self.source: str = found.source.text
        # Its nodes have a `parent`; None without a source.
        self.tree: ast.Module | None = found.source.tree
        self._node = found.node
        self._asttext = found.source.asttext()
        positions: Any = getattr(self.code, "co_positions", tuple)()  # Python 3.11
        self._place = next(islice(positions, tb.tb_lasti // 2, None), None)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the function's arguments."""
        code = self.code
        return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @property
    def failed(self) -> ast.AST | None:
        """Return the failed expression, if it is certain."""
        return self.candidates[0] if len(self.candidates) == 1 else None

    @cached_property
    def candidates(self) -> list[ast.AST]:
        """Return the failed expression, or all candidates if only the line is known."""
        if self._node is not None:
            return [self._node]
        every = [*ast.walk(self.tree)] if self.tree is not None else []
        # A line of a cell may have two statements.
        found: list[ast.AST] = [
            n for n in every if isinstance(n, ast.expr) and _place(n) == self._place
        ]
        return found[:1] or [n for n in every if getattr(n, "lineno", 0) == self.line]

    def text(self, node: ast.AST) -> str:
        """Return the source of an expression, on one line."""
        found = self._asttext.get_text(node) if self.tree is not None else ""
        found = found or ast.unparse(node)
        return " ".join(line.strip() for line in found.splitlines())


def _names(frame: FrameType) -> Mapping[str, Any]:
    """Return a frame's local names."""
    local = frame.f_locals
    if local is frame.f_globals or type(local) is not dict:
        return local
    # Before Python 3.13 a running function keeps this copy of its names until it returns, with
    # the exception, whose frames keep every tensor alive.
    names = dict(local)
    for name, value in names.items():
        if issubclass(type(value), BaseException):
            del local[name]
    return names


def _executing(tb: TracebackType, timed: str | None) -> Any:
    """Return the source and the node of a frame; `timed` is a source that is not cached."""
    name = tb.tb_frame.f_code.co_filename
    if timed is None:
        return Source.executing(tb)
    linecache.cache[name] = (len(timed), None, timed.splitlines(keepends=True), name)
    try:
        return Source.executing(tb)
    finally:
        del linecache.cache[name]  # another cell will have the same name


def failed_frames(traceback: TracebackType | None) -> list[FailedFrame]:
    """Return the user's frames, the deepest first."""
    chain: list[TracebackType] = []
    timed: str | None = None
    while traceback is not None and len(chain) < 10 * _FRAMES:
        chain.append(traceback)
        code = traceback.tb_frame.f_code
        if code.co_name == "time" and not is_users(code.co_filename):
            timed = traceback.tb_frame.f_locals.get("expr")  # compiled by %%time
        traceback = traceback.tb_next
    found: list[FailedFrame] = []
    library: FrameType | None = None
    for tb in reversed(chain[-_FRAMES:]):
        filename = tb.tb_frame.f_code.co_filename
        if is_users(filename):
            text = timed if filename in _TIMED and isinstance(timed, str) else None
            found.append(FailedFrame(tb, library=library, timed=text))
            library = None
        elif not is_torchs(filename) and not is_ours(filename):
            library = library or tb.tb_frame
    return found
