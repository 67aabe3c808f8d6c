"""Find the `%%ongpu` line of a cell, first in its text, then in its syntax tree.

The line becomes a call on the cell's first line: every line keeps its number, and `await`, `Out[n]`
and other magics work.
"""

import ast
import re

from IPython.core.inputtransformer2 import cell_magic, leading_empty_lines

_LINE = re.compile(r"%%ongpu(?!\w|\s*\?)")
_TIMED = re.compile(r"get_ipython\(\)\.run_cell_magic\('gputime'")
# `%ongpu cuda?` would be taken for a question about `cuda`.
_FALLBACK_LINE = re.compile(r"%(?P<magic>ongpu|gpus)\s+(?P<where>\S+\?)\s*$")
BEGIN = "begin_ongpu"  # an attribute of the shell while the extension is loaded


def transform(lines: list[str]) -> list[str]:
    """Turn a leading `%%ongpu …` line into a call; leave every other cell as it is."""
    first = next((n for n, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return lines
    line, rest = lines[first], lines[first + 1 :]
    if match := _FALLBACK_LINE.match(line):
        call = f"get_ipython().run_line_magic({match['magic']!r}, {match['where']!r})\n"
        return [*lines[:first], call, *rest]
    if not _LINE.match(line) or not "".join(rest).strip():
        return lines  # an empty cell is the cell magic's to refuse
    below = leading_empty_lines(list(rest))
    if below[0].startswith("%%"):
        # IPython sees a cell magic on the first line only. Its body counts its own lines.
        rest = transform(cell_magic(below))
        return [*lines[:first], f"{_begin(line.strip())}; {rest[0]}", *rest[1:]]
    return [*lines[:first], f"{_begin(line.strip())}\n", *rest]


# check_complete leaves such transformers out, and so asks for more lines as after any %%magic.
transform.has_side_effects = True  # type: ignore[attr-defined]


def line_of(body: list[ast.stmt]) -> str | None:
    """The `%%ongpu` line of a cell, if its first statement is the call that it became."""
    call = body[0].value if body and isinstance(body[0], ast.Expr) else None
    if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == BEGIN:
        return str(ast.literal_eval(call.args[0]))
    return None


def is_timed(body: list[ast.stmt]) -> bool:
    """Whether a cell is a `%%gputime` cell, which says itself where its code runs."""
    return len(body) == 1 and bool(_TIMED.match(ast.unparse(body[0])))


def begin_standing(body: list[ast.stmt]) -> None:
    """Put the call that a standing `%ongpu` becomes before all that a cell does."""
    call = ast.parse(_begin("")).body[0]
    for node in ast.walk(call):
        ast.copy_location(node, body[0])
    future = (isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in body)
    body.insert(max((n + 1 for n, is_future in enumerate(future) if is_future), default=0), call)


def _begin(text: str) -> str:
    return f"get_ipython().{BEGIN}({text!r})"
