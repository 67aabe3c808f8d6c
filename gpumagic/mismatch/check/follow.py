"""Follow devices through statements that have not run yet: what surely fails, what comes out."""

import ast
import inspect
import types
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from gpumagic.mismatch.check.later_uses import assign, operations, statements, wants_one_device
from gpumagic.mismatch.check.loops import bind, bound_within, stored
from gpumagic.mismatch.check.patched import World, definition
from gpumagic.mismatch.read.expressions import Reader, is_torch, words
from gpumagic.mismatch.read.operand import Part, flat
from gpumagic.mismatch.read.operation import operation
from gpumagic.usercode.frames import parents
from gpumagic.usercode.values import MISSING, Scope, of_function

_DEPTH = 4
_STEPS = 2000
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
# What may make a tensor without dimensions, which may meet any device.
_ALWAYS = words(
    "dot trace det squeeze mse_loss cross_entropy nll_loss l1_loss smooth_l1_loss kl_div tensor"
)
_REDUCE = _ALWAYS | words("mean sum max min norm prod std var median amax amin logsumexp")
_MOVES = ("to", "cuda", "cpu")
_HOME = "where the fix puts it"


@dataclass(frozen=True)
class Clash:
    """An operation that surely fails; of one in another function than the fix, nothing is told.

    Attributes
    ----------
    node : ast.AST or None
        Of the text with the fix in it.
    odd : tuple of Part
        Operands to move.
    target : str
        Where to.
    """

    node: ast.AST | None = None
    odd: tuple[Part, ...] = ()
    target: str = ""


def _reduces(node: ast.AST) -> bool:
    """Whether a call may leave no dimension: `x.sum()`, not `x.sum(1)`."""
    if not isinstance(node, ast.Call):
        return False
    text = ast.unparse(node.func)
    name, functional = text.split(".")[-1], text.startswith(("torch.", "F.", "nn."))
    return name in _REDUCE and (len(node.args) <= functional or name in _ALWAYS)


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


