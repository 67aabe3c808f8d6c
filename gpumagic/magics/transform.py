"""The `%%ongpu` line as text: turned into a string, and found again in the syntax tree.

The transformation is pure, since IPython runs it to look ahead too.
"""

import ast
import re

from IPython.core.inputtransformer2 import cell_magic, leading_empty_lines

_LINE = re.compile(r"%%ongpu(?!\w|\s*\?)")
# `%ongpu cuda?` would be taken for a question about `cuda`.
_FALLBACK_LINE = re.compile(r"%(?P<magic>ongpu|gpus)\s+(?P<where>\S+\?)\s*$")


def transform(lines: list[str]) -> list[str]:
    """Turn a leading `%%ongpu …` line into a string; leave every other cell as it is."""
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
        return [*lines[:first], f"{line.strip()!r}; {rest[0]}", *rest[1:]]
    return [*lines[:first], f"{line.strip()!r}\n", *rest]


# check_complete leaves such transformers out, and so asks for more lines as after any %%magic.
transform.has_side_effects = True  # type: ignore[attr-defined]


def marker(node: ast.stmt) -> str | None:
    """The text of a `%%ongpu` line that `transform` left in the tree."""
    value = node.value if isinstance(node, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else None
    return text if isinstance(text, str) and _LINE.match(text) else None


def is_timed(body: list[ast.stmt]) -> bool:
    """Whether a cell is a `%%gputime` cell, which says itself where its code runs."""
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "run_cell_magic"
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value == "gputime"
    )


def after_future_imports(body: list[ast.stmt]) -> int:
    """Where a statement may stand that is to come first."""
    return max(
        (
            n + 1
            for n, node in enumerate(body)
            if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ),
        default=0,
    )
