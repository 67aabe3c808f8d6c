"""Record an error about tensors on different devices, and show its operands, reason and fix."""

import ast
import linecache
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from html import escape
from itertools import accumulate
from textwrap import dedent, indent
from typing import Any

from gpumagic.display import table
from gpumagic.display.table import Shown, block, tag
from gpumagic.display.units import size
from gpumagic.usercode.files import label, last_cell, shell, user_namespace
from gpumagic.usercode.frames import FailedFrame, loops_around, parents, statement, uses
from gpumagic.usercode.values import is_module, of_function, own, torch_here

trial_on: ContextVar[str] = ContextVar("gpumagic_trial_on", default="")
"""The device on which a trial runs code, one of several. A fix must not name this device."""


@dataclass(frozen=True)
class Operand:
    """Describe an operand of the failing expression, such as a tensor or a module."""

    name: str
    devices: tuple[str, ...]  # most bytes first, if a module is on several devices
    nbytes: int | None  # None if unknown, because the value no longer exists
    about: str  # a description: "float32[3, 2]", "Linear, 2 tensors"
    odd: bool = False  # whether the operand is on the wrong device
    also: str | None = None  # the operand's name in the calling code, if different
    along: bool = False  # whether only later code needs the operand to move


@dataclass(frozen=True)
class Fix:
    """Describe code to paste into the user's cell or file."""

    # If `where` is "before", insert `code` before `line`. If "replace", replace the lines `line` to
    # `end_line` by `code`. Lines count from 1. The code is indented as in the source.
    code: str
    where: str
    line: int
    end_line: int
    filename: str  # name of the file or cell, as in the traceback
    label: str = ""  # display name of the file or cell: "In [3]", "train.py"
    nbytes: int | None = None  # bytes that the fix moves; None if unknown
    cls: str = ""  # the edited class, if its existing objects keep the old code; else empty
    earlier: bool = False  # whether an earlier cell must run again, which a dry run cannot do
    hooked: str = ""  # the variable of the module whose hooks keep the old code; else empty

    def apply(self, source: str) -> str:
        """Return the source of `filename` with the fix applied."""
        lines = source.splitlines(keepends=True)
        new = [f"{line}\n" for line in self.code.splitlines()]
        end = self.line - 1 if self.where == "before" else self.end_line
        return "".join([*lines[: self.line - 1], *new, *lines[end:]])


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """Record an explained error. `str()` returns text; IPython shows HTML."""

    expression: str  # the failed expression as the user wrote it
    line: int
    filename: str  # as in the traceback
    label: str  # the file's display name
    operands: tuple[Operand, ...]
    fix: Fix | None
    reason: str | None  # the cause, in one sentence; None if unknown
    first: str | None = None  # an alternative to `fix`, shown before it: a `%%ongpu` line
    more: tuple[Fix, ...] = ()  # further edits that the fix needs elsewhere


def expression(frame: FailedFrame, node: ast.AST) -> tuple[str, int, str, str]:
    """Return an explanation's first fields: expression, line, filename and label."""
    line, filename = getattr(node, "lineno", frame.line), frame.filename
    above = next(parents(node), node)
    node = above if isinstance(above, ast.Assign) and node in above.targets else node
    return frame.text(node), line, filename, label(filename)


def total(counts: Iterable[int | None]) -> int | None:
    """Return the sum of byte counts; None if a count is unknown."""
    found = list(counts)
    return None if None in found else sum(count or 0 for count in found)


def text(explanation: Explanation) -> str:
    lines = [f"{_head(explanation)}: {table.short(explanation.expression, table.WIDTH)}"]
    lines += table.lines(_columns(explanation.operands), "  ")
    for word, do, cost, code in _advice(explanation):
        lines += table.wrapped(f"{word} {do}{cost}", "  ", "       ")
        lines += [indent(dedent(code), "      ")] if code else []
    return "\n".join(lines)


def html(explanation: Explanation) -> str:
    code = tag("code", table.short(explanation.expression, table.WIDTH))
    body = f"<div>{escape(_head(explanation))}: {code}</div>"
    if explanation.operands:
        body += table.html(_columns(explanation.operands))
    for word, do, cost, code in _advice(explanation):
        more = tag("span", cost, "gm-dim") if cost else ""
        body += f"<div>{tag('span', word, 'gm-dim')} {escape(do)}{more}</div>"
        body += tag("pre", dedent(code)) if code else ""
    return block(body, "explanation", css="gpumagic gm-why")


