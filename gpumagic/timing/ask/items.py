"""Compute what one run works through: a number, or an expression with a sweep's variables."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpumagic.errors import GpuError

_TYPE = "type a number above 0, or an expression for one, such as len(sentences)"


def worked_through(
    items: float | str | None,
    namespace: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
) -> list[float | None]:
    """Items of one run, at each point of a sweep; an expression is computed once for equal values.

    Raises GpuError for what is no number above 0.
    """
    if items is None:
        return [None] * len(points)
    if not isinstance(items, str):
        return [_number(items, f"items={items}")] * len(points)
    try:
        tree = ast.parse(items.strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise GpuError(f"items {items} is no expression; {_TYPE}") from None
    code = compile(tree, "<items>", "eval")
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    known: dict[tuple[tuple[str, str], ...], float] = {}
    found: list[float | None] = []
    for values in points:
        mine = {name: value for name, value in values.items() if name in named}
        key = tuple((name, repr(value)) for name, value in mine.items())
        if key not in known:
            known[key] = _computed(code, items, {**namespace, **values}, mine)
        found.append(known[key])
    return found


def _computed(code: Any, text: str, names: dict[str, Any], values: Mapping[str, Any]) -> float:
    at = "".join(f", {name} = {value!r}" for name, value in values.items())
    try:
        value = eval(code, names)
    except Exception as error:  # noqa: BLE001  it is the user's
        raise GpuError(f"items {text}{at}: {type(error).__name__}: {error}; {_TYPE}") from None
    return _number(value, f"items {text}{at}: {str(value)[:40]}")


def _number(value: Any, told: str) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except Exception:  # noqa: BLE001  what a user's object does not turn into
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        told = " ".join(told.split())
        raise GpuError(f"{told} is not a number above 0; {_TYPE}") from None
    return number
