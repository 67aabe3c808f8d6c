"""Read what a `%%ongpu` line asks for, once for each line, and where a standing `%ongpu` applies.

Anything that is no such line is a `UsageError` of one line that says what to type.
"""

from __future__ import annotations

import argparse
import ast
from dataclasses import dataclass
from functools import cache, lru_cache

from IPython.core.error import UsageError

from gpumagic.magics.arguments import LineParser, parse

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
