"""Hand the text of a `%%gputime` cell to `compare`, and show and bind what it gives.

The engine is imported with the first of them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpumagic.errors import GpuError
from gpumagic.magics.typed_cell import compiled_name, give, progressing

if TYPE_CHECKING:
    from gpumagic.timing.comparison import Comparison


def time_cell(shell: Any, asked: Namespace, magic: str, text: str, scope: Any = None) -> None:
    """Time `text`, as it was typed, show the Comparison and bind it as the line asks.

    `magic` is the line above the text, if any; `scope` the names of the function that called it.
    """
    from gpumagic import timing
    from gpumagic.magics import sweep_option

    namespace = shell.user_ns
    if scope is not None and scope is not namespace:
        namespace = {**namespace, **scope}
    against = _earlier(asked.against, namespace, timing.last_comparison())
    sweep = sweep_option.parse(asked.sweep, namespace) if asked.sweep else None
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
            in_place=asked.in_place,
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
    """What `--against` names, among the notebook's names or the files."""
    from gpumagic.timing.comparison import Comparison

    if named is None:
        return None
    if named == "last":
        if last is None:
            raise GpuError("--against last: nothing was timed before in this kernel")
        return "last"
    if isinstance(value := names.get(named), Comparison):
        return value
    path = Path(named).expanduser()
    if not path.is_file():
        raise GpuError(
            f"--against {named}: neither a comparison of this notebook nor a file;"
            " type --against last, or the NAME of an earlier -o NAME"
        )
    return Comparison.from_json(path)
