"""Parse the lines of the magics; what may not stand in them is an error of one line."""

from __future__ import annotations

import argparse
import keyword
import math
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from IPython.core.error import UsageError

from gpumagic.errors import GpuError

if TYPE_CHECKING:
    from gpumagic.magics.gputime import TimingRequest

# Up to a -- that stands alone and in no quotes.
_BEFORE_CODE = re.compile(r"""((?:[^\s'"]+|'[^']*'|"(?:\\.|[^"\\])*"|\s+)*?)(?<!\S)--(?:\s+|$)""")


# After these of `%%gputime` stands a value, which is taken as it is.
_TAKES_A_VALUE = {"--setup", "--items", "--max-time", "-o", "--output", "--against"}


class LineParser(argparse.ArgumentParser):
    """argparse, whose error is one line that ends with what to type."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; {self.format_usage().strip()}")


@contextmanager
def in_one_line(magic: str) -> Iterator[None]:
    """Let bad input within be an error of one line that begins with the magic's name."""
    try:
        yield
    except GpuError as error:
        raise UsageError(f"{magic}: {error}") from None


def gpuwatch_parser() -> LineParser:
    """Of ``%gpuwatch``."""
    usage = "type %%gpuwatch on [--report] [--strict], or %%gpuwatch off"
    parser = LineParser("%gpuwatch", usage=usage, add_help=False)
    parser.add_argument("what", nargs="?", choices=("on", "off"), type=str.lower)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--strict", action="store_true")
    return parser


def gputime_parser(magic: str) -> LineParser:
    """Of ``%gputime`` and ``%%gputime``."""
    options = "[--sweep n=64,256] [--setup CODE] [--items N] [--max-time S] [--in-place]"
    options += " [-o NAME] [--against last|NAME|FILE] [--quiet]"
    code = " -- expression" if magic == "%gputime" else ""
    usage = f"type {magic} WHERE WHERE {options}{code}".replace("%", "%%")
    parser = _TimingParser(magic, usage=usage, add_help=False)
    parser.add_argument("where", nargs="*")
    parser.add_argument("--sweep", action="append", default=[], metavar="n=64,256")
    parser.add_argument("--setup", default="", metavar="CODE")
    parser.add_argument("--items", type=_items, metavar="N")
    parser.add_argument("--max-time", type=_above_zero, default=5.0, metavar="S")
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("-o", "--output", type=_name, metavar="NAME")
    parser.add_argument("--against", metavar="last|NAME|FILE")
    parser.add_argument("--quiet", "-q", action="store_true")
    return parser


class _TimingParser(LineParser):
    """Its usage is long, and told where it helps: of a wrong value, a right one is enough."""

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"argument (?:-o/)?(--[\w-]+): (.*)", message)
        if wrong is not None:
            option = "-o" if wrong[1] == "--output" else wrong[1]
            said = "nothing after it" if wrong[2].startswith("expected one") else wrong[2]
            raise UsageError(f"{self.prog}: {option}: {said}; type {option} {_RIGHT[option]}")
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            options = "--sweep --setup --items --max-time --in-place -o --against --quiet"
            raise UsageError(
                f"{self.prog}: {unknown} is no option; there are {options}; {self.prog}? tells more"
            )
        super().error(message)


# An example for each option of `%%gputime` that takes a value.
_RIGHT = {
    "--sweep": "n=64,256,1024",
    "--setup": "'x = torch.randn(64)'",
    "--items": "1000, or --items 'len(x)'",
    "--max-time": "5",
    "-o": "result",
    "--against": "last",
}


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _items(text: str) -> float | str:
    try:
        float(text)
    except ValueError:
        try:
            compile(text.strip(), "<--items>", "eval")
        except (SyntaxError, ValueError):
            raise argparse.ArgumentTypeError(f"{text} is no number and no expression") from None
        return text.strip()
    return _above_zero(text)


def _joined(words: list[str]) -> list[str]:
    """`n=1, 2`, `0 + 1` and `cpu, 0` as the one word each that they are meant to be."""
    made: list[str] = []
    for n, word in enumerate(words):
        values = {words[n - back] for back in (1, 2) if n >= back} & _TAKES_A_VALUE
        last = made[-1] if made and not values else ""
        joins = last[-1:] in (*",+=",) or word[0] in ",+=" if last and word else False
        if joins and not last.startswith("-") and not word.startswith("--"):
            made[-1] += word
        else:
            made.append(word)
    return made


def _name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text} cannot be the name of a variable")
    return text


def gpus_parser() -> LineParser:
    """Of ``%gpus``."""
    parser = LineParser(
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


def parse(parser: argparse.ArgumentParser, line: str) -> argparse.Namespace:
    """A magic's line; raises UsageError for what is not in its usage."""
    try:
        # "/gpu:1" and "0,1" are plain words to shlex; a quoted word loses its quotes.
        words = shlex.split(line, comments=True)
        if isinstance(parser, _TimingParser):
            words = _joined(words)
        # Options may stand between devices.
        mixed = any(action.nargs == "*" for action in parser._actions)
        return parser.parse_intermixed_args(words) if mixed else parser.parse_args(words)
    except ValueError as error:
        usage = parser.format_usage().strip()
        raise UsageError(f"{parser.prog}: {error} in {line.strip()}; {usage}") from None


def timing_request(line: str, cell: str | None) -> tuple[TimingRequest, str]:
    """What a line of ``%gputime`` or ``%%gputime`` asks for, and the code; raises UsageError."""
    magic = "%gputime" if cell is None else "%%gputime"
    if cell is None:
        split = _BEFORE_CODE.match(line)
        if split is None:
            raise UsageError(
                "%gputime: no code; put it after --, as in %gputime cpu 0 -- torch.mm(a, a),"
                " or below a line %%gputime"
            )
        line, cell = split[1], line[split.end() :]
    args = vars(parse(gputime_parser(magic), line))
    from gpumagic.magics.gputime import TimingRequest

    request = TimingRequest(**args | {"where": tuple(args["where"]), "sweep": tuple(args["sweep"])})
    return request, cell
