"""Run `%%ongpu` cells on a device. In every other way, these cells behave like ordinary cells.

The call `get_ipython().begin_ongpu(…)` replaces the `%%ongpu` line, and IPython runs the cell. Thus
all other lines keep their numbers, and `await`, `Out[n]` and other magics work.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import cell_magic, leading_empty_lines
from IPython.display import display

from gpumagic import faults
from gpumagic.errors import GpuError
from gpumagic.magics.hooks import Explaining, in_one_line, one_line, stamp_memory, unstamp_memory

if TYPE_CHECKING:
    from argparse import Namespace

    from gpumagic.cell.run import Run
    from gpumagic.frameworks.watching import watch

_LINE = re.compile(r"%%ongpu(?!\w|\s*\?|\s+help\s*$|.*\s(-h|--help)\s*$)")
_TIMED = re.compile(r"get_ipython\(\)\.run_cell_magic\('(gpu(?:time|diff|fit))'")
# IPython would parse `%ongpu cuda?` as a request for help on `cuda`.
_FALLBACK_LINE = re.compile(r"%(?P<magic>ongpu|gpus)\s+(?P<where>\S+\?)\s*$")
_BEGUN = re.compile(r"""^get_ipython\(\)\.begin_ongpu\(((['"])(?:\\.|(?!\2).)*\2)\)""")
BEGIN = "begin_ongpu"  # a method of the shell while the extension is loaded


def transform(lines: list[str]) -> list[str]:
    """Replace a `%%ongpu` or `%ongpu 1?` line by a call. Move a `%%gputime` line above comments."""
    first = next((n for n, line in enumerate(lines) if line.partition("#")[0].strip()), None)
    if first is None:
        return lines
    line, rest = lines[first], lines[first + 1 :]
    if line.startswith(("%%gputime", "%%gpudiff", "%%gpufit")):
        return [line, *lines[:first], *rest]  # IPython finds a cell magic only on the first line
    if match := _FALLBACK_LINE.match(line):
        call = f"get_ipython().run_line_magic({match['magic']!r}, {match['where']!r})\n"
        return [*lines[:first], call, *rest]
    if not _LINE.match(line) or not "".join(rest).strip():
        return lines  # the cell magic itself raises an error for an empty cell
    below = leading_empty_lines(list(rest))
    if below[0].startswith("%%"):
        # IPython transforms a cell magic only on the first line, so transform a second magic here.
        rest = transform(cell_magic(below))
        return [*lines[:first], f"{_begin_code(line.strip())}; {rest[0]}", *rest[1:]]
    return [*lines[:first], f"{_begin_code(line.strip())}\n", *rest]


# Because of this attribute, IPython's check_complete treats %%ongpu like any other %%magic.
transform.has_side_effects = True  # type: ignore[attr-defined]


def _line_of(body: list[ast.stmt]) -> str | None:
    """Read a cell's `%%ongpu` line from the call that replaced the line; None without this call."""
    call = body[0].value if body and isinstance(body[0], ast.Expr) else None
    if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == BEGIN:
        return str(ast.literal_eval(call.args[0]))
    return None


def _begin_standing(body: list[ast.stmt]) -> None:
    """Insert the call that applies `%ongpu` to a cell, below the cell's `__future__` imports."""
    call = ast.parse(_begin_code("")).body[0]
    for node in ast.walk(call):
        ast.copy_location(node, body[0])
    future = (isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in body)
    body.insert(max((n + 1 for n, is_future in enumerate(future) if is_future), default=0), call)


def _timed(body: list[ast.stmt]) -> str:
    """Return the magic's name if a cell is only `%%gputime`, `%%gpudiff` or `%%gpufit`; else ""."""
    found = _TIMED.match(ast.unparse(body[0])) if len(body) == 1 else None
    return found[1] if found else ""


def _begin_code(text: str) -> str:
    return f"get_ipython().{BEGIN}({text!r})"


def _show_as_typed(file: str) -> None:
    """Make tracebacks show the typed `%%ongpu` line, as a comment, in place of our call."""
    entry = linecache.cache.get(file)
    if entry and len(entry) == 4 and any(BEGIN in line for line in entry[2]):
        size, changed, lines, name = entry
        typed = [_BEGUN.sub(lambda begun: f"# {ast.literal_eval(begun[1])}", x) for x in lines]
        linecache.cache[file] = size, changed, typed, name


@dataclass(eq=False)
class RunningCell:
    """Record the state of a cell that IPython is running."""

    silent: bool = False  # True if a program runs the cell, not the user
    tree: ast.AST | None = None
    run: Run | None = None
    request: Namespace | None = None
    check_line: str = ""  # text that advises --check after a bad index; empty if no Run began
    gone = False  # whether the device was not found
    elsewhere = False  # whether gpumagic itself runs the tree; IPython runs only `begin_ongpu(…)`
    report: Any = None  # the report to show after a cell that ran `elsewhere`
    reported = False  # whether a Run of this cell has ended
    watch: watch | None = None  # the counter of `%gpuwatch`
    stamp: tuple[str, str] | None = None  # allocation label of this cell, and the former label


class CellHooks:
    """Handle IPython's events around each cell of one shell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.explaining = Explaining(shell, self.current)
        self.standing: Namespace | None = None  # the parsed line of `%ongpu 1`
        self.standing_on = ""  # the label of the device of `%ongpu 1`
        self.watching: Namespace | None = None  # the parsed line of `%gpuwatch on`
        self._said: frozenset[str] = frozenset()  # parts of earlier reports, not to show again
        self._threads = threading.local()  # a subshell runs its cells on another thread

    @property
    def stack(self) -> list[RunningCell]:
        return cast(list[RunningCell], self._threads.__dict__.setdefault("stack", []))

    def current(self) -> RunningCell | None:
        """Return the innermost running cell of this thread."""
        return self.stack[-1] if self.stack else None

    def running(self) -> RunningCell:
        """Return the innermost RunningCell; create one for the cell that loaded the extension."""
        if not self.stack:
            self.stack.append(RunningCell())
        return self.stack[-1]

    def pre_execute(self) -> None:
        self.stack.append(RunningCell(silent=True))

    def pre_run_cell(self, info: Any) -> None:
        cell = self.stack[-1]
        cell.silent = False
        self._begin_watch(cell)
        cell.stamp = stamp_memory() if info.store_history else None

    def post_execute(self) -> None:
        # Only silent cells end here. Other cells end in `post_run_cell`, which gets their error.
        if self.stack and self.stack[-1].silent:
            self._end(self.stack.pop(), None)

    def visit(self, tree: ast.Module) -> ast.Module:
        """Store a cell's tree. Change the tree if gpumagic runs the cell, or if `%ongpu` is on."""
        cell = self.current()
        body = tree.body if isinstance(tree, ast.Module) else []
        line = _line_of(body)
        own = ast.Module(body[bool(line) :], [])  # without our call
        elsewhere = False
        with suppress(UsageError):  # an error in the line is reported when the cell begins
            elsewhere = bool(line and _request(line).elsewhere)
        if cell and elsewhere:
            # IPython runs only our call. The call's value becomes the cell's result.
            cell.tree, cell.elsewhere, body[1:] = own, True, []
        elif cell and cell.tree is None:
            placed = self.standing and body and not (line or cell.silent)
            if placed and not _timed(body):
                _begin_standing(body)
            cell.tree = own
        return tree

    def post_run_cell(self, result: Any = None) -> None:
        raw = getattr(getattr(result, "info", None), "raw_cell", None)
        if (raw is not None and not raw.strip()) or not self.stack:
            return  # IPython announces the end of an empty cell, but not its start
        if (error := getattr(result, "error_in_exec", None)) is not None:
            self.explaining.explain_unshown(error)
        cell = self.stack.pop()
        self._end(cell, error or getattr(result, "error_before_exec", None))
        number = getattr(result, "execution_count", None)
        self.explaining.report_death(f"In [{number}]" if number else "a cell", cell.check_line)
        if cell.stamp:
            unstamp_memory(*cell.stamp)
        while faults.unreported:
            print(f"{faults.unreported.pop(0)}; %gpus --doctor shows where", file=sys.stderr)

    def _end(self, cell: RunningCell, error: BaseException | None) -> None:
        self.finish(cell, error)
        if cell.watch:
            self._end_watch(cell)
        if virtual := sys.modules.get("gpumagic.virtual"):
            # Other frameworks' arrays are slow to count, so count them only after a Run.
            virtual.refresh(others=cell.reported)

    def begin(self, text: str) -> Any:
        """Set the device for the rest of the calling cell, or run the cell and return its value."""
        if (cell := self.current()) is None or cell.silent:
            raise UsageError("%%ongpu: IPython runs this code silently; type it in a cell")
        file = sys._getframe(1).f_code.co_filename
        _show_as_typed(file)
        asked = _request(text) if text else self.standing
        if asked is None or cell.request == asked:
            return None
        if text and (magic := _timed(getattr(cell.tree, "body", []))):
            said = f"the cell says %%ongpu {asked.where} too"
            raise UsageError(f"%%{magic}: {said}; leave that line out")
        try:
            if not asked.elsewhere:
                return self.place(cell, asked)
            from gpumagic.magics.run_elsewhere import run_elsewhere

            if cell.watch:  # do not count the copies that gpumagic makes
                cell.watch.stop()
                cell.watch = None
            return run_elsewhere(self.shell, cell, asked, file)
        except (GpuError, RuntimeError) as error:
            if not (text := one_line("%ongpu" if asked.standing else "%%ongpu", error)):
                raise
            raise UsageError(text + self._end_if_gone(cell, asked)) from None

    def _end_if_gone(self, cell: RunningCell, asked: Namespace) -> str:
        """If the device of `%ongpu` is gone, turn `%ongpu` off, and return a remark; else ""."""
        if not (asked.standing and cell.gone):
            return ""
        self.standing = None  # otherwise no cell could run any more, not even `%ongpu off`
        return f"; %ongpu {asked.where} has ended"

    def place(self, cell: RunningCell, asked: Namespace) -> None:
        """End the cell's previous Run, and start a Run on the chosen device. May raise GpuError."""
        from gpumagic.cell.run import Run
        from gpumagic.display.progress_line import ProgressLine
        from gpumagic.frameworks.known import Needed
        from gpumagic.usercode.variables import names_read

        self.finish(cell, None)
        space = self.shell.user_ns
        needed = Needed(cell.tree, space)
        cell.gone = True
        needed.check("%%ongpu")
        device = needed.find(asked.where)
        cell.gone = False
        names = names_read(cell.tree, self.shell.transform_cell, space) if cell.tree else []
        placed = [] if needed.torch else [each.name for each in needed.frameworks]
        for option in ("fix", "memory", "check", "profile"):
            if getattr(asked, option) not in (None, False):
                from gpumagic.magics.run_elsewhere import only_torch

                only_torch(f"--{option}", self.shell, cell.tree, placed=placed)
        options = {name: getattr(asked, name) for name in ("move", "strict", "back")}
        options |= {"said": self._said, "table": asked.report or asked.fix}
        options |= _recorders(asked, device)
        options |= {"frameworks": needed.frameworks, "unusable": needed.unusable}
        # Set `run` and `request` first, so that `finish` ends the run if Ctrl-C stops its start.
        cell.run, cell.request = Run(device, space, names, **options), asked
        instead = "" if asked.standing else ", instead of the present one,"
        cell.check_line = f"%%ongpu {asked.where} --check as the cell's first line{instead}"
        cell.run.start(lambda: ProgressLine(self.shell, silent=asked.quiet))

    def finish(self, cell: RunningCell, error: BaseException | None) -> None:
        if cell.report is not None:
            display(cell.report)
            cell.report = None
        run, asked, cell.run, cell.request = cell.run, cell.request, None, None
        if run is None or asked is None:
            return
        cell.reported = True
        report = run.finish(error)
        if report and not asked.quiet and (not asked.standing or report.touched):
            self._said |= report.says_once
            display(report)

    def run(self, line: str, text: str) -> Any:
        """Run `text` as a separate cell, for a `%%ongpu` line that `transform` has not replaced."""
        if not text.strip():
            raise UsageError("%%ongpu: the cell is empty; put the code to run below that line")
        from gpumagic.usercode.program import awaits, compile_cell

        with in_one_line("%%ongpu"):
            self._check_alone()
        shell, cell = self.shell, RunningCell()
        code = shell.transform_cell(f"%%ongpu {line}\n{text}")
        number = len(shell.history_manager.input_hist_raw) - 1
        name = shell.compile.cache(code, number, raw_code=text)
        self.stack.append(cell)
        error: BaseException | None = None
        try:
            tree = shell.transform_ast(shell.compile.ast_parse(code, filename=name))
            if awaits(tree):
                said = "a cell with await must begin with %%ongpu"
                raise UsageError(f"%%ongpu: {said}; if it does, run it again")
            body, value = compile_cell(tree, name, shell.compile.flags)
            exec(body, shell.user_ns)
            return None if value is None else eval(value, shell.user_ns)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.stack.remove(cell)
            self.finish(cell, error)

    def stand(self, line: str) -> None:
        """Run an `%ongpu` line: set the device of all cells, unset it, or move variables back."""
        words = line.partition("#")[0].lower().split()
        if not words and self.standing:
            print(f"cells run on {self.standing_on}; %ongpu off ends it")
        elif not words:
            print("cells run where their code says; type %ongpu 1 to run all of them on GPU 1")
        elif words == ["off"]:
            held, self.standing = self.standing, None
            if (cell := self.current()) and cell.request and cell.request.standing:
                self.finish(cell, None)
            print(f"cells no longer run on {self.standing_on}" if held else "%ongpu was not on")
        elif words == ["home"]:
            with in_one_line("%ongpu home"):
                from gpumagic.magics.gpus import move_back

                print(move_back(self.shell.user_ns))
        else:
            with in_one_line("%ongpu"):
                asked, cell = _request(line, "%ongpu"), self.running()
                self.place(cell, asked)
                self.standing = asked
                self.standing_on = cell.run.device.label if cell.run else ""
            print(f"cells run on {self.standing_on} from now on; %ongpu off ends it")

    def end_all(self) -> None:
        self.standing = None
        for cell in reversed(self.stack):
            self.finish(cell, None)

    def watch(self, asked: Namespace | None) -> None:
        """Count copies and waits in this and later cells; if `asked` is None, stop counting."""
        for cell in reversed(self.stack):
            self._end_watch(cell)
        self.watching = asked
        if asked is not None:
            self._begin_watch(self.running())

    def _begin_watch(self, cell: RunningCell) -> None:
        if self.watching is None:
            return
        with faults.kept("starting the ledger of a cell for %gpuwatch"):
            from gpumagic.frameworks.watching import watch

            cell.watch = watch(strict=self.watching.strict, warn=False)
            if self.watching.check is not None and "torch" in sys.modules:
                cell.watch.checks = _checks(self.watching.check)
            cell.watch.start()

    def _end_watch(self, cell: RunningCell) -> None:
        """Stop counting in a cell. Show the ledger, unless a report of `%%ongpu` has shown one."""
        watched, cell.watch = cell.watch, None
        if watched is None:
            return
        with faults.kept("showing the ledger of a cell for %gpuwatch"):
            from gpumagic.ledger.ledger_view import bundle

            watched.stop()
            if (line := bundle(watched.ledger)) and not cell.reported:
                table = self.watching is not None and self.watching.report
                display(watched.ledger if table else line, raw=not table)

    def _check_alone(self) -> RunningCell:
        """Return the running cell; GpuError if it has a `%%ongpu` line already."""
        cell = self.current() or RunningCell()
        if cell.request and not cell.request.standing:
            raise GpuError(f"the cell says %%ongpu {cell.request.where} too; leave that line out")
        return cell

    @contextmanager
    def timing(self) -> Iterator[None]:
        """End the cell's run, and pause `%gpuwatch` while the code in this context is timed."""
        cell = self._check_alone()
        self.finish(cell, None)
        counted = cell.watch is not None
        self._end_watch(cell)
        try:
            yield
        finally:
            if counted:
                self._begin_watch(cell)


def _request(text: str, magic: str = "%%ongpu") -> Namespace:
    """Replace variables in an `%ongpu` or `%%ongpu` line by their values, and parse the line."""
    from gpumagic.magics.arguments import filled, placing_request

    line = text.removeprefix("%%ongpu")
    return placing_request(filled(line) if {"$", "{"} & {*line} else line, magic)


def _checks(wanted: str) -> Any:
    from gpumagic.checked.check_mode import check

    return check(nan=wanted == "nan")


def _recorders(asked: Namespace, device: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"helpers": []}
    if asked.fix or asked.memory:  # both support only torch
        from gpumagic.cell.autofix import AutoFix
        from gpumagic.memory.allocator import PeakRecorder
        from gpumagic.placement.torch_devices import as_torch

        found["helpers"] += [AutoFix(as_torch(device))] if asked.fix else []
        found["recorder"] = PeakRecorder(as_torch(device), asked.save) if asked.memory else None
    if asked.check is not None:
        found["helpers"].append(_checks(asked.check))
    if asked.profile is not None:
        from gpumagic.profiling.cell_profiler import CellProfiler

        found["profiler"] = CellProfiler(device, asked.profile)
    return found