def _advice(explanation: Explanation) -> Iterator[tuple[str, str, str, str]]:
    """Yield the reason, the `%%ongpu` line and the edits, each as (label, text, cost, code)."""
    if explanation.reason:
        yield "why:", explanation.reason, "", ""
    if explanation.first:
        yield "fix:", f"put {explanation.first} on top of this cell", "", ""
    word = "or:" if explanation.first else "fix:"
    for n, fix in enumerate([explanation.fix, *explanation.more] if explanation.fix else []):
        cost = _cost(replace(fix, nbytes=None) if n else fix)
        yield "and:" if n else word, _where(fix), cost, fix.code


def _head(explanation: Explanation) -> str:
    label = f"{explanation.label}, " if explanation.label else ""
    return f"between devices · {label}line {explanation.line}"


def _columns(operands: tuple[Operand, ...]) -> list[table.Column]:
    odd = ["gm-bad" if operand.odd else "" for operand in operands]
    code = [f"gm-code {css}".strip() for css in odd]
    names = [o.name + f" ({o.also})" * bool(o.also) for o in operands]
    alone = len({o.devices for o in operands}) > 1 == sum(o.odd for o in operands)
    mark = "← the odd one" if alone else "← to move"
    marks = [mark if o.odd else "← also to move" * o.along for o in operands]
    return [
        table.Column("", names, fit="cut", css=code),
        table.Column("", [", ".join(o.devices) for o in operands], css=code),
        table.Column("", [size(o.nbytes) for o in operands], number=True, css=odd),
        table.Column("", [o.about for o in operands], css=odd),
        table.Column("", marks, css=odd),
    ]


def _where(fix: Fix) -> str:
    label = f"{fix.label}, " if fix.label else ""
    if fix.where == "before":
        return f"{label}before line {fix.line}"
    several = fix.end_line > fix.line
    lines = f"lines {fix.line} to {fix.end_line}" if several else f"line {fix.line}"
    return f"{label}replace {lines} with"


# Later cells must run again too. For example, an optimizer made there refers to old parameters.
RERUN = "then run that cell and all below it again"


def _cost(fix: Fix) -> str:
    other = fix.label.startswith("In [") and fix.label != last_cell()
    body = ast.parse("".join(linecache.getlines(fix.filename)) if other else "").body
    defines = not fix.cls and all(isinstance(stmt, _DEFINITIONS) for stmt in body)
    then = "then run that cell again" if defines else RERUN
    again = f", {then}" * (bool(fix.cls) or other or bool(fix.hooked))
    if fix.hooked:
        again = f"; recreate {fix.hooked}, which keeps its old hooks, {then}"
    moves = {None: "", 0: " (moves nothing)"}.get(fix.nbytes, f" (moves {size(fix.nbytes)})")
    return moves + again


_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.List, ast.Tuple, ast.Constant)
_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_BOUND = (ast.Name, ast.Attribute, ast.Subscript)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Assert, ast.Delete)


def bracketed(node: ast.AST, text: str) -> str:
    """Return an expression to which `.to()` can be appended, in brackets if necessary."""
    return text if isinstance(node, _ATOMS) and not text.startswith(("-", "~")) else f"({text})"


NEAR = 12  # maximum number of lines that one edit may span


@dataclass
class Edit:
    """Collect lines to insert before a statement, and expressions to replace nearby."""

    frame: FailedFrame
    stmt: ast.stmt
    before: list[str] = field(default_factory=list)
    replaced: list[tuple[ast.AST, str]] = field(default_factory=list)

    def fix(self, nbytes: int | None) -> Fix:
        lines = self.frame.source.splitlines()
        start, end = self.stmt.lineno, self.stmt.end_lineno or self.stmt.lineno
        if not isinstance(self.stmt, _SIMPLE):
            end = start
        end = max([end, *(getattr(n, "end_lineno", end) for n, _ in self.replaced)])
        first = lines[start - 1]
        code = [first[: len(first) - len(first.lstrip())] + line for line in self.before]
        where, end = ("replace", end) if self.replaced else ("before", start)
        if self.replaced:
            code += _edited(lines[start - 1 : end], start, self.replaced)
            code[0] = _magic_before(label(self.frame.filename), start, first) + code[0]
        file, name = self.frame.filename, label(self.frame.filename)
        classes = (each.name for each in parents(self.stmt) if isinstance(each, ast.ClassDef))
        # An autograd.Function has no instances, but graphs keep its `backward`.
        static = self.frame.parameters[:1] == ("ctx",) and self.frame.code.co_name == "forward"
        cls = next(classes, "") if name.startswith("In [") and not static else ""
        hooked = _hooked(getattr(self.frame, "code", self))
        return Fix("\n".join(code), where, start, end, file, name, nbytes, cls, hooked=hooked)


