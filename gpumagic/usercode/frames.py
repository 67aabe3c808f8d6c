"""Read a traceback and the code around the failed expression, without running any code."""

import ast
import gc
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cached_property, partial
from itertools import islice, takewhile
from operator import attrgetter
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

from gpumagic.usercode import files
from gpumagic.usercode.values import Scope, of_function
from gpumagic.usercode.variables import NamesReader, names_read

_FRAMES = 200  # maximum frames of a traceback to read; the deepest frames are read
_ERRORS = 20  # maximum exceptions to read, in a chain of causes
_place = attrgetter("lineno", "end_lineno", "col_offset", "end_col_offset")
_HIDE = "__tracebackhide__"


def errors(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, each once, the original last."""
    seen: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue and len(seen) < _ERRORS:
        if (current := queue.pop(0)) is None or any(current is e for e in seen):
            continue
        seen.append(current)
        yield current
        queue.append(current.__cause__)
        if not current.__suppress_context__:
            queue.append(current.__context__)


def cut_ours(error: BaseException) -> None:
    """Remove gpumagic's frames from an error's tracebacks."""
    # After the user's last frame, remove only functions that replace torch's or Python's functions.
    for each in errors(error):
        chain = steps_of(each.__traceback__)
        names = [tb.tb_frame.f_code.co_filename for tb in chain]
        last = max((n for n, file in enumerate(names) if files.is_users(file)), default=0)
        # Code that gpumagic compiled has a name such as `<gpumagic.compare>`.
        runs = [files.is_ours(file) or file.startswith("<gpumagic.") for file in names]
        ours = [files.stands_in(file) or (n < last and runs[n]) for n, file in enumerate(names)]
        theirs = [tb for tb, cut in zip(chain[1:], ours[1:], strict=True) if not cut]
        for trace, after in zip([*chain[:1], *theirs], [*theirs, None], strict=False):
            trace.tb_next = after


def end_at_user(error: BaseException) -> None:
    """End an error's traceback at the user's innermost frame, as if that frame had raised it."""
    chain = steps_of(error.__traceback__)
    users = (tb for tb in reversed(chain) if files.is_users(tb.tb_frame.f_code.co_filename))
    if (last := next(users, None)) is not None:
        last.tb_next = None


@contextmanager
def libraries_hidden(error: BaseException) -> Iterator[None]:
    """Hide libraries' frames in IPython's traceback, which then shows how many were hidden."""
    frames = (tb.tb_frame for tb in tracebacks(error))
    others = (frame for frame in frames if not files.is_users(frame.f_code.co_filename))
    hidden = [frame for frame in others if not frame.f_locals.get(_HIDE)]
    for frame in hidden:
        frame.f_locals[_HIDE] = True
    try:
        yield
    finally:
        for frame in hidden:  # so that %debug shows these frames
            frame.f_locals[_HIDE] = False  # Python 3.13 cannot delete the name


def tracebacks(error: BaseException) -> Iterator[TracebackType]:
    """Yield every step of the tracebacks of an exception and of its causes."""
    for each in errors(error):
        yield from steps_of(each.__traceback__)


def steps_of(trace: TracebackType | None) -> list[TracebackType]:
    """Return the steps of a traceback, the outermost first."""
    chain = []
    while trace is not None:
        chain.append(trace)
        trace = trace.tb_next
    return chain


class FailedFrame:
    """One frame of a traceback: the failed expression, and the names in scope."""

    def __init__(self, tb: TracebackType, *, library: FrameType | None) -> None:
        frame = tb.tb_frame
        self.scope = Scope(local_variables(frame), frame.f_globals)
        self.code, at = files.in_cell(frame, tb.tb_lasti)
        self.filename = self.code.co_filename
        self.line = files.line_of(self.code, at)
        self.direct = library is None  # no library except torch is between this frame and the error
        # Local variables of the deepest frame that this frame called in a library other than torch.
        self.library = local_variables(library) if library is not None else {}
        self.package = str(library.f_globals.get("__name__")).split(".")[0] if library else ""
        names = inspect.getargs(library.f_code).args if library is not None else ()
        self.given: list[Any] = [self.library.get(name) for name in names]  # library's arguments
        self.at_top = not self.code.co_flags & inspect.CO_OPTIMIZED  # outside any function
        found = files.executing(self.code, at)
        self.source: str = found.source.text
        # None if there is no source text. The executing package gives each node a `parent`.
        self.tree: ast.Module | None = found.source.tree
        self._node = found.node
        self._asttext = found.source.asttext()
        positions: Any = getattr(self.code, "co_positions", tuple)()  # from Python 3.11 on
        self._place = next(islice(positions, at // 2, None), None)

    def in_file(self, file: str) -> "FailedFrame":
        """Return a copy of this frame that reads source text from another file."""
        other, read = copy(self), files.parsed(file)
        other.filename, other.source, other.tree = file, read.text, read.tree
        other._asttext = read.asttext()
        return other

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the function's arguments."""
        return tuple(inspect.getargs(self.code).args)

    @property
    def failed(self) -> ast.AST | None:
        """Return the failed expression; None if the expression is not certain."""
        return self.candidates[0] if len(self.candidates) == 1 else None

    @cached_property
    def candidates(self) -> list[ast.AST]:
        """Return the failed expression; if only its line is known, all nodes of this line."""
        if self._node is not None:
            return [self._node]
        every = [*ast.walk(self.tree)] if self.tree is not None else []
        # Compare columns too, because a line may have several expressions.
        found = [n for n in every if isinstance(n, ast.expr) and _place(n) == self._place]
        return [*found[:1]] or [n for n in every if getattr(n, "lineno", 0) == self.line]

    def text(self, node: ast.AST) -> str:
        """Return the source of an expression, on one line."""
        found = self._asttext.get_text(node) if self.tree is not None else ""
        # Unparse several lines, because a comment in a line would hide the lines joined after it.
        found = ast.unparse(node) if not found or "\n" in found else found
        return " ".join(line.strip() for line in found.splitlines())


def local_variables(frame: FrameType) -> Mapping[str, Any]:
    """Return a frame's local variables without leaving a copy of them in the frame."""
    seen = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # the code of a cell, file or class
        return seen
    names = dict(seen)
    # Before Python 3.13, the frame keeps this dictionary. Clear it, unless user code has it too.
    held_by_frame_and_us = 3
    if type(seen) is dict and sys.getrefcount(seen) <= held_by_frame_and_us:
        seen.clear()
    return names


def failed_frames(traceback: TracebackType | None) -> list[FailedFrame]:
    """Return the user's frames, the deepest first."""
    found: list[FailedFrame] = []
    library: FrameType | None = None
    timed = False
    for tb in reversed(steps_of(traceback)[-_FRAMES:]):
        filename = tb.tb_frame.f_code.co_filename
        if files.is_users(filename):
            # Skip the frame of the `%%time` line, because the timed code is in the same cell.
            if not (timed and filename == found[-1].filename):
                found.append(FailedFrame(tb, library=library))
            timed, library = found[-1].filename != filename, None
        elif not files.is_torchs(filename) and not files.is_ours(filename):
            library = library or tb.tb_frame
    return found


def functions_again(filename: str, before: Any, after: Any) -> dict[FunctionType, CodeType]:
    """Map each function of a file to its new code, compiled from the file's changed source."""
    new = {key: code for code, key in _codes(after, filename).items()}
    old = {(c.co_name, c.co_firstlineno): key for c, key in _codes(before, filename).items()}
    every = ((each, each.__code__) for each in gc.get_objects() if type(each) is FunctionType)
    mine = ((each, code) for each, code in every if code.co_filename == filename)
    keys = ((each, old.get((code.co_name, code.co_firstlineno))) for each, code in mine)
    found = ((each, new[key]) for each, key in keys if key in new)
    # A function accepts only new code that has the same number of closure variables.
    return {f: code for f, code in found if len(code.co_freevars) == len(f.__code__.co_freevars)}


def _codes(source: Any, filename: str) -> dict[CodeType, tuple[str, int]]:
    """Map each code object of a source or tree to its name and its position among equal names."""
    waiting = [compile(source, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)]
    counts, found = Counter[str](), dict[CodeType, tuple[str, int]]()
    for each in waiting:
        found[each] = each.co_name, counts[each.co_name]
        counts[each.co_name] += 1
        waiting += [const for const in each.co_consts if isinstance(const, CodeType)]
    return found


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OWN_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def parents(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that enclose a node, the innermost first."""
    while (node := getattr(node, "parent", None)) is not None:  # type: ignore[assignment]
        yield node


def statement(node: ast.AST) -> ast.stmt | None:
    """Return the statement that a node belongs to."""
    return next((n for n in (node, *parents(node)) if isinstance(n, ast.stmt)), None)


def function_of(node: ast.AST) -> ast.AST | None:
    """Return the innermost function, lambda or module around a node."""
    kinds = (*_FUNCTIONS, ast.Lambda, ast.Module)
    return next((n for n in parents(node) if isinstance(n, kinds)), None)


def in_own_scope(node: ast.AST) -> bool:
    """Whether a node is inside a comprehension, a generator expression or a lambda."""
    within = [*takewhile(lambda parent: not isinstance(parent, ast.stmt), parents(node))]
    # A comprehension's first iterable is evaluated outside it.
    scopes = (
        getattr(each, "generators", [])[:1] for each in within if isinstance(each, OWN_SCOPES)
    )
    return any(not first or first[0].iter not in [node, *within] for first in scopes)


def loops_around(node: ast.AST) -> list[ast.stmt]:
    """Return the loops around a node in its own function, the innermost first."""
    within = takewhile(lambda parent: not isinstance(parent, _FUNCTIONS), parents(node))
    return [parent for parent in within if isinstance(parent, _LOOPS)]


def stored(tree: ast.AST) -> set[str]:
    """Return the names that a piece of code assigns or deletes."""
    nodes = ast.walk(tree)
    return {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def first_name(text: str) -> str:
    """Return the first name of an expression: ``"self"`` of ``"self.items[0]"``."""
    return text.partition(".")[0].partition("[")[0]


def uses(node: ast.AST, text: str) -> list[ast.expr]:
    """Return the nodes inside `node` that read `text`: a name, an attribute or an item."""
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    found = (n for n in ast.walk(node) if isinstance(n, kinds) and isinstance(n.ctx, ast.Load))
    return [n for n in found if ast.unparse(n) == text]


def definition(code: CodeType) -> Any:
    """Return the syntax node of the function with this code, or None."""
    nodes = ast.walk(files.parsed(code.co_filename).tree or ast.Pass())
    named = (n for n in nodes if isinstance(n, _FUNCTIONS) and n.name == code.co_name)
    starts = ((n, min(each.lineno for each in (n, *n.decorator_list))) for n in named)
    return next((node for node, line in starts if line == code.co_firstlineno), None)


def contexts(start: ast.AST | None, frame: FailedFrame) -> Iterator[Any]:
    """Yield new context managers for torch's `with` items and decorators around a node."""
    around = [start, *parents(start)] if start is not None else []
    function = next((n for n, node in enumerate(around) if hasattr(node, "decorator_list")), None)
    for node in reversed(around if function is None else around[: function + 1]):
        written = [item.context_expr for item in getattr(node, "items", ())]
        for code in (*getattr(node, "decorator_list", ()), *written):
            made_by = frame.scope.value(getattr(code, "func", code))
            if getattr(made_by, "__module__", "").startswith("torch"):
                made = eval(ast.unparse(code), {**frame.scope.outer, **frame.scope.local})
                yield made() if isinstance(made, type) else made


_BACKWARD = ("backward", "autograd", "fit")  # functions that run a backward pass
_BLOCKS = ("body", "orelse", "finalbody")
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda)


class RestOfCode:
    """The statements of one frame that have not run yet, from the failed statement on."""

    def __init__(self, frame: FailedFrame) -> None:
        self.frame = frame
        self.failed = next(filter(None, map(statement, frame.candidates)), None)
        self._rest = list(_rest(self.failed)) if self.failed is not None else []
        self.read = set(names_read(ast.Module(self._rest, [])))
        self.loops = loops_around(self.failed) if self.failed is not None else []

    @property
    def made_now(self) -> set[str]:
        """Return the names that the failed statement binds."""
        return bound([self.failed]) if self.failed is not None else set()

    @property
    def read_anywhere(self) -> set[str]:
        """Return the names that the code reads, including the part that has already run."""
        return set(names_read(self.frame.tree)) if self.frame.tree is not None else set()

    @property
    def overwritten(self) -> set[str]:
        """Return the names that the rest of the code binds before it reads them."""
        return bound(self._rest) - self.read

    @property
    def made_before(self) -> set[str]:
        """Return the names that this code may have bound before it failed."""
        if self.frame.tree is None or self.failed is None or not self.frame.at_top:
            return set(self.frame.scope.local)
        line = self.failed.lineno
        before = (n for n in ast.walk(self.frame.tree) if getattr(n, "lineno", line) < line)
        return {name for node in (*before, *self.loops) for name in stored(node)}

    def remade(self, *, empty: bool = False) -> set[str]:
        """Return names that a rerun binds again before it reads them.
        If `empty`, return only names bound to lists, dicts or constants; else only other names."""
        if self.frame.tree is None or not self.frame.at_top:
            return set()
        body, kinds = self.frame.tree.body, (ast.List, ast.Dict, ast.Constant)
        made = [n for n in body if isinstance(getattr(n, "value", None), kinds) == empty]
        again = _made_by_loops(made) - {*names_read(ast.Module(body, []))}
        return again & self.made_before

    @property
    def accumulated(self) -> set[str]:
        """Return the names whose values an enclosing loop carries from one pass to the next."""
        loops: list[Any] = self.loops
        modules = [(ast.Module(n.body, []), getattr(n, "target", ast.Pass())) for n in loops]
        carried = (stored(body) & {*names_read(body)} - stored(to) for body, to in modules)
        return set[str]().union(*carried)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Return all nodes of the statements that have not run yet."""
        return [node for each in self._rest for node in ast.walk(each)]

    @cached_property
    def backward(self) -> bool:
        """Whether a backward pass follows: here, or in a function that is called or passed."""
        defined = (n for n in ast.walk(self.frame.tree or ast.Pass()) if isinstance(n, _FUNCTIONS))
        makers = {n.name for n in defined if any(map(_is_backward, ast.walk(n)))}
        for node in self.nodes:
            if _is_backward(node):
                owner = getattr(node, "value", node)
                fitted = self.frame.scope.value(getattr(owner, "func", owner))
                if not hasattr(fitted, "get_params"):  # not an estimator of scikit-learn
                    return True
            if isinstance(node, ast.Call) and [*node.args, *node.keywords]:
                given = map(self.frame.scope.value, (node.func, *node.args))
                codes = filter(inspect.iscode, map(partial(of_function, name="__code__"), given))
                called = set[str]().union(*map(attrgetter("co_names"), codes))
                if _named(node.func) in makers or called & {*_BACKWARD}:
                    return True
        return False


def _named(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _is_backward(node: ast.AST) -> bool:
    # `fit(x)` without a dot calls a user's function, which `RestOfCode.backward` checks.
    return _named(node) in _BACKWARD and getattr(node, "id", "") != "fit"


def _rest(failed: ast.stmt) -> Iterator[ast.stmt]:
    """Yield a statement, the loops around it, and the later statements of its function."""
    yield failed
    inner: ast.AST = failed
    for outer in parents(failed):
        block = block_of(inner)
        yield from block[block.index(inner) + 1 :] if block else ()
        if isinstance(outer, _LOOPS):
            yield outer
        if isinstance(outer, _SCOPES):
            return
        inner = outer


def block_of(node: ast.AST) -> list[Any]:
    """Return the block that contains a statement; empty for any other node."""
    blocks = (getattr(getattr(node, "parent", None), name, None) for name in _BLOCKS)
    return next((b for b in blocks if isinstance(b, list) and node in b), [])


def _made_by_loops(block: list[ast.stmt]) -> set[str]:
    """Return the names that statements bind on every path, if each loop in them runs."""
    loops: list[Any] = [each for each in block if isinstance(each, (*_LOOPS, ast.With))]
    targets = (stored(getattr(each, "target", ast.Pass())) for each in loops)
    return bound(block).union(*targets, *(_made_by_loops(each.body) for each in loops))


def bound(block: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements bind on every path."""
    reader = NamesReader()
    reader.visit_all(*block)
    return reader.bound


def computed_from(names: list[str], code: list[ast.stmt]) -> set[str]:
    """Return `names`, and the names to which code assigns values computed from `names`."""
    found = {*names}
    for stmt in code:
        found |= stored(stmt) if found & {*names_read(stmt)} else set()
    return found


def computes(name: str, nodes: list[ast.AST]) -> bool:
    """Whether nodes call `.backward()` on a value that they compute from `name`."""
    assigned: Any = [node for node in nodes if isinstance(node, (ast.Assign, ast.AugAssign))]
    return bool(computed_from([name], assigned) & backward_of(nodes))


def has_backward_below(name: str, loop: ast.stmt, rest: RestOfCode) -> bool:
    """Whether code below a loop calls `.backward()` on a value computed from `name`."""
    below = [n for n in rest.nodes if getattr(n, "lineno", 0) > (loop.end_lineno or 0)]
    stmts = [node for node in below if isinstance(node, ast.stmt)]
    return bool(computed_from([name], stmts) & backward_of(below))


def is_trained(stmt: ast.stmt) -> bool:
    """Whether a later backward pass uses a value that `stmt` binds, or puts into an object."""
    below = [*_rest(stmt)][1:]
    nodes = [node for each in below for node in ast.walk(each)]
    calls = [n.value for n in ast.walk(stmt) if isinstance(n, ast.Expr)]  # `values.append(v)`
    owners = {first_name(ast.unparse(call)) for call in calls if isinstance(call, ast.Call)}
    names = (stored(stmt) | owners) & {*names_read(ast.Module(below, []))}
    return any(computes(name, nodes) for name in names)


def is_chained(name: str, loop: ast.stmt) -> bool:
    """Whether a loop computes `name` from the name's previous value, except by an addition."""
    made = [n for n in ast.walk(loop) if isinstance(n, ast.Assign) and name in stored(n)]
    chained = (n.value for n in made if name in names_read(n.value))
    return any(not isinstance(getattr(value, "op", None), ast.Add) for value in chained)


def backward_of(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names in expressions whose `.backward()` is called."""
    calls = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "backward"]
    return {name for call in calls for name in names_read(ast.Expression(call.value))}
