"""Parse the lines of the magics; what may not stand in them is an error of one line."""

import argparse
import inspect
import keyword
import math
import re
import shlex
import sys
import traceback
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NoReturn

from IPython.core.error import UsageError

from gpumagic.device import cuda_state
from gpumagic.errors import GpuError, meant
from gpumagic.usercode.files import last_cell

_QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*\""
# Up to a -- that stands alone and in no quotes.
_BEFORE_CODE = re.compile(rf"""((?:[^\s'"]+|{_QUOTED}|\s+)*?)(?<!\S)--(?:\s+|$)""")
# Blanks beside a comma, a plus or an equals sign that is in no quotes.
_BLANKS = re.compile(rf"({_QUOTED})|\s*([,+=])(?:\s+(?!--))?")

_NAMES = re.compile(rf"(?:{_QUOTED}|[^\s'\"])+")


@contextmanager
def in_one_line(magic: str) -> Iterator[None]:
    """Let bad input within be an error of one line that begins with the magic's name.

    So is an error of CUDA's that the user's code has not raised. IPython keeps that error until
    the next one: it leads to nothing of the user's.
    """
    try:
        yield
    except (GpuError, RuntimeError) as error:
        if _is_users(error) or not (text := said(magic, error)):
            raise
        traceback.clear_frames(error.__traceback__)
        error.__cause__ = error.__context__ = error.__traceback__ = None
        raise UsageError(text) from None


def _is_users(error: BaseException) -> bool:
    """Whether an error has passed code of the user's, whose traceback is shown."""
    from gpumagic.usercode.frames import errors
    from gpumagic.usercode.lines import innermost_of

    chain = () if isinstance(error, GpuError) else errors(error)
    return any(innermost_of(each.__traceback__) is not None for each in chain)


def said(magic: str, error: BaseException) -> str:
    """What an error says, with the magic's name before it; nothing of one that is not known."""
    text = of_cuda(error) or (str(error) if isinstance(error, GpuError) else "")
    return text if not text or text.startswith(f"{magic} ") else f"{magic}: {text}"


def of_cuda(error: BaseException) -> str:
    """What to say of the error of CUDA's that one is, or was raised from; or nothing."""
    if "torch" not in sys.modules:
        return ""
    from gpumagic.usercode.frames import errors
    from gpumagic.usercode.lines import innermost_of

    chain = [*errors(error)]
    line = innermost_of(chain[-1].__traceback__)
    cuda_state.look(f"{line.label}, line {line.line}" if line else last_cell(), chain[-1])
    if (death := cuda_state.death()) is not None and any(map(cuda_state.is_death, chain)):
        from gpumagic.memory.rescue import told

        return told(death)
    return next(filter(None, map(cuda_state.advice, chain)), "")


