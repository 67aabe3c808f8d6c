"""Run the user's own cell on a device, as if its `%%ongpu` line were not there.

The line becomes a call, which begins the run; `post_run_cell` ends it.
"""

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from gpumagic import faults
from gpumagic.errors import GpuError, torch_needed
from gpumagic.magics.arguments import Request, placing_request
from gpumagic.magics.gpuwatch import Watched
from gpumagic.magics.ongpu_line import BEGIN, begin_standing, is_timed, line_of, transform

if TYPE_CHECKING:
    from gpumagic.cell.run import Run
    from gpumagic.ledger.watch import watch

_EVENTS = ("pre_execute", "pre_run_cell", "post_execute", "post_run_cell")


@dataclass
class RunningCell:
    """A cell that IPython is running: its tree, and the run that began in it."""

    tree: ast.AST | None = None
    run: "Run | None" = None
    request: Request | None = None
    gone: bool = False  # the device was not to be found
    dry: bool = False  # the tree is what a dry run is to run
    silent: bool = False
    reported: bool = False  # a run that it began has ended
    watch: "watch | None" = None  # of `%gpuwatch`


class CellHooks:
    """What IPython calls around each cell of one shell."""

    def __init__(
        self,
        shell: Any,
        show: Callable[[Any], object],
        failed: Callable[[BaseException], object],
    ) -> None:
        self.shell = shell
        self.standing: Request | None = None
        self.standing_on = ""
        self._show = show
        self._failed = failed
        self.watched = Watched(show)
        self._threads = threading.local()  # a subshell runs its cells on a thread of its own

    # -- installing
    def install(self) -> None:
        # Last: indentation and pasted prompts are off by then, as before any %%magic.
        self.shell.input_transformers_cleanup.append(transform)
        self.shell.ast_transformers.append(self)
        for event in _EVENTS:
            self.shell.events.register(event, getattr(self, f"_{event}"))
        setattr(self.shell, BEGIN, self.begin)

    def uninstall(self) -> None:
        self.end_all()
        self.count_no_more()
        self.shell.input_transformers_cleanup.remove(transform)
        if self in self.shell.ast_transformers:
            self.shell.ast_transformers.remove(self)
        for event in _EVENTS:
            self.shell.events.unregister(event, getattr(self, f"_{event}"))
        delattr(self.shell, BEGIN)

    @property
    def stack(self) -> list[RunningCell]:
        stack: list[RunningCell] = self._threads.__dict__.setdefault("stack", [])
        return stack

    def current(self) -> RunningCell | None:
        """The innermost cell that runs on this thread."""
        return self.stack[-1] if self.stack else None

    # -- what IPython calls
    def _pre_execute(self) -> None:
        self.stack.append(RunningCell(silent=True))

    def _pre_run_cell(self, info: object) -> None:
        self.stack[-1].silent = False
        self.stack[-1].watch = self.watched.begin()

    def _post_execute(self) -> None:
        # The end of any other cell is announced by post_run_cell too, which knows its error.
        if self.stack and self.stack[-1].silent:
            cell = self.stack.pop()
            self.finish(cell, None)
            self._end_count(cell)

    def visit(self, tree: ast.Module) -> ast.Module:
        """As an AST transformer: put the call that begins the run into the tree."""
        cell = self.current()
        body = tree.body if isinstance(tree, ast.Module) else []
        if line := line_of(body):
            if cell and _is_dry_run(line):
                # Nothing of the cell may run but that call, whose value is the result.
                cell.tree, cell.dry = ast.Module(body[1:], []), True
                body[1:] = []
        elif self._stands_for(cell) and body and not is_timed(body):
            begin_standing(body)
        if cell and cell.tree is None:
            cell.tree = tree
        return tree

    def _stands_for(self, cell: RunningCell | None) -> bool:
        return bool(self.standing and cell and cell.tree is None and not cell.silent)

    def _post_run_cell(self, result: Any = None) -> None:
        raw = getattr(getattr(result, "info", None), "raw_cell", None)
        if (raw is not None and not raw.strip()) or not self.stack:
            return  # IPython announces the end of an empty cell, but not its start
        cell = self.stack.pop()
        error = getattr(result, "error_in_exec", None)
        if error is not None:
            self._failed(error)
        self.finish(cell, error or getattr(result, "error_before_exec", None))
        self._end_count(cell)
        while faults.untold:
            print(f"{faults.untold.pop(0)}; %gpus --doctor shows where", file=sys.stderr)

    # -- beginning and ending
    def begin(self, text: str) -> Any:
        """Place the rest of the running cell; called from the cell itself.

        A dry run takes the cell's place: its result is returned.
        """
        cell = self.current()
        if cell is None or cell.silent:
            raise UsageError("%%ongpu cannot place code that IPython runs silently")
        asked = placing_request(text.removeprefix("%%ongpu")) if text else self.standing
        if asked is None or (cell.run is not None and cell.request == asked):
            return None
        try:
            if asked.dry_run and not cell.dry:
                raise GpuError("--dry-run must stand above the magic that runs the code")
            if asked.dry_run:
                return self.dry_run(cell, asked, sys._getframe(1).f_code.co_filename)
            return self.place(cell, asked)
        except GpuError as error:
            if asked.standing and cell.gone:
                # Else no cell could run any more, `%ongpu off` included.
                self.standing = None
                raise UsageError(f"{error}; %ongpu {asked.where} has ended") from None
            raise UsageError(f"{'%' if asked.standing else '%%'}ongpu: {error}") from None

    def place(self, cell: RunningCell, asked: Request) -> None:
        """Begin a run for `cell`, ending the one that it has. Raises `GpuError`."""
        with torch_needed("%%ongpu"):
            from gpumagic.cell.run import Run
            from gpumagic.placement.torch_devices import find
            from gpumagic.usercode.names import names_read
        self.finish(cell, None)
        cell.gone = True
        device = find(asked.where)
        cell.gone = False
        names = names_read(cell.tree, self.shell.transform_cell) if cell.tree else []
        # Known to the cell before it starts: an interrupt within must find what to undo.
        cell.run = Run(
            device,
            self.shell.user_ns,
            names,
            move=asked.move,
            strict=asked.strict,
            fix=asked.fix,
            table=asked.report,
        )
        cell.request = asked
        cell.run.start()

    def dry_run(self, cell: RunningCell, asked: Request, file: str) -> Any:
        with torch_needed("%%ongpu"):
            from gpumagic.dryrun import dry_run_in_shell
        result = dry_run_in_shell(self.shell, cell.tree, file, asked.where, move=asked.move)
        if self.shell.displayhook.quiet():  # a semicolon at the end is about the cell's own value
            self._show(result)
            return None
        return result

    def finish(self, cell: RunningCell, error: BaseException | None) -> None:
        run, asked, cell.run, cell.request = cell.run, cell.request, None, None
        if run is None or asked is None:
            return
        cell.reported = True
        report = run.finish(error)
        if report and not asked.quiet and (not asked.standing or report.touched):
            self._show(report)

    # -- what the magics call
    def run(self, line: str, text: str) -> Any:
        """Run the text as a cell of its own; the value is that of the last expression.

        A cell that begins with `%%ongpu` does not come through here.
        """
        if not text.strip():
            raise UsageError("%%ongpu: the cell is empty; put the code to run below that line")
        shell, cell = self.shell, RunningCell()
        code = shell.transform_cell(f"%%ongpu {line}\n{text}")
        name = shell.compile.cache(code, raw_code=text)
        self.stack.append(cell)
        error: BaseException | None = None
        try:
            *body, last = shell.transform_ast(shell.compile.ast_parse(code, filename=name)).body
            value = last.value if isinstance(last, ast.Expr) else None
            if value is None:
                body.append(last)
            exec(compile(ast.Module(body, []), name, "exec"), shell.user_ns)
            if value is not None:
                return eval(compile(ast.Expression(value), name, "eval"), shell.user_ns)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.stack.remove(cell)
            self.finish(cell, error)

    def stand(self, asked: Request) -> None:
        """Place the rest of the running cell and every cell after it."""
        standing = replace(asked, standing=True)
        cell = self.current() or RunningCell()
        self.place(cell, standing)
        self.standing, self.standing_on = standing, cell.run.device.label if cell.run else ""

    def set_aside(self) -> None:
        """End the placement of the running cell, whose code is to be timed elsewhere."""
        cell = self.current()
        if cell and cell.request and not cell.request.standing:
            raise GpuError(f"the cell says %%ongpu {cell.request.where} too; leave that line out")
        if cell:
            self.finish(cell, None)

    def end_standing(self) -> None:
        """Forget the standing placement, and end it for the running cell."""
        self.standing = None
        cell = self.current()
        if cell and cell.request and cell.request.standing:
            self.finish(cell, None)

    def count(self, *, report: bool, strict: bool) -> None:
        """Count the copies and waits of the rest of the running cell and of every cell after it."""
        self.count_no_more()
        self.watched.turn_on(report=report, strict=strict)
        if not self.stack:  # the extension was loaded in this very cell
            self.stack.append(RunningCell())
        self.stack[-1].watch = self.watched.begin()

    def count_no_more(self) -> None:
        """Show what was counted, and count nothing of the cells that run, or come."""
        self.watched.on = False
        for cell in reversed(self.stack):
            self._end_count(cell)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing of the running cell meanwhile, since counting takes time."""
        cell = self.current()
        counted = cell is not None and self._end_count(cell)
        try:
            yield
        finally:
            if cell and counted:
                cell.watch = self.watched.begin()

    def _end_count(self, cell: RunningCell) -> bool:
        """Show what was counted in a cell; whether it was."""
        watch, cell.watch = cell.watch, None
        if watch:
            self.watched.end(watch, shown=cell.reported)
        return watch is not None

    def end_all(self) -> None:
        """End every placement of this thread: the devices are about to go."""
        self.standing = None
        for cell in reversed(self.stack):
            self.finish(cell, None)


def _is_dry_run(text: str) -> bool:
    try:
        return placing_request(text.removeprefix("%%ongpu")).dry_run
    except UsageError:  # said when the cell begins
        return False