def _hooked(code: Any) -> str:
    """Return the notebook's name of a module that calls `code` in a hook; "" if none does."""
    for name, value in [*user_namespace().items()]:
        parts = torch_here().nn.Module.modules(value) if is_module(value) else ()
        kept = (own(part).get(kind, {}).values() for part in parts for kind in _HOOKS)
        if any(of_function(hook, "__code__") is code for hooks in kept for hook in hooks):
            return name
    return ""


def _magic_before(cell: str, line: int, code: str) -> str:
    """Return the text before `code` in a line that the user typed, such as ``"%time "``."""
    history = getattr(getattr(shell(), "history_manager", None), "input_hist_raw", [])
    number = int(cell[4:-1]) if cell[4:-1].isdigit() else len(history)
    typed = "".join("".join(history[number : number + 1]).splitlines()[line - 1 : line])
    return typed.removesuffix(code) if typed.endswith(code) else ""


def around(frame: Any, edits: list[tuple[ast.AST, str]], nbytes: int | None) -> Fix | None:
    """Return one fix that makes all replacements; None if the edited lines are far apart."""
    stmts = [stmt for node, _ in edits if (stmt := statement(node)) is not None]
    stmts.sort(key=lambda stmt: stmt.lineno)
    near = stmts and stmts[-1].lineno - stmts[0].lineno <= NEAR
    return Edit(frame, stmts[0], replaced=edits).fix(nbytes) if near else None


def can_precede(frame: FailedFrame, stmt: ast.stmt) -> bool:
    """Whether a line inserted above `stmt` always runs immediately before `stmt`."""
    line = frame.source.splitlines()[stmt.lineno - 1]
    if line.encode()[: stmt.col_offset].strip() or line.lstrip().startswith("elif"):
        return False  # as for `y = net(x)` in `if ready: y = net(x)`, or for `b` in `a; b`
    return not isinstance(stmt, (ast.While, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))


def before_loops(frame: FailedFrame, stmt: ast.stmt, texts: list[str]) -> ast.stmt:
    """Return the outermost loop around `stmt`, or `stmt` if the loop changes names in `texts`."""
    loops = loops_around(stmt)
    if not loops or not can_precede(frame, loops[-1]):
        return stmt
    # The loop may bind any part of `self.layers[i]`: `self`, `self.layers` or `i`.
    used = [n for text in texts for n in ast.walk(ast.parse(text, mode="eval"))]
    names = {ast.unparse(n) for n in used if isinstance(n, _BOUND)}
    nodes = [n for n in ast.walk(loops[-1]) if isinstance(n, _BOUND) and statement(n) is not stmt]
    made = [(ast.unparse(n), statement(n)) for n in nodes if isinstance(n.ctx, ast.Store)]
    # Ignore `x = cat([x, y])`: if `x` is moved before the loop, its result is on the new device.
    bound = {x for x, by in made if not (isinstance(by, ast.Assign) and uses(by.value, x))}
    return stmt if names & bound else loops[-1]


def _edited(lines: list[str], first: int, edits: list[tuple[ast.AST, str]]) -> list[str]:
    """Return `lines` with expressions replaced. `first` is the number of the first line."""
    text = "\n".join(lines).encode()  # columns count bytes of UTF-8
    starts = [0, *accumulate(len(line.encode()) + 1 for line in lines)]
    spans = []
    for node, new in edits:
        begin = starts[node.lineno - first] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - first] + node.end_col_offset  # type: ignore[attr-defined]
        spans.append((begin, end, new.encode()))
    outer = [
        a for a in spans if not any(b[0] <= a[0] and a[1] <= b[1] and a[:2] != b[:2] for b in spans)
    ]
    for begin, end, put in sorted(set(outer), reverse=True):
        text = text[:begin] + put + text[end:]
    return text.decode().split("\n")
