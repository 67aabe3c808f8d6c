"""A dry run of a notebook's cell, with what IPython adds to Python left out and named."""

import ast
import linecache
import sys
from collections.abc import Callable, Iterable
from typing import Any

from IPython.display import clear_output

from gpumagic.device import Device
from gpumagic.dryrun.doubles import Doubles
from gpumagic.dryrun.result import DryRun
from gpumagic.dryrun.running_line import Place
from gpumagic.dryrun.session import Session, Subject
from gpumagic.dryrun.unknown import NotKnown, Refused, Stopped
from gpumagic.placement.torch_devices import find
from gpumagic.usercode.names import names_read
from gpumagic.usercode.variables import variables_read

Compile = Callable[..., Any]
# Magics whose text runs here too, once; the others are left out.
_PYTHON = {"time", "timeit", "capture", "prun"}
_NOT_VARIABLES = {"In", "Out", "_ih", "_oh", "_dh", "get_ipython", "exit", "quit"}


def dry_run_cell(
    tree: ast.Module,
    file: str,
    namespace: dict[str, Any],
    names: Iterable[str],
    *,
    device: Device | None,
    move: bool = True,
    limit: float = 30.0,
    progress: Callable[[float, int], object] | None = None,
    transform: Callable[[str], str] = str,
    compile: Compile = compile,
) -> DryRun:
    """What a cell would do.

    Parameters
    ----------
    tree : ast.Module
        The cell after IPython's transformations.
    file : str
        Its name, for the lines.
    namespace : dict
        The user's variables; each refers afterwards to the object that it does now.
    names : iterable of str
        Names that the cell reads.
    device : Device or None
    move : bool
    limit : float
        Seconds.
    progress : callable, optional
    transform : callable
        Makes Python of the text of a magic.
    compile : callable
        As the builtin; IPython's knows the flags of ``from __future__``.

    Returns
    -------
    DryRun
    """
    session = Session(device, move=move, limit=limit, progress=progress)
    names = [name for name in names if name not in _NOT_VARIABLES]
    roots = list(variables_read(names, namespace))

    def prepare(doubles: Doubles) -> Callable[[], dict[str, Any]]:
        shell = _Shell(session, file, namespace, transform)
        namespace["get_ipython"] = lambda: shell
        return lambda: _execute(tree, file, namespace, compile)

    return session.run(Subject(namespace, roots, prepare))


def dry_run_in_shell(shell: Any, tree: Any, file: str, where: str, *, move: bool = True) -> DryRun:
    """What the rest of a shell's running cell would do; an interrupt ends it with the result so
    far.

    Raises
    ------
    GpuError
        There is no such device, or the dry run cannot begin.
    """
    device, progress = find(where), _Progress(sys.stdout)
    if "torch._dynamo" not in sys.modules:
        progress.say("dry run: the first one loads more of torch, which takes some seconds")
    try:
        return dry_run_cell(
            tree,
            file,
            shell.user_ns,
            names_read(tree, shell.transform_cell),
            device=device,
            move=move,
            progress=progress.show,
            transform=shell.transform_cell,
            compile=shell.compile,
        )
    finally:
        progress.clear()


class _Progress:
    """How far a long dry run is, in one line that goes away."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._width = stream, 0

    def show(self, seconds: float, operators: int) -> None:
        many = f"{operators:,} operator{'s' * (operators != 1)}"
        self.say(f"dry run: {seconds:.0f} s, {many}; interrupt it for what it has")

    def clear(self) -> None:
        if self._width:
            # A saved notebook must not keep it; there is nothing else yet under this cell.
            clear_output(wait=True)

    def say(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)


def _execute(
    tree: ast.Module, file: str, namespace: dict[str, Any], compile: Compile
) -> dict[str, Any]:
    body, waits = list(tree.body), None
    for n, node in enumerate(body):
        if (waits := _awaits(node)) is not None:
            del body[n:]
            break
    last = body.pop() if body and isinstance(body[-1], ast.Expr) and waits is None else None
    exec(compile(ast.Module(body, []), file, "exec"), namespace)
    if waits is not None:
        where = Place(waits, "", "", file).at(waits)
        raise Stopped("a dry run does not await", where)
    if not isinstance(last, ast.Expr):
        return {}
    return {"Out": eval(compile(ast.Expression(last.value), file, "eval"), namespace)}


def _awaits(node: ast.AST) -> int | None:
    """The line of an `await` at the top of a cell, outside functions."""
    if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
        return node.lineno
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return None
    found = (_awaits(child) for child in ast.iter_child_nodes(node))
    return next((line for line in found if line is not None), None)


class _Shell:
    """What `get_ipython()` is in a dry run: magics and commands are named and left out."""

    def __init__(
        self, session: Session, file: str, namespace: dict[str, Any], transform: Any
    ) -> None:
        self._session, self._file = session, file
        self._namespace, self._transform = namespace, transform

    def run_line_magic(self, name: str, line: str = "", _stack_depth: int = 1) -> Any:
        if name in _PYTHON and line.strip():
            return self._python(name, line, sys._getframe(1).f_lineno - 1)
        return self._left_out(f"%{name}")

    def run_cell_magic(self, name: str, line: str, cell: str) -> Any:
        if name in _PYTHON:
            line_no = sys._getframe(1).f_lineno
            first = linecache.getline(self._file, line_no).strip("'\" ")
            # On the line of our own magic, it was a line below.
            return self._python(name, cell, line_no + first.startswith("%%ongpu"))
        return self._left_out(f"%%{name}")

    def system(self, command: str) -> None:
        self._left_out(f"!{command}")

    def getoutput(self, command: str, **options: Any) -> Any:
        return self._left_out(f"!{command}")

    def __getattr__(self, name: str) -> Any:
        return Refused(f"get_ipython().{name} is not there in a dry run")

    def _left_out(self, what: str) -> Any:
        self._session.note(f"{what} was left out")
        return NotKnown(f"what {what} gives")

    def _python(self, name: str, text: str, above: int) -> Any:
        if name != "time":
            self._session.note(f"%{name} was left out; its code was followed once")
        # Blank lines above it, so that its lines have the cell's numbers.
        code = "\n" * max(above, 0) + self._transform(text)
        try:
            tree = ast.parse(code)
        except SyntaxError:
            return self._left_out(f"%{name} {text.strip()}")
        return _execute(tree, self._file, self._namespace, compile).get("Out")
