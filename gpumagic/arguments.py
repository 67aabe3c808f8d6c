"""The magics' lines: what may stand in them, and one line for what may not."""

import argparse
import shlex
from typing import NoReturn

from IPython.core.error import UsageError

from gpumagic.cells import Request


class _Parser(argparse.ArgumentParser):
    """argparse, whose error is one line that ends with what to type."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; {self.format_usage().strip()}")


def ongpu_parser(magic: str) -> _Parser:
    """Of ``%ongpu`` and ``%%ongpu``."""
    options = "[--no-move] [--quiet] [--report] [--strict] [--fix] [--dry-run]"
    usage = f"type {magic} WHERE {options}".replace("%", "%%")
    parser = _Parser(magic, usage=usage, add_help=False)
    parser.add_argument("where", nargs="?")
    parser.add_argument("--no-move", action="store_true")
    parser.add_argument("--quiet", "-q", action="store_true")
    for option in ("--dry-run", "--report", "--strict", "--fix"):
        parser.add_argument(option, action="store_true")
    return parser


def gpuwatch_parser() -> _Parser:
    """Of ``%gpuwatch``."""
    usage = "type %%gpuwatch on [--report] [--strict], or %%gpuwatch off"
    parser = _Parser("%gpuwatch", usage=usage, add_help=False)
    parser.add_argument("what", nargs="?", choices=("on", "off"), type=str.lower)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--strict", action="store_true")
    return parser


def gpus_parser() -> _Parser:
    """Of ``%gpus``."""
    parser = _Parser(
        "%gpus",
        usage="type %%gpus [WHERE] [--processes] [--live] [--doctor] "
        "[--virtual N|off [--memory 16GiB]]",
        add_help=False,
    )
    parser.add_argument("where", nargs="?")
    parser.add_argument("--processes", "-p", action="store_true")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--doctor", action="store_true")
    parser.add_argument("--virtual", metavar="N|off")
    parser.add_argument("--memory")
    parser.add_argument("--force", action="store_true")
    return parser


def parse(parser: _Parser, line: str) -> argparse.Namespace:
    """A magic's line; raises UsageError for what is not in its usage."""
    try:
        # "/gpu:1" and "0,1" are plain words to shlex; a quoted word loses its quotes.
        return parser.parse_args(shlex.split(line, comments=True))
    except ValueError as error:
        usage = parser.format_usage().strip()
        raise UsageError(f"{parser.prog}: {error} in {line.strip()}; {usage}") from None


def request(line: str, magic: str = "%%ongpu") -> Request:
    """What a line of ``%%ongpu`` or ``%ongpu`` asks for; raises UsageError."""
    args = parse(ongpu_parser(magic), line)
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
