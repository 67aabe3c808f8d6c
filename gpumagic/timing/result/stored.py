"""A comparison as JSON, and back: what was written is read exactly, anything else is refused."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumagic.errors import GpuError
from gpumagic.timing.ask import sweep

if TYPE_CHECKING:
    from gpumagic.timing.comparison import Comparison

FORMAT = "gpumagic-comparison"
VERSION = 1


class _Wrong(Exception):
    """What is wrong with it, and where."""


def dumps(comparison: Comparison) -> str:
    """As JSON of one line; see `Comparison.to_json`."""
    document = {"format": FORMAT, "version": VERSION, **_plain(comparison)}
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if not isinstance(value, Real):
        return sweep.label(value)
    # JSON has no NaN and no infinity.
    return float(value) if math.isfinite(value) else {"float": str(float(value))}


def load(source: str | Path) -> Comparison:
    """From JSON or from a file; see `Comparison.from_json`."""
    # JSON of an object begins with a brace, and a path may.
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _loads(source, "the JSON")
    name = sweep.label(str(source), 200)
    try:
        path = Path(source).expanduser()
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise GpuError(f"{name}: {reason}; give the file that save() wrote") from None
    return _loads(text, name)


# In Unix time; beyond it the C library cannot write a date.
_YEAR_10_000 = 253_402_300_800


def _loads(text: str, name: str) -> Comparison:
    from gpumagic.timing.comparison import Comparison

    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise GpuError(f"{name} is no comparison; give what save() or to_json() wrote")
    version = found.get("version")
    if version != VERSION:
        raise GpuError(
            f"{name} has version {str(version)[:20]!r}, and this gpumagic knows {VERSION}; "
            "update gpumagic, or measure again"
        )
    content = {key: value for key, value in found.items() if key not in ("format", "version")}
    try:
        made: Comparison = _make(Comparison, content, "")
        _consistent(made)
    except _Wrong as wrong:
        raise GpuError(f"{name} is not as save() wrote it: {wrong}; measure again") from None
    return made


def _no_constant(text: str) -> float:
    raise ValueError(text)


def _make(kind: Any, given: Any, where: str) -> Any:
    """A value of a type, of what JSON gave; `where` it is, for the message."""
    if kind is Any:
        return _any(given)
    if is_dataclass(kind):
        return _object(kind, given, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if given is None and type(None) in arguments:
            return None
        return _make(next(a for a in arguments if a is not type(None)), given, where)
    if origin is tuple:
        if not isinstance(given, list):
            raise _Wrong(f"{where} is no list")
        return tuple(_make(arguments[0], each, f"{where}[{n}]") for n, each in enumerate(given))
    if origin is Mapping:
        if not isinstance(given, dict):
            raise _Wrong(f"{where} is no object")
        return {name: _make(arguments[1], each, f"{where}.{name}") for name, each in given.items()}
    if origin is typing.Literal:
        if given not in arguments:
            raise _Wrong(f"{where} is not one of {', '.join(arguments)}")
        return given
    return _scalar(kind, given, where)


def _object(kind: Any, given: Any, where: str) -> Any:
    if not isinstance(given, dict):
        raise _Wrong(f"{where or 'it'} is no object")
    known = {f.name: f for f in fields(kind)}
    if unknown := set(given) - set(known):
        raise _Wrong(f"{where or 'it'} has an unknown {min(unknown)[:40]!r}")
    hints = _hints(kind)
    made = {}
    for name, f in known.items():
        if name in given:
            made[name] = _make(hints[name], given[name], f"{where}.{name}".lstrip("."))
        elif f.default is MISSING and f.default_factory is MISSING:
            raise _Wrong(f"{where or 'it'} has no {name!r}")
    return kind(**made)


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _scalar(kind: Any, given: Any, where: str) -> Any:
    given = _float(given)
    # In Python True is an int too.
    if kind is float and isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    if not isinstance(given, kind) or isinstance(given, bool) is not (kind is bool):
        raise _Wrong(f"{where} is no {_NAMES[kind]}")
    return given


_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def _any(given: Any) -> Any:
    given = _float(given)
    if isinstance(given, list):
        return tuple(_any(each) for each in given)
    return {k: _any(v) for k, v in given.items()} if isinstance(given, dict) else given


def _float(given: Any) -> Any:
    if isinstance(given, dict) and given.get("float") in ("nan", "inf", "-inf") and len(given) == 1:
        return float(given["float"])
    return given


def _consistent(made: Comparison) -> None:
    """What its types do not say."""
    if not 0 <= made.time < _YEAR_10_000:
        raise _Wrong("time is no time that a clock has shown")
    for n, timing in enumerate(made.timings):
        where = f"timings[{n}]"
        for name in ("seconds", "host", "device", "alone"):
            if not all(math.isfinite(s) and s >= 0 for s in getattr(timing, name) or ()):
                raise _Wrong(f"{where}.{name} has a time that cannot be")
        if timing.items is not None and not (math.isfinite(timing.items) and timing.items > 0):
            raise _Wrong(f"{where}.items is not above 0")
        if timing.number < 1 or not timing.where:
            raise _Wrong(f"{where} has no runs, or no device")
        if set(timing.values) != set(made.sweep):
            raise _Wrong(f"{where}.values are not the sweep's variables")
    if len(made.sweep) > 2 or not all(made.sweep.values()):
        raise _Wrong("sweep has more than two variables, or one without values")
    if made.items is not None and not (math.isfinite(made.items) and made.items > 0):
        raise _Wrong("items is not above 0")
