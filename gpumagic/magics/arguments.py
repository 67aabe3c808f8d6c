"""Parse the lines of the magics, and complete them at Tab.

Parsers and completions are made from the table in options.py. Bad input is an error of one line.
"""

import argparse
import re
import shlex
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from string import Template
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from IPython import get_ipython
from IPython.core.completer import SimpleCompletion
from IPython.core.error import UsageError

from gpumagic.device import cuda_state
from gpumagic.errors import GpuError, meant
from gpumagic.magics.options import MAGICS, file, options, reductions, variables
from gpumagic.usercode.files import last_cell, user_namespace

_QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*\""
# The text before an unquoted -- between blanks.
_BEFORE_CODE = re.compile(rf"""((?:[^\s'"]+|{_QUOTED}|\s+)*?)(?<!\S)--(?:\s+|$)""")
# Blanks around an unquoted comma, plus or equals sign.
_BLANKS = re.compile(rf"({_QUOTED})|\s*([,+=])(?:\s+(?!--))?")
_NAMES = re.compile(rf"(?:{_QUOTED}|[^\s'\"])+")


@contextmanager
def in_one_line(magic: str) -> Iterator[None]:
    """Turn bad input within into an error of one line that begins with the magic's name.

    The same for an error of CUDA, unless the user's code raised it. IPython keeps the last error,
    so its frames are cleared.
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
    """Whether the user's code is in the traceback of an error, which is then shown."""
    from gpumagic.usercode.files import innermost_of
    from gpumagic.usercode.frames import errors

    chain = () if isinstance(error, GpuError) else errors(error)
    return any(innermost_of(each.__traceback__) is not None for each in chain)


def said(magic: str, error: BaseException) -> str:
    """Return an error's message after the magic's name; empty for an unknown kind of error."""
    text = of_cuda(error) or (str(error) if isinstance(error, GpuError) else "")
    return text if not text or text.startswith(f"{magic} ") else f"{magic}: {text}"


def of_cuda(error: BaseException) -> str:
    """Return what to do about an error of CUDA, or one that it caused; empty for any other."""
    from gpumagic.usercode.files import innermost_of
    from gpumagic.usercode.frames import errors

    chain = [*errors(error)]
    if "torch" not in sys.modules:
        return next(filter(None, map(cuda_state.advice, chain)), "")
    line = innermost_of(chain[-1].__traceback__)
    cuda_state.look(f"{line.label}, line {line.line}" if line else last_cell(), chain[-1])
    if (death := cuda_state.death()) is not None and any(map(cuda_state.is_death, chain)):
        from gpumagic.memory.save_host import what_is_left

        return what_is_left(death)
    return next(filter(None, map(cuda_state.advice, chain)), "")


class _StoreOnce(argparse.Action):
    """Store an option's value; a second value is an error."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, flag: Any = None) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise argparse.ArgumentError(self, "there are two values")
        setattr(namespace, self.dest, values)


class LineParser(argparse.ArgumentParser):
    """An argparse parser whose error is one line that ends with what to type."""

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"argument ([\w-]+)[\w/-]*: (.*)", message)
        option = self._option_string_actions.get(wrong[1]) if wrong else None
        if wrong and option and option.help:  # for a wrong value, show only the right ones
            said = "nothing after it" if wrong[2].startswith("expected one") else wrong[2]
            type_this = f", or {wrong[1]} ".join(option.help.split("|")[:2])
            raise UsageError(f"{self.prog}: {wrong[1]}: {said}; type {wrong[1]} {type_this}")
        magic = self.prog.lstrip("%")
        known = [*MAGICS[magic].verbs, *(option.flag for option in options(magic))]
        question = ""
        if given := re.search(r"(?:arguments: |choice: '?)(.*?)'?(?: \(choose|$)", message):
            question, message = meant(given[1], known), f"unexpected {given[1]}"
        raise UsageError(f"{self.prog}: {message}; {question}{self.usage}")


@cache
def parser_of(typed: str) -> LineParser:
    """Return the parser of a magic's line; the help of an option is examples of its value."""
    name = typed.lstrip("%")
    magic = MAGICS[name]
    words = [typed, magic.usage, *(f"[{option.usage}]" for option in options(name))]
    words += ["-- expression"] * (typed == "%gputime")
    parser = LineParser(typed, usage=f"type {' '.join(words)}", add_help=False)
    if magic.verbs:
        parser.add_argument("verb", nargs="?", choices=magic.verbs, type=str.lower)
    if magic.number:
        parser.add_argument(magic.name, nargs=magic.number, type=magic.type)
    for option in options(name):
        if option.examples:
            how = {"action": _StoreOnce, "type": option.type, "default": option.default}
            if option.optional:
                how |= {"nargs": "?", "const": option.bare}
            if option.optional and option.type is str:
                how |= {"choices": ("", *option.examples)}
            parser.add_argument(*option.flags, **how, help="|".join(option.examples))
        elif option.flag.startswith("--no-"):
            parser.add_argument(*option.flags, dest=option.flag[5:], action="store_false")
        else:
            parser.add_argument(*option.flags, action="store_true")
    return parser


