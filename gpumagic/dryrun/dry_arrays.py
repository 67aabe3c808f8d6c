"""Dry-run calls of JAX: its compiler says what each needs. No torch, no fork.

JAX runs threads, which do not survive a fork, but its compiler needs only shapes. In a cell, the
calls of jitted functions are followed one by one, and no other code.
"""

import ast
import io
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import psutil

from gpumagic import faults
from gpumagic.device import Device, here, resolve_one
from gpumagic.display.units import many
from gpumagic.dryrun.result import Assigned, DryRun, OnCard, Peak, Unknown, cards_meant
from gpumagic.frameworks import jax_compiled
from gpumagic.frameworks.jax_compiled import Compiled
from gpumagic.frameworks.known import jax_here
from gpumagic.usercode.lines import UserLine, innermost_of, source_of
from gpumagic.usercode.values import MISSING, Scope, of_function

_SHARE = 0.75  # of a card, which JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


@dataclass(frozen=True)
class DryCall:
    """Describe a call to follow."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    at: UserLine | None = None


def is_for_jax(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call is one of JAX: by its function, or by an array that it is given."""
    if jax_compiled.is_jitted(function):
        return True
    given = jax_compiled.leaves((tuple(args), dict(kwargs)))
    return any(jax_here().is_array(leaf) or jax_compiled.is_abstract(leaf) for leaf in given)


def dry_run_of_jax(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], on: object
) -> DryRun:
    """Predict what one call would need on a device, or on cards that are not here."""
    follower = Follower(on)
    follower.assign("return", follower.call(DryCall(function, args, kwargs)))
    return follower.result()


class Follower:
    """Follow calls one after another; their results live to the end."""

    def __init__(self, on: object) -> None:
        self._start = time.monotonic()
        self._cards = cards_meant(on)
        self._device = None if self._cards or on is None else _device(on)
        self._own = None if self._device is None else jax_here().own(self._device)
        self._name = "" if self._device is None else str(self._device)
        # Arrays by their ids, kept so that these stay theirs: of the user, and of earlier calls.
        self._given: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._kept = self._most = 0
        self._at: UserLine | None = None
        self._assigned: dict[str, Assigned] = {}
        self._unknown: list[Unknown] = []
        self._failed: tuple[str, UserLine | None] | None = None
        self._out = io.StringIO()
        self.calls = 0
        """How many were followed."""
        self.ended = False
        """Whether one would fail, or asks for what data alone tell: none is followed after it."""

    def call(self, call: DryCall) -> Any:
        """Return a call's result without data; None if it fails or needs data."""
        self.calls += 1
        self.ended = True
        if not self._name and not self._cards:
            self._name = _where(call)
        try:
            with redirect_stdout(self._out):
                done = jax_compiled.compile_call(call.function, call.args, call.kwargs, self._own)
        except jax_compiled.Failed as error:
            where = innermost_of(error.__traceback__) or call.at
            reason = f"what the code does depends on values: {faults.in_words(error)}"
            self._unknown.append(Unknown(where, reason, ended=True))
            return None
        except Exception as error:  # noqa: BLE001  what the user's code raises is the result
            where = innermost_of(error.__traceback__) or call.at
            self._failed = faults.in_words(error), where
            return None
        self.ended = False
        self._note(done, call)
        return done.result

    def assign(self, name: str, value: Any) -> None:
        """Note what a name is bound to, if calls made it."""
        if any(id(leaf) in self._made for leaf in jax_compiled.leaves(value)):
            self._assigned[name] = _described(name, value, self._name)

    def _note(self, done: Compiled, call: DryCall) -> None:
        self._given |= {id(leaf): leaf for leaf in _arrays(call) if id(leaf) not in self._made}
        self._made |= {id(leaf): leaf for leaf in jax_compiled.leaves(done.result)}
        brought = sum(
            _nbytes(leaf) for leaf in self._given.values() if self._name not in _places_of(leaf)
        )
        kept = self._kept + done.outputs - done.aliased
        if brought + kept + done.temporary > self._most:
            self._most, self._at = brought + kept + done.temporary, call.at
        self._kept = kept
        self._say(done, call)

    def _say(self, done: Compiled, call: DryCall) -> None:
        if not done.jitted and str(of_function(call.function, "__module__"))[:3] != "jax":
            self._tell(
                "it is not jitted: these figures are as if it were; call by call it may need more",
                call.at,
            )
        if done.platform == "cpu" and self._name != "cpu":
            self._tell("JAX compiled it for the CPU: the temporaries of a GPU's compiler differ")

    def _tell(self, reason: str, at: UserLine | None = None) -> None:
        told = Unknown(at, reason, ended=False)
        if told not in self._unknown:
            self._unknown.append(told)

    def result(self) -> DryRun:
        """Return what all calls together would do."""
        cards = tuple(OnCard(card, self._most, None) for card in self._cards)
        for each in cards:
            if each.fits and self._most > _SHARE * each.card.total:
                self._tell(
                    f"JAX takes {_SHARE:.0%} of a card, and this needs more: set "
                    "XLA_PYTHON_CLIENT_MEM_FRACTION=.95 before JAX starts"
                )
        peak = {} if self._cards else {self._name: self._peak()}
        device = self._device
        error, error_at = self._failed or (None, None)
        return DryRun(
            device=self._cards[0].name if self._cards else self._name,
            assigned=tuple(self._assigned.values()),
            peak=peak if self._most else {},
            unknown=tuple(self._unknown),
            error=error,
            error_at=error_at,
            printed=self._out.getvalue(),
            operators=self.calls,
            seconds=time.monotonic() - self._start,
            virtual=_is_virtual(self._name) if device is None else device.virtual,
            cards=cards if self._most else (),
        )

    def _peak(self) -> Peak:
        there, free = _room(self._name)
        return Peak(self._name, there + self._most, self._most, free, self._at)


