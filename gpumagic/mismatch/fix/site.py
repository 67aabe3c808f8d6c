"""Know where a fix goes, write the device there as its user would, and edit the source."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpumagic.mismatch.explanation import Fix
from gpumagic.mismatch.read.expressions import Reader
from gpumagic.mismatch.read.named_devices import device_of, full
from gpumagic.mismatch.read.operand import Part, flat
from gpumagic.mismatch.read.operation import operation
from gpumagic.mismatch.read.syntax import function_of, in_own_scope, root
from gpumagic.usercode.files import label
from gpumagic.usercode.frames import FailedFrame

_DEVICE_NAMES = (
    *("device", "dev", "DEVICE", "DEV", "dst", "self.device", "self.dev"),
    *("self.cfg.device", "self.config.device", "cfg.device", "config.device", "args.device"),
)
_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.List, ast.Tuple, ast.Constant)
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Assert, ast.Delete)


@dataclass
class Site:
    """A frame, the failing node there, and the operands by their names there."""

    frame: FailedFrame
    node: ast.AST
    odd: list[Part]
    extra: list[Part] = field(default_factory=list)  # what meets the result, and moves along
    anchors: list[Part] = field(default_factory=list)  # one that stays may tell the device
    fixed: Part | None = None  # what is written to, of which a copy would not do


def climb(site: Site, outer: list[FailedFrame]) -> tuple[Site, dict[str, str]]:
    """The site as far out as every operand that moves is the very object that a caller handed over.

    And the operands' names there, by those where it failed, where they differ.
    """
    first = moved = [*site.odd, *site.extra]
    count = len(site.odd)
    for frame in outer:
        node = frame.failed
        if node is None or not all(_is_parameter(part, site.frame) for part in moved):
            break
        done = operation(node, Reader(frame))
        parts = list(done.parts) if done else []
        found = [next((p for p in flat(parts) if p.value is m.value), None) for m in moved]
        above = [part for part in found if part is not None]
        if len(above) < len(moved):
            break
        moved = above
        site = Site(frame, node, moved[:count], moved[count:], parts)
    names = {a.key: b.text for a, b in zip(first, moved, strict=True) if a.text != b.text}
    return site, names


def _is_parameter(part: Part, frame: FailedFrame) -> bool:
    known = part.kind in ("tensor", "object") and part.value is not None
    return known and part.text in frame.parameters and not frame.at_top


def written_device(site: Site, target: str, *, before: bool) -> str:
    """An expression for the device, as its user would write it there."""
    names = [*_DEVICE_NAMES, *(f"{name}.device" for name in _at_hand(site, before))]
    if isinstance(site.node, ast.stmt):  # a line above: what is bound from there on is not known
        nodes = ast.walk(function_of(site.node) or site.node)
        later = [n for n in nodes if isinstance(n, ast.Name) and n.lineno >= site.node.lineno]
        unknown = {n.id for n in later if isinstance(n.ctx, ast.Store)}
        names = [name for name in names if root(name) not in unknown]
    for name in names:
        value = site.frame.scope.value(ast.parse(name, mode="eval").body)
        device = device_of(value) if type(value) is not int else None
        if device is not None and full(device) == target:
            return name
    return f'"{target}"'


def _at_hand(site: Site, before: bool) -> Iterator[str]:
    """The names in the operands."""
    for part in [*site.anchors, *site.odd]:
        for node in ast.walk(part.node):
            hidden = in_own_scope(node) and (before or not in_own_scope(part.node))
            if isinstance(node, (ast.Name, ast.Attribute)) and not hidden:
                yield ast.unparse(node)


def moving(text: str, device: str) -> str:
    """`text` with what brings it to a device put after it."""
    return f"{text}.cpu()" if device == '"cpu"' else f"{text}.to({device})"


def can_precede(frame: FailedFrame, stmt: ast.stmt) -> bool:
    """Whether a line put before `stmt` runs each time just before what is in it."""
    line = frame.source.splitlines()[stmt.lineno - 1]
    if line.encode()[: stmt.col_offset].strip():
        return False  # `if ready: y = net(x)`, `a; b`
    if line.lstrip().startswith("elif") or isinstance(stmt, (ast.While, ast.ClassDef)):
        return False
    return not isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef))


def bracketed(node: ast.AST, text: str) -> str:
    """An expression, in brackets if something is to be put after it."""
    return text if isinstance(node, _ATOMS) and not text.startswith(("-", "~")) else f"({text})"


@dataclass
class Edit:
    """Changes around one statement."""

    frame: FailedFrame
    stmt: ast.stmt
    before: list[str] = field(default_factory=list)
    replaced: list[tuple[ast.AST, str]] = field(default_factory=list)

    def fix(
        self, nbytes: int | None, other_nbytes: int | None = None, *, once: bool = False
    ) -> Fix:
        """The changes as a fix."""
        lines = self.frame.source.splitlines()
        start, end = self.stmt.lineno, self.stmt.end_lineno or self.stmt.lineno
        if not isinstance(self.stmt, _SIMPLE):
            end = start
        end = max([end, *(getattr(n, "end_lineno", end) for n, _ in self.replaced)])
        indent = lines[start - 1][: len(lines[start - 1]) - len(lines[start - 1].lstrip())]
        code = [f"{indent}{line}" for line in self.before]
        if self.replaced:
            code += _edited(lines[start - 1 : end], start, self.replaced)
        return Fix(
            "\n".join(code),
            "replace" if self.replaced else "before",
            start,
            end if self.replaced else start,
            self.frame.filename,
            label(self.frame.filename),
            nbytes,
            other_nbytes,
            once,
        )


def _edited(lines: list[str], first: int, edits: list[tuple[ast.AST, str]]) -> list[str]:
    """Lines with expressions replaced; `first` is the number of the first."""
    text = "\n".join(lines).encode()  # columns count bytes of UTF-8
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()) + 1)
    spans = []
    for node, new in edits:
        begin = starts[node.lineno - first] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - first] + node.end_col_offset  # type: ignore[attr-defined]
        spans.append((begin, end, new.encode()))
    for begin, end, put in sorted(set(spans), reverse=True):
        text = text[:begin] + put + text[end:]
    return text.decode().split("\n")