def parse(magic: str, line: str) -> Namespace:
    """Parse a magic's line; raises UsageError for what is not in its usage."""
    parser = parser_of(magic)
    try:
        if magic.endswith("gpumem"):  # quotes and blanks may be in a name: data["my net"]
            return parser.parse_args(_NAMES.findall(line))
        line = Template(line).safe_substitute(user_namespace())  # `%%ongpu $device`
        line = _BLANKS.sub(lambda found: found[1] or found[2], line)
        # Options may stand between the words. "/gpu:1" and "0,1" are plain words to shlex.
        words = shlex.split(line, comments=True)
        for option in options(magic.lstrip("%")):
            if option.optional and option.flag in words[:-1]:
                at = words.index(option.flag)
                file = option.type is not str and "." in words[at + 1]
                if not file and words[at + 1] not in option.examples:
                    words.append(words.pop(at))  # `--check 1`: 1 is no value of it
        return parser.parse_intermixed_args(words)
    except ValueError as error:
        raise UsageError(f"{magic}: {error} in {line.strip()}; {parser.usage}") from None


def timing_request(line: str, cell: str | None) -> tuple[Namespace, str]:
    """Parse a line of ``%gputime`` or ``%%gputime``; return it and the code to time."""
    if cell is not None:
        return parse("%%gputime", line), cell
    split = _BEFORE_CODE.match(line)
    if split is None:
        raise UsageError(
            "%gputime: no code; put it after --, as in %gputime cpu 0 -- torch.mm(a, a),"
            " or below a line %%gputime"
        )
    return parse("%gputime", split[1]), line[split.end() :]


_TYPED = re.compile(rf"\s*(%{{1,2}}(?:{'|'.join(MAGICS)}))\s+(.*?)(\S*)$")


def completions(context: Any) -> dict[str, Any]:
    """Complete the argument of one of our magics; leave every other line alone."""
    match = _TYPED.match(context.text_until_cursor)
    if match is None:
        return {"completions": []}
    typed, words, last = match[1], match[2].split(), match[3]
    magic = typed.lstrip("%")
    option = next(
        (o for o in options(magic) if words and o.examples and words[-1] in o.flags), None
    )
    is_path = option.type is file if option else words[-1:] == ["restore"]
    if is_path or (magic == "gputime" and "--" in words):
        return {"completions": []}  # IPython completes paths and Python
    if option is None:
        offers = [o.flag for o in options(magic) if o.flag not in words]
        offers += _arguments(typed, words, last)
    elif option.type in (variables, reductions):
        # Several, separated by commas.
        others, comma, one = last.rpartition(",")
        names = (name for name in _variables(one) if name not in others.split(","))
        offers = [f"{others}{comma}{name}" for name in names]
    else:
        offers = [example for example in option.examples if " " not in example]
    # The completer's token may begin within our word: "--no" of "--no-move", "1" of "cuda:1".
    skip = len(last) - len(context.token)
    fit = (offer for offer in offers if offer.startswith(last))
    return {
        "completions": [SimpleCompletion(text=offer[skip:], type="device") for offer in fit],
        "suppress": True,
    }


def _arguments(typed: str, words: list[str], last: str) -> list[str]:
    """Return what may stand here besides an option."""
    magic = typed.lstrip("%")
    if verbs := MAGICS[magic].verbs:
        return [] if words else [*verbs]
    if magic == "gpufree":
        return [name for name in _variables(last) if name not in words]
    if magic == "gpumem":
        return [*(name for name in _devices(last) if name != "cpu"), *_variables(last)]
    if magic == "gputime":  # several, also several at the same time: "0+1"
        others, plus, one = last.rpartition("+")
        found = [f"{others}{plus}{name}" for name in _devices(one)]
        return [each for each in found if each not in words]
    if any(not word.startswith("-") for word in words):
        return []
    return [*_devices(last), *["home", "off"] * (typed == "%ongpu")]


def _devices(prefix: str) -> list[str]:
    from gpumagic.device import complete, here

    # A cell runs on one device, and a table is of all unless one is named.
    offers = complete(prefix, here(memory=False))
    return [offer for offer in offers if offer != "all" and "," not in offer]


def _variables(prefix: str) -> list[str]:
    """Return the user's variables, without modules, functions and classes."""
    shell = get_ipython()
    named = {n: v for n, v in shell.user_ns.items() if n not in shell.user_ns_hidden}
    holding = (n for n, v in named.items() if not isinstance(v, (ModuleType, FunctionType, type)))
    return sorted(n for n in holding if n.startswith(prefix) and not n.startswith("_"))