class Walk:
    """Follows devices through statements, from the values that a scope has."""

    def __init__(
        self, scope: Scope, moved: dict[str, str | None], world: World, depth: int = 0
    ) -> None:
        self.moved = moved
        self.reader = Reader(scope, ast.unparse, moved, default=world.default)
        self.world = world
        self.depth = depth
        self.modules_move = False
        self.homes: dict[int, str | None] = {}
        self.given: set[str] = set()
        self.clash: Clash | None = None
        self.loose: set[str] = set()
        self.results: list[str | None] = []

    @property
    def result(self) -> str | None:
        """Where what is returned will be; None if that is not known."""
        return self.results[0] if len(set(self.results)) == 1 else None

    def through(self, scope: ast.AST, line: int) -> None:
        if isinstance(scope, ast.Lambda):
            self._expression(scope.body)
            return
        every = list(statements(scope))
        loops = [s for s in every if isinstance(s, _LOOPS) and s.lineno < line <= _end(s)]
        for loop in sorted(loops, key=_end):
            self._lines(every, line, _end(loop))
            if isinstance(loop, (ast.For, ast.AsyncFor)):
                self.given.add(ast.unparse(loop.target))
                bind(loop, self.reader.scope, self.moved, self.given)
            self._lines(every, loop.lineno + 1, _end(loop))
            line = _end(loop) + 1
        self._lines(every, line, line + 10**6)

    def _lines(self, every: list[ast.stmt], first: int, last: int) -> None:
        for stmt in [s for s in every if first <= s.lineno <= last]:
            if next(self.world.steps) > _STEPS:
                return
            with bound_within(stmt, self.reader.scope, self.moved, self.given):
                for node in operations(stmt):
                    self._operation(node)
            if isinstance(stmt, ast.Return) and stmt.value is not None:
                self._returned(stmt.value)
            elif isinstance(stmt, ast.Expr):
                self._moves(stmt.value)
            if isinstance(stmt, ast.Assign):
                self._loosen(stmt)
            assign(stmt, self.reader, self.moved)
            if isinstance(stmt, ast.Assign) and self._by_moved_module(stmt.value):
                self.moved |= dict.fromkeys(stored(stmt))
            if isinstance(stmt, (ast.For, ast.AsyncFor)):
                bind(stmt, self.reader.scope, self.moved, self.given)

    def _expression(self, node: ast.expr) -> None:
        for inner in operations(ast.Expr(node)):
            self._operation(inner)
        self._returned(node)

    def _returned(self, node: ast.expr) -> None:
        part = self.reader.part(node)
        known = part is not None and part.kind in ("tensor", "made")
        self.results.append(part.device if part is not None and known else None)

    def _moves(self, node: ast.expr) -> None:
        """`net.to(…)`: a module moves where it is."""
        func = node.func if isinstance(node, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.attr in _MOVES:
            self.modules_move = True
            if (moved := self.reader.part(node)) is not None and moved.kind == "module":
                self.homes[id(moved.value)] = moved.device

    def _at_home(self, part: Part) -> Part:
        home = self.homes.get(id(part.value)) if part.kind == "module" else None
        return replace(part, devices=(home,), about=_HOME) if home else part

    def _by_moved_module(self, node: ast.expr) -> bool:
        """Whether a module that the fix moves makes it: it is no longer where that was."""
        held = map(self.reader.scope.value, ast.walk(node))
        return any(issubclass(type(v), nn.Module) and id(v) in self.world.replaced for v in held)

    def _operation(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            text = ast.unparse(node)
            called = self._user_function(node) if text not in self.moved else None
            if called is not None:
                self.moved[text] = self._into(node, *called)
            if text in self.moved:
                return
        if isinstance(node, ast.Subscript):
            self._item(node)
            return
        if isinstance(node, ast.Call) and self._is_for_host(node):
            func = node.func
            method = isinstance(func, ast.Attribute) and func.attr == "numpy"
            operands = [func.value] if method and isinstance(func, ast.Attribute) else node.args
            parts = [p for a in operands if (p := self.reader.part(a))]
            odd = [p for p in parts if self._is_certain(p) and p.device != "cpu"]
            if odd:
                self._fails(Clash(node, tuple(odd), "host"))
            return
        done = operation(node, self.reader) if wants_one_device(node, self.reader) else None
        every = [self._at_home(p) for p in flat(done.parts)] if done else []
        parts = [p for p in every if p.about == _HOME or self._is_certain(p)]
        devices = {part.device for part in parts}
        if done is None or len(devices) < 2:
            return
        on_cpu = [part for part in parts if part.device == "cpu"]
        if on_cpu and len(devices) == 2 and all(self._may_be_scalar(part) for part in on_cpu):
            return
        kept = [p.device for p in parts if p is done.fixed or p.kind == "module"]
        kept += sorted((p.device or "" for p in parts), key=lambda d: d == "cpu")
        odd = [part for part in parts if part.device != kept[0]]
        self._fails(Clash(node, tuple(odd), kept[0] or ""))

    def _fails(self, clash: Clash) -> None:
        self.clash = self.clash or clash

    def _item(self, node: ast.Subscript) -> None:
        """`x[i]` and `x[i] = y`, where `i` is a tensor."""
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        base = self.reader.part(node.value)
        parts = [p for i in index if (p := self.reader.part(i)) and p.kind in ("tensor", "made")]
        if base is None or base.kind not in ("tensor", "made") or not parts:
            return
        odd = [p for p in parts if p.device not in ("cpu", base.device)]
        parent = next(parents(node), None)
        if isinstance(node.ctx, ast.Store) and isinstance(parent, ast.Assign):
            value = self.reader.part(parent.value)
            if value is not None and value.kind in ("tensor", "made"):
                loose = value.device == "cpu" and self._may_be_scalar(value)
                odd += [value] if value.device != base.device and not loose else []
        odd = [part for part in odd if self._is_certain(part)]
        if odd and self._is_certain(base):
            self._fails(Clash(node, tuple(odd), base.device or ""))

    def _is_for_host(self, node: ast.Call) -> bool:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "numpy":
            return True
        function = self.reader.scope.value(node.func)
        if function is MISSING:
            return False
        home = getattr(type(function), "__module__", "") + str(of_function(function, "__module__"))
        return "numpy" in home

    def _loosen(self, stmt: ast.Assign) -> None:
        """Note which names may from now on be tensors without dimensions."""
        part = self.reader.part(stmt.value)
        for target in stmt.targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    plain = node is target and part is not None and not self._may_be_scalar(part)
                    (self.loose.discard if plain else self.loose.add)(node.id)

    def _may_be_scalar(self, part: Part) -> bool:
        if part.kind != "made" or part.shape is not None:
            return part.scalar
        if isinstance(part.node, ast.Name):
            return part.node.id in self.loose or part.node.id not in self.moved
        inner = list(ast.walk(part.node))
        names = {n.id for n in inner if isinstance(n, ast.Name)}
        indexed = any(isinstance(n, ast.Subscript) for n in inner)
        return bool(names & self.loose) or indexed or any(_reduces(n) for n in inner)

    def _is_certain(self, part: Part) -> bool:
        if part.scalar or part.device in (None, "meta") or id(part.value) in self.world.replaced:
            return False
        if part.source is not None and id(part.source.value) in self.world.replaced:
            return False
        return not self.modules_move or not any(
            (held := self.reader.part(n)) is not None and held.kind == "module"
            for n in ast.walk(part.node)
            if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript))
        )

    # -- into the user's functions
    def _user_function(self, node: ast.Call) -> tuple[types.FunctionType, Any] | None:
        function, owner = self.reader.scope.value(node.func), MISSING
        if any(ast.unparse(n) in self.moved for n in ast.walk(node.func)):
            return None
        if issubclass(type(function), nn.Module):
            function, owner = getattr(type(function), "forward", None), function
        elif isinstance(node.func, ast.Attribute):
            above = self.reader.scope.value(node.func.value)
            if type(above) not in (type, types.ModuleType):
                owner = above
        if type(function) is not types.FunctionType or is_torch(function):
            return None
        return function, owner

    def _into(self, node: ast.Call, function: types.FunctionType, owner: Any) -> str | None:
        code = function.__code__
        if self.depth >= _DEPTH or code.co_flags & inspect.CO_GENERATOR:
            return None
        tree = self.world.tree(code.co_filename)
        scope = definition(tree, code, self.world.first_line(code)) if tree is not None else None
        if scope is None or any(isinstance(a, ast.Starred) for a in node.args):
            return None
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given: list[tuple[str, ast.expr]] = []
        local: dict[str, Any] = {}
        if owner is not MISSING:
            local[names[0]] = owner
        given += zip(names[owner is not MISSING :], node.args, strict=False)
        given += [(k.arg, k.value) for k in node.keywords if k.arg is not None]
        moved: dict[str, str | None] = {}
        for name, value in given:
            held = self.reader.renamed(value)
            if held is not MISSING:
                local[name] = held
                continue
            part = self.reader.part(value)
            single = part is not None and part.kind in ("tensor", "made")
            moved[name] = part.device if part is not None and single else None
        for name in names:
            if name not in local:
                moved.setdefault(name, None)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
        for name, cell in cells:
            try:
                local.setdefault(name, cell.cell_contents)
            except ValueError:
                moved[name] = None
        scope_in = Scope(local, function.__globals__)
        inner = Walk(scope_in, moved, self.world, self.depth + 1)
        inner.modules_move = self.modules_move
        inner.loose = {n for n, v in given if (p := self.reader.part(v)) and self._may_be_scalar(p)}
        # What has been moved before is so for a global name too.
        for name, device in self.moved.items():
            if name not in local and name not in moved:
                inner.moved[name] = device
        inner.through(scope, 0)
        if inner.clash is not None:
            self._fails(Clash())
        return inner.result