def _device(on: object) -> Device:
    known = here(memory="free" in str(on))
    return resolve_one(str(on), known or jax_here().devices())


def _arrays(call: DryCall) -> list[Any]:
    return jax_compiled.leaves((tuple(call.args), dict(call.kwargs)))


def _places_of(leaf: Any) -> list[str]:
    jax = jax_here()
    return jax.where(leaf).split(" + ") if jax.is_array(leaf) else []


def _where(call: DryCall) -> str:
    """Return the device of a call that names none: its arguments' device, or JAX's default."""
    places = [place for leaf in _arrays(call) for place in _places_of(leaf)]
    gpus = [place for place in places if place != "cpu"]
    return next(iter([*gpus, *places]), "") or jax_here().default()


def _is_virtual(name: str) -> bool:
    return any(device.virtual and str(device) == name for device in here(memory=False))


def _room(name: str) -> tuple[int, int | None]:
    """Return the bytes of arrays on a device now, and the bytes available for others."""
    if name == "cpu":
        return 0, int(psutil.virtual_memory().available)
    found = next((device for device in here() if str(device) == name), None)
    device = found or resolve_one(name, jax_here().devices())
    pool = jax_here().pool(device)
    if pool is not None and pool.limit is not None and pool.used is not None:
        return pool.used, pool.limit - pool.used
    return jax_here().allocated(device)[0], device.memory_free


def _nbytes(leaf: Any) -> int:
    return int(leaf.size * leaf.dtype.itemsize)


def _described(name: str, value: Any, device: str) -> Assigned:
    """A variable's kind and bytes: ``"float32[128, 10]"``, ``"dict of 2, 4 arrays"``."""
    held = jax_compiled.leaves(value)
    nbytes = sum(map(_nbytes, held))
    if jax_compiled.is_abstract(value):
        kind = f"{value.dtype}{list(value.shape)}"
        return Assigned(name, kind, device, nbytes, tuple(value.shape), value.dtype)
    kind = type(value).__name__
    kind = f"{kind} of {len(value)}" if isinstance(value, (tuple, list, dict)) else kind
    return Assigned(name, f"{kind}, {many(len(held), 'array')}" if held else kind, device, nbytes)


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
    """Predict what the calls of a cell would need; raise `NotFollowed` for any other code."""
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
        """Return an expression's value; for a call its shapes, or None if it would fail."""
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
