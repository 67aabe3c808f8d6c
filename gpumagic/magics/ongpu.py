"""Run the user's own cell on a device, as if its `%%ongpu` line were not there.

The line becomes a string on the cell's first line (so every line keeps its number, and `await`,
`Out[n]` and other magics work); in the syntax tree that string becomes a call that begins the run;
`post_run_cell` ends it.
"""

import ast
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from gpumagic import faults
from gpumagic.errors import GpuError, torch_needed
from gpumagic.magics.ongpu_line import (
    Request,
    after_future_imports,
    is_timed,
    marker,
    request,
    transform,
)

if TYPE_CHECKING:
    from gpumagic.cell.run import Run


@dataclass
class _Cell:
    """A cell that IPython is running: its tree, and the run that began in it."""

    tree: ast.AST | None = None
    run: "Run | None" = None
    request: Request | None = None
    gone: bool = False  # the device was not to be found


class CellHooks:
    """What IPython calls around each cell of one shell.

    Parameters
    ----------
    shell : InteractiveShell
    show : callable
        Shows a `Report`, or a dry run, under the cell.
    """

    def __init__(self, shell: Any, show: Callable[[Any], object]) -> None:
        self.shell = shell
        self.standing: Request | None = None
        self.standing_on = ""
        self._show = show
        self._threads = threading.local()  # a subshell runs its cells on a thread of its own

    # -- installing
    def install(self) -> None:
        # Last: indentation and pasted prompts are off by then, as before any %%magic.
        self.shell.input_transformers_cleanup.append(transform)
        self.shell.ast_transformers.append(self)
        self.shell.events.register("pre_run_cell", self._pre_run_cell)
        self.shell.events.register("post_run_cell", self._post_run_cell)
        _installed[id(self)] = self

    def uninstall(self) -> None:
        self.end_all()
        self.shell.input_transformers_cleanup.remove(transform)
        if self in self.shell.ast_transformers:
            self.shell.ast_transformers.remove(self)
        self.shell.events.unregister("pre_run_cell", self._pre_run_cell)
        self.shell.events.unregister("post_run_cell", self._post_run_cell)
        _installed.pop(id(self), None)

    @property
    def _stack(self) -> list[_Cell]:
        stack: list[_Cell] = self._threads.__dict__.setdefault("stack", [])
        return stack

    def current(self) -> _Cell | None:
        """The innermost cell that runs on this thread."""
        return self._stack[-1] if self._stack else None

    # -- what IPython calls
    def _pre_run_cell(self, info: object) -> None:
        self._stack.append(_Cell())

    def visit(self, tree: ast.Module) -> ast.Module:
        """As an AST transformer: put the call that begins the run into the tree."""
        cell = self.current()
        body = tree.body if isinstance(tree, ast.Module) else []
        found = next(((n, text) for n, node in enumerate(body) if (text := marker(node))), None)
        if found is not None:
            n, text = found
            body[n] = self._call(text, body[n])
            if cell and _is_dry_run(text):
                # Nothing of the cell may run but that call, whose value is the result.
                cell.tree = ast.Module([*body[:n], *body[n + 1 :]], [])
                body[:] = [body[n]]
        elif self.standing and cell and cell.tree is None and body and not is_timed(body):
            body.insert(after_future_imports(body), self._call("", body[0]))
        if cell and cell.tree is None:
            cell.tree = tree
        return tree

    def _call(self, text: str, place: ast.AST) -> ast.stmt:
        code = f"__import__('gpumagic.magics.ongpu').magics.ongpu.begin({text!r}, {id(self)})"
        call = ast.parse(code).body[0]
        for node in ast.walk(call):
            ast.copy_location(node, place)
        return call

    def _post_run_cell(self, result: Any = None) -> None:
        raw = getattr(getattr(result, "info", None), "raw_cell", None)
        if (raw is not None and not raw.strip()) or not self._stack:
            return  # IPython announces the end of an empty cell, but not its start
        cell = self._stack.pop()
        error = getattr(result, "error_in_exec", None) or getattr(result, "error_before_exec", None)
        self._finish(cell, error)
        while faults.untold:
            print(f"{faults.untold.pop(0)}; %gpus --doctor shows where", file=sys.stderr)

    # -- beginning and ending
    def begin(self, text: str, file: str = "") -> Any:
        """Place the rest of the running cell; called from the cell itself, whose name is `file`.

        A dry run takes the cell's place: its result is returned.

        Raises
        ------
        UsageError
            With one line, before anything has run or moved.
        """
        cell = self.current()
        if cell is None:
            raise UsageError("%%ongpu cannot place code that IPython runs silently")
        asked = request(text.removeprefix("%%ongpu")) if text else self.standing
        if asked is None or (cell.run is not None and cell.request == asked):
            return None
        try:
            if asked.dry_run:
                return self._dry_run(cell, asked, file)
            return self.place(cell, asked)
        except GpuError as error:
            if asked.standing and cell.gone:
                # Else no cell could run any more, `%ongpu off` included.
                self.standing = None
                raise UsageError(f"{error}; %ongpu {asked.where} has ended") from None
            raise UsageError(f"{'%' if asked.standing else '%%'}ongpu: {error}") from None

    def place(self, cell: _Cell, asked: Request) -> None:
        """Begin a run for `cell`, ending the one that it has. Raises `GpuError`."""
        with torch_needed("%%ongpu"):
            from gpumagic.cell.run import Run
            from gpumagic.placement.torch_devices import find
            from gpumagic.usercode.names import names_read
        self._finish(cell, None)
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

    def _dry_run(self, cell: _Cell, asked: Request, file: str) -> Any:
        with torch_needed("%%ongpu"):
            from gpumagic.dryrun import dry_run_in_shell
        result = dry_run_in_shell(self.shell, cell.tree, file, asked.where, move=asked.move)
        if self.shell.displayhook.quiet():  # a semicolon at the end is about the cell's own value
            self._show(result)
            return None
        return result

    def _finish(self, cell: _Cell, error: BaseException | None) -> None:
        run, asked, cell.run, cell.request = cell.run, cell.request, None, None
        if run is None or asked is None:
            return
        report = run.finish(error)
        if report and not asked.quiet and (not asked.standing or report.touched):
            self._show(report)

    # -- what the magics call
    def run_magic(self, line: str, text: str) -> Any:
        """`run_cell_magic("ongpu", line, text)`: the value is that of the last expression."""
        asked = request(line)
        if not text.strip():
            raise UsageError("%%ongpu: the cell is empty; put the code to run below that line")
        code = self.shell.transform_cell(text)
        name = self.shell.compile.cache(code, raw_code=text)
        tree = self.shell.transform_ast(self.shell.compile.ast_parse(code, filename=name))
        cell = _Cell(tree)
        self._stack.append(cell)
        error: BaseException | None = None
        try:
            if asked.dry_run:
                return self._dry_run(cell, asked, name)
            self.place(cell, asked)
            *body, last = tree.body
            value = last.value if isinstance(last, ast.Expr) else None
            if value is None:
                body.append(last)
            exec(compile(ast.Module(body, []), name, "exec"), self.shell.user_ns)
            if value is not None:
                return eval(compile(ast.Expression(value), name, "eval"), self.shell.user_ns)
        except GpuError as refused:
            raise UsageError(f"%%ongpu: {refused}") from None
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._stack.remove(cell)
            self._finish(cell, error)

    def stand(self, asked: Request) -> None:
        """Place the rest of the running cell and every cell after it."""
        standing = replace(asked, standing=True)
        cell = self.current() or _Cell()
        self.place(cell, standing)
        self.standing, self.standing_on = standing, cell.run.device.label if cell.run else ""

    def set_aside(self) -> None:
        """End the placement of the running cell, whose code is to be timed elsewhere.

        Raises
        ------
        GpuError
            The cell asks for that placement itself.
        """
        cell = self.current()
        if cell and cell.request and not cell.request.standing:
            raise GpuError(f"the cell says %%ongpu {cell.request.where} too; leave that line out")
        if cell:
            self._finish(cell, None)

    def end_standing(self) -> None:
        """Forget the standing placement, and end it for the running cell."""
        self.standing = None
        cell = self.current()
        if cell and cell.request and cell.request.standing:
            self._finish(cell, None)

    def end_all(self) -> None:
        """End every placement of this thread: the devices are about to go."""
        self.standing = None
        for cell in reversed(self._stack):
            self._finish(cell, None)


def _is_dry_run(text: str) -> bool:
    try:
        return request(text.removeprefix("%%ongpu")).dry_run
    except UsageError:  # said when the cell begins
        return False


_installed: dict[int, CellHooks] = {}


def begin(text: str, shell: int) -> Any:
    """Place the rest of the cell that calls this: what a `%%ongpu` line becomes."""
    if shell not in _installed:
        raise UsageError("%%ongpu is not loaded; type %load_ext gpumagic")
    return _installed[shell].begin(text, sys._getframe(1).f_code.co_filename)
