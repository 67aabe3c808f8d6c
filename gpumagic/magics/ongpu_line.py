"""Read the `%%ongpu` line of a cell: as text, in the syntax tree, and what it asks for.

Everything here is pure, since IPython transforms a cell to look ahead too; a line is parsed once.
"""

from __future__ import annotations

import argparse
import ast
import re
from dataclasses import dataclass
from functools import cache, lru_cache

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import cell_magic, leading_empty_lines

from gpumagic.magics.arguments import LineParser, parse

_LINE = re.compile(r"%%ongpu(?!\w|\s*\?)")
# `%ongpu cuda?` would be taken for a question about `cuda`.
_FALLBACK_LINE = re.compile(r"%(?P<magic>ongpu|gpus)\s+(?P<where>\S+\?)\s*$")
OPTIONS = ("--no-move", "--quiet", "--dry-run", "--report", "--strict", "--fix")


@dataclass(frozen=True)
class Request:
    """What a `%%ongpu` line, or a standing `%ongpu`, asks for."""

    where: str
    move: bool = True
    quiet: bool = False
    standing: bool = False
    dry_run: bool = False
    report: bool = False
    strict: bool = False
    fix: bool = False


# -- as text
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


# -- in the syntax tree
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
    future = (isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in body)
    return max((n + 1 for n, is_future in enumerate(future) if is_future), default=0)


# -- what it asks for
@cache
def _parser(magic: str) -> argparse.ArgumentParser:
    usage = f"type {magic} WHERE {' '.join(f'[{option}]' for option in OPTIONS)}"
    parser = LineParser(magic, usage=usage.replace("%", "%%"), add_help=False)
    parser.add_argument("where", nargs="?")
    parser.add_argument("-q", "--quiet", action="store_true")
    for option in OPTIONS:
        if option != "--quiet":
            parser.add_argument(option, action="store_true")
    return parser


@lru_cache(maxsize=64)
def request(line: str, magic: str = "%%ongpu") -> Request:
    """What stands after ``%%ongpu`` or ``%ongpu``; raises UsageError."""
    args = parse(_parser(magic), line)
    if not args.where:
        raise UsageError(
            f"{magic}: which device? type one after it: {magic} 1, {magic} cuda:1, {magic} cpu, "
            f"{magic} free (%gpus shows what there is)"
        )
    if args.where.lower() == "off":
        raise UsageError(f"{magic}: type %ongpu off, on a line of its own, to end %ongpu")
    if args.dry_run and magic == "%ongpu":
        raise UsageError(f"%ongpu: --dry-run is for one cell: %%ongpu {args.where} --dry-run")
    about = [f"--{name}" for name in ("report", "strict", "fix", "quiet") if getattr(args, name)]
    if args.dry_run and about:
        raise UsageError(
            f"{magic}: --dry-run runs nothing that {about[0]} could be about; leave out one of them"
        )
    if args.quiet and args.report:
        raise UsageError(f"{magic}: --report shows what --quiet hides; leave out one of them")
    return Request(
        args.where,
        move=not args.no_move,
        quiet=args.quiet,
        dry_run=args.dry_run,
        report=args.report,
        strict=args.strict,
        fix=args.fix,
    )
