"""Run a `%%gputime` or `%%gpufit` cell: read its values, measure, show and assign the result."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from gpumagic.errors import GpuError, torch_needed
from gpumagic.magics.run_elsewhere import compiled_name, give, progressing, refuse_others
from gpumagic.usercode.sweep import parse, range_of

if TYPE_CHECKING:
    from gpumagic.timing.comparison import Comparison


def time_cell(shell: Any, asked: Namespace, magic: str, text: str, scope: Any = None) -> None:
    """Time `text` as it was typed, show the Comparison, and assign it as the line asks.

    `magic` is the line above the text, or empty; `scope` has the names of the calling function.
    """
    from gpumagic import timing

    namespace = shell.user_ns
    if scope is not None and scope is not namespace:
        namespace = {**namespace, **scope}
    against = _earlier(asked.against, namespace, timing.last_comparison())
    sweep = parse(asked.sweep, namespace) if asked.sweep else None
    setup = shell.transform_cell(asked.setup) if asked.setup else ""
    code, name = compiled_name(shell, text, magic, setup)
    with progressing(shell, asked, name) as line:
        made = timing.compare(
            code,
            tuple(asked.where) or None,
            setup=setup,
            sweep=sweep,
            items=asked.items,
            max_time=asked.max_time,
            namespace=namespace,
            against=against,
            progress=line.update,
            filename=name,
            text=text,
        )
    give(shell, asked, line, made)


def _earlier(
    named: str | None, names: Mapping[str, Any], last: Comparison | None
) -> Comparison | Literal["last"] | None:
    """Return the result of the notebook that `--against` names."""
    from gpumagic.timing.comparison import Comparison

    if named is None:
        return None
    if named == "last":
        if last is None:
            raise GpuError("--against last: nothing was timed before in this kernel")
        return "last"
    if isinstance(value := names.get(named), Comparison):
        return value
    raise GpuError(
        f"--against {named} is no comparison of this notebook;"
        " type --against last, or the NAME of an earlier -o NAME"
    )


def fit_cell(shell: Any, asked: Namespace, magic: str, text: str) -> None:
    """Find the largest value with which `text`, as it was typed below `magic`, fits."""
    with suppress(SyntaxError):  # reported below
        refuse_others("%%gpufit", shell, ast.parse(shell.transform_cell(text)))
    with torch_needed("%%gpufit"):
        from gpumagic.device.cards import cards
        from gpumagic.fitting.fit import fit

    wheres = [word for word in asked.where if "=" not in word]
    ranges = [word for word in asked.where if "=" in word]
    if len(ranges) != 1:
        raise GpuError("one variable with its values is needed; type batch=1..4096")
    if len(wheres) + (asked.on is not None) > 1:
        raise GpuError(f"one GPU is needed, {wheres[-1]} is one too many; or type --on CARD, CARD")
    variable, values = range_of(ranges[0])
    on: Any = cards(asked.on) if asked.on is not None else next(iter(wheres), None)
    code, name = compiled_name(shell, text, magic)
    with progressing(shell, asked, name) as line:
        made = fit(
            code,
            on,
            margin=asked.margin,
            dry=asked.dry,
            namespace=shell.user_ns,
            progress=line.update,
            filename=name,
            text=text,
            **{variable: values},
        )
    give(shell, asked, line, made)