def answers_help(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Let a line of `-h`, `--help` or `help` alone print what `%magic?` shows."""

    @wraps(magic)
    def answer(self: Any, line: str, *cell: Any, **scope: Any) -> Any:
        if line.strip() not in ("-h", "--help", "help"):
            return magic(self, line, *cell, **scope)
        return print(inspect.getdoc(magic))

    return answer


class LineParser(argparse.ArgumentParser):
    """argparse, whose error is one line that ends with what to type."""

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"argument ([\w-]+)[\w/-]*: (.*)", message)
        option = self._option_string_actions.get(wrong[1]) if wrong else None
        if wrong and option and option.help:  # of a wrong value, a right one is enough
            said = "nothing after it" if wrong[2].startswith("expected one") else wrong[2]
            raise UsageError(f"{self.prog}: {wrong[1]}: {said}; type {wrong[1]} {option.help}")
        known = [*self.options(), *(c for action in self._actions for c in action.choices or ())]
        given = re.search(r"(?:arguments|choice): (.*?)(?: \(choose|$)", message)
        question = meant(given[1], known) if given else ""
        raise UsageError(f"{self.prog}: {message}; {question}{self.right()}")

    def right(self) -> str:
        """What to type."""
        return f"{self.usage}" % {"prog": self.prog}

    def takes_a_value(self, word: str) -> bool:
        """Whether it is an option after which a value stands."""
        option = self._option_string_actions.get(word)
        return option is not None and option.nargs is None

    def options(self) -> list[str]:
        """The options that users are to know."""
        known = (a for a in self._actions if a.option_strings and a.help != argparse.SUPPRESS)
        return [action.option_strings[-1] for action in known]


@cache
def parser_of(magic: str) -> LineParser:
    """The parser of a magic's line; the help of an option that takes a value is an example."""
    name = magic.lstrip("%")
    usage = f"type %(prog)s {_USAGES[name]}{' -- expression' * (magic == '%gputime')}"
    parser = LineParser(magic, usage=usage, add_help=False)
    add = parser.add_argument
    if name == "gpuwatch":
        add("what", nargs="?", choices=("on", "off"), type=str.lower)
    elif name == "gpumem":
        add("what", nargs="*")
        add("--record", choices=("on", "off"), type=str.lower, help="on, or --record off")
    elif name == "gpucluster":
        add("verb", nargs="?", choices=CLUSTER_VERBS, type=str.lower, default="status")
        add("what", nargs="*")
        add("--slurm", help="2x8")
        add("--partition", help="gpu")
        add("--ssh", help="host1,host2:4")
        add("--mpi", help="4")
        add("--ip", help="10.0.0.1")
        add("--python", help="/opt/env/bin/python")
        add("--to", help="runs/cats")
        add("--every", help="10min")
    elif name == "gpufree":
        add("names", nargs="*", type=_name)
    else:
        add("where", nargs="*" if name in ("gputime", "gpufit") else "?")
    if name == "gputime":
        add("--sweep", action="append", default=[], help="n=64,256,1024")
        add("--setup", default="", help="'x = torch.randn(64)'")
        add("--items", type=_items, help="1000, or --items 'len(x)'")
        add("--max-time", type=_above_zero, default=5.0, help="5")
        add("-o", "--output", type=_name, help="result")
        add("--against", help="last")
    elif name == "gpufit":
        add("--margin", type=_percent, default=0.05, help="5, in percent")
        add("--target", type=_count, help="4096")
        add("--on", help="'H100 80GB', or --on 24GiB")
        add("-o", "--output", type=_name, help="result")
    elif name == "gpus":
        add("--virtual", help="2, or --virtual off")
        add("--memory", help="16GiB")
        add("--force", action="store_true", help=argparse.SUPPRESS)
    elif name == "ongpu":
        add("--no-move", dest="move", action="store_false")
        add("--on", help="'H100 80GB', or --on 24GiB")
        add("--save", help="peak.pickle")
        add("--split", type=_names, default=(), help="prompts, or --split x,y")
        add("--gather", type=_names, default=(), help="images")
        add("--reduce", type=_reductions, default=(), help="loss=mean,acc=max")
        add("--chunk", type=_count, help="4")
    for option in _FLAGS[name]:
        add(*option.split(), action="store_true")
    return parser


CLUSTER_VERBS = (
    *("start", "status", "restart", "stop"),
    *("pull", "push", "checkpoint", "restore"),
)
_USAGES = {
    "gpucluster": "start [N or 0,1] [--slurm 2x8 [--partition P]] [--ssh host1,host2:4"
    " [--python PATH]] [--mpi N] [--ip ADDRESS],"
    " or %(prog)s status, restart 1, pull NAME, push NAME, stop,"
    " checkpoint NAMES --to DIR [--every 10min], restore DIR",
    "gpus": "[WHERE] [--processes] [--live] [--doctor] [--virtual N|off [--memory 16GiB]]",
    "gpumem": "[WHERE or NAME], or %(prog)s --since, or %(prog)s --record on|off",
    "gpuwatch": "on [--report] [--strict], or %(prog)s off",
    "gpufree": "[NAME …] [--grads]",
    "ongpu": "WHERE [--back] [--no-move] [--quiet] [--dry-run] [--report] [--strict] [--fix]"
    " [--memory [--save FILE]], or --dry-run --on CARD in its place, or 0,1 --split NAMES"
    " [--chunk N] [--gather NAMES] [--reduce NAME=mean]",
    "gpufit": "[WHERE] batch=1..4096 [--margin 5] [--target 4096] [--dry] [--on CARD] [-o NAME]"
    " [--quiet]",
    "gputime": "WHERE WHERE [--sweep n=64,256] [--setup CODE] [--items N] [--max-time S]"
    " [--in-place] [-o NAME] [--against last|NAME|FILE] [--quiet]",
}
_FLAGS = {
    "gpucluster": (),
    "gpus": ("-p --processes", "--live", "--doctor"),
    "gpumem": ("--since",),
    "gpuwatch": ("--report", "--strict"),
    "gpufree": ("--grads",),
    "ongpu": ("-q --quiet", "--dry-run", "--report", "--strict", "--fix", "--back", "--memory"),
    "gpufit": ("--dry", "-q --quiet"),
    "gputime": ("--in-place", "-q --quiet"),
}


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _percent(text: str) -> float:
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0 <= number < 100:
        raise ArgumentTypeError(f"{text} is not a number from 0 to 100")
    return number / 100


def _count(text: str) -> int:
    digits = text.replace("_", "")
    if not digits.isdecimal() or not int(digits):
        raise ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(digits)


def _items(text: str) -> float | str:
    try:
        float(text)
    except ValueError:
        try:
            compile(text.strip(), "<--items>", "eval")
        except (SyntaxError, ValueError):
            raise ArgumentTypeError(f"{text} is no number and no expression") from None
        return text.strip()
    return _above_zero(text)


def _name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ArgumentTypeError(f"{text} cannot be the name of a variable")
    return text


def _names(text: str) -> tuple[str, ...]:
    found = tuple(map(_name, text.split(",")))
    if twice := [name for name in found if found.count(name) > 1]:
        raise ArgumentTypeError(f"{twice[0]} stands twice")
    return found


def _reductions(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.partition("=") for part in text.split(",")]
    if missing := [name for name, _, how in pairs if not how]:
        raise ArgumentTypeError(f"how to reduce {missing[0]} is missing")
    names = _names(",".join(name for name, _, _ in pairs))
    return tuple(zip(names, (how for _, _, how in pairs), strict=True))


def parse(magic: str, line: str) -> Namespace:
    """A magic's line; raises UsageError for what is not in its usage."""
    parser = parser_of(magic)
    try:
        # "/gpu:1" and "0,1" are plain words to shlex; a quoted word loses its quotes.
        if magic.endswith("gpumem"):  # quotes and blanks may stand in a name: data["my net"]
            return parser.parse_args(_NAMES.findall(line))
        if magic.endswith(("gputime", "gpufit", "ongpu")):
            line = _BLANKS.sub(lambda found: found[1] or found[2], line)
        if magic.endswith(("gputime", "gpufit")):  # options may stand between its devices
            return parser.parse_intermixed_args(shlex.split(line, comments=True))
        return parser.parse_args(shlex.split(line, comments=True))
    except ValueError as error:
        raise UsageError(f"{magic}: {error} in {line.strip()}; {parser.right()}") from None


def timing_request(line: str, cell: str | None) -> tuple[Namespace, str]:
    """What a line of ``%gputime`` or ``%%gputime`` asks for, and the code; raises UsageError."""
    if cell is not None:
        return parse("%%gputime", line), cell
    split = _BEFORE_CODE.match(line)
    if split is None:
        raise UsageError(
            "%gputime: no code; put it after --, as in %gputime cpu 0 -- torch.mm(a, a),"
            " or below a line %%gputime"
        )
    return parse("%gputime", split[1]), line[split.end() :]
