"""Hand the text of a `%%gpufit` cell to `fit`, and show and bind what it gives."""

import ast
from argparse import Namespace
from contextlib import suppress
from typing import Any

from gpumagic.errors import GpuError, torch_needed
from gpumagic.magics.hand_over import refuse_others
from gpumagic.magics.typed_cell import compiled_name, give, progressing


def fit_cell(shell: Any, asked: Namespace, magic: str, text: str) -> None:
    """Find the largest value with which `text`, as it was typed below `magic`, fits."""
    with suppress(SyntaxError):  # told below
        refuse_others("%%gpufit", shell, ast.parse(shell.transform_cell(text)))
    with torch_needed("%%gpufit"):
        from gpumagic.device.cards import cards
        from gpumagic.fitting.fit import fit
        from gpumagic.magics.sweep_option import range_of

    wheres = [word for word in asked.where if "=" not in word]
    ranges = [word for word in asked.where if "=" in word]
    if len(ranges) != 1:
        raise GpuError("one variable and its values are needed; type batch=1..4096")
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
            target=asked.target,
            dry=asked.dry,
            namespace=shell.user_ns,
            progress=line.update,
            filename=name,
            text=text,
            **{variable: values},
        )
    give(shell, asked, line, made)
