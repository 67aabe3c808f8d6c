"""Follow a cell that calls what JAX has jitted, call by call, by the shapes of what each gives.

Only what can be read is followed: names, what is in them, and calls. All else would have to be run.
"""

import ast
import types
from collections.abc import Iterable, Mapping
from typing import Any

from gpumagic.dryrun.dry_arrays import DryCall, Follower
from gpumagic.dryrun.result import DryRun
from gpumagic.frameworks import jax_compiled
from gpumagic.usercode.lines import UserLine, source_of
from gpumagic.usercode.values import MISSING, Scope, of_function


class NotFollowed(Exception):
    """A statement that cannot be followed by shapes alone."""

    def __init__(self, at: UserLine) -> None:
        super().__init__(
            f"a dry run follows cells of JAX whose lines call jitted functions by their names, and "
            f"{at} does something else; type gpumagic.dry_run(step, params, batch)"
        )


def dry_run_array_cell(
    tree: ast.Module, namespace: Mapping[str, Any], file: str, on: object
) -> DryRun:
    """What the calls of a cell would need; `NotFollowed` where it does anything else."""
    return _Cell(namespace, file, Follower(on)).follow(tree)


class _Cell:
    def __init__(self, namespace: Mapping[str, Any], file: str, follower: Follower) -> None:
        self._made: dict[str, Any] = {}
        self._scope = Scope(self._made, namespace)
        self._file = file
        self._follower = follower

    def follow(self, tree: ast.Module) -> DryRun:
        for statement in tree.body:
            if not isinstance(statement, (ast.Import, ast.ImportFrom)):  # done before, or missing
                self._statement(statement, last=statement is tree.body[-1])
            if self._follower.ended:
                break
        if not self._follower.calls:
            raise NotFollowed(self._line(tree.body[-1]))
        return self._follower.result()

    def _statement(self, node: ast.stmt, last: bool) -> None:
        if isinstance(node, ast.Expr):
            value = self._value(node.value)
            if last:
                self._follower.assign("Out", value)
        elif isinstance(node, ast.Assign) and (names := _names(node.targets)):
            value = self._value(node.value)
            if not self._follower.ended:
                self._bind(names, [value] if len(names) == 1 else value)
        else:
            raise NotFollowed(self._line(node))

    def _bind(self, names: tuple[str, ...], values: Iterable[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            self._made[name] = value
            self._follower.assign(name, value)

    def _value(self, node: ast.expr) -> Any:
        """What an expression gives; of a call its shapes, and None where that would fail."""
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
            value, key = self._value(node.value), self._scope.value(node.slice)
            return None if self._follower.ended else value[key]
        if isinstance(node, ast.Call):
            return self._call(node)
        found = self._scope.value(node)
        if found is MISSING:
            raise NotFollowed(self._line(node))
        return found

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "block_until_ready":
            return self._value(node.func.value)
        function = self._scope.value(node.func)
        if not _may_be_traced(function) or any(each.arg is None for each in node.keywords):
            raise NotFollowed(self._line(node))
        args = [self._value(arg) for arg in node.args]
        kwargs = {str(each.arg): self._value(each.value) for each in node.keywords}
        if self._follower.ended:
            return None
        return self._follower.call(DryCall(function, args, kwargs, self._line(node)))

    def _line(self, node: ast.stmt | ast.expr) -> UserLine:
        return UserLine(node.lineno, source_of(self._file, node.lineno), file=self._file)


def _names(targets: list[ast.expr]) -> tuple[str, ...]:
    """The names that an assignment binds; none where it binds anything else."""
    target = targets[0]
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    names = tuple(part.id for part in parts if isinstance(part, ast.Name))
    return names if len(names) == len(parts) and len(targets) == 1 else ()


def _may_be_traced(function: Any) -> bool:
    """Whether a function is jitted, or one of JAX's own."""
    home = str(of_function(function, "__module__") or "").partition(".")[0]
    own = home == "jax" and isinstance(function, (types.FunctionType, types.BuiltinFunctionType))
    return function is not MISSING and (jax_compiled.is_jitted(function) or own)
