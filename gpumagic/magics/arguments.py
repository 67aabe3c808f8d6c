"""Parse the lines of the magics, check which options combine, and complete lines on Tab."""

import argparse
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import product
from string import Template
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from IPython import get_ipython
from IPython.core.completer import SimpleCompletion
from IPython.core.error import UsageError

from gpumagic.device import complete, here
from gpumagic.device.cards import CARDS
from gpumagic.device.where import is_where
from gpumagic.errors import meant
from gpumagic.magics.options import (
    MAGICS,
    ONE_DEVICE,
    SEVERAL,
    Option,
    file,
    options,
    reductions,
    variables,
)
from gpumagic.usercode.files import user_namespace

_QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*\""
# Matches the text before an unquoted `--` that has blanks around it.
_BEFORE_CODE = re.compile(rf"""((?:[^\s'"]|{_QUOTED}|\s)*?)(?<!\S)--(?:\s+|$)""")
# Matches quoted text, or a comma, plus or equals sign with the blanks around it.
_BLANKS = re.compile(rf"({_QUOTED})|\s*([,+=])(?:\s+(?!--))?")
_BRACED = re.compile(rf"{_QUOTED}|(?<!\$)\{{([^\W\d]\w*)\}}")  # quoted text, or a name in braces
# Names of GPU models for `--on`. Blanks in these names need no quotes, as in `--on A100 80GB`.
_MODELS = [name for card in CARDS for name in (card.name, card.name.rpartition(" ")[0])]
_CARD = "|".join(sorted(_MODELS, reverse=True))
_ON = re.compile(rf"--on\s+((?:{_CARD})(?:,(?:{_CARD}))*)(?!\S)", re.I)
_NAMES = re.compile(rf"(?:{_QUOTED}|[^\s'\"])+")
_TRACES = (".json", ".json.gz")
_MOST_SHOWN = 8  # maximum words in a usage line; a longer line would hide the error


class _StoreOnce(argparse.Action):
    """Store an option's value; a second value is an error."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, flag: Any = None) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise argparse.ArgumentError(self, "there are two values")
        setattr(namespace, self.dest, values)


class LineParser(argparse.ArgumentParser):
    """Parse a line. For an invalid line, raise a UsageError that ends with what to type."""

    words: Sequence[str] = ()  # the words of the last parsed line

    def error(self, message: str) -> NoReturn:
        if wrong := re.fullmatch(r"argument ([\w-]+)[\w/-]*: (.*)", message):
            self._wrong_value(*wrong.groups())
        magic = self.prog.lstrip("%")
        values = (v for option in options(magic) if option.optional for v in option.examples)
        known = [*MAGICS[magic].verbs, *(option.flag for option in options(magic)), *values]
        question = ""
        if given := re.search(r"(?:arguments: |choice: '?)(.*?)'?(?: \(choose|$)", message):
            message = f"unexpected {given[1]}"
            question = "" if given[1] in known else meant(given[1], known) or self._joined(given[1])
        raise UsageError(f"{self.prog}: {message}; {question.strip() or self.usage}")

    def _wrong_value(self, flag: str, said: str) -> None:
        """Raise a UsageError with valid values for `flag`. Return if `flag` is unknown."""
        if said.startswith("ignored explicit"):
            raise UsageError(f"{self.prog}: {flag} takes no value; type {flag}")
        option = self._option_string_actions.get(flag)
        if option is not None and option.help:
            said = "nothing after it" if said.startswith("expected one") else said
            type_this = f", or {flag} ".join(option.help.split("|")[:2])
            raise UsageError(f"{self.prog}: {flag}: {said}; type {flag} {type_this}")

    def _joined(self, extra: str) -> str:
        """Return advice on surplus words: ``1 0`` may mean 0,1, and ``gpu 1`` may mean gpu:1."""
        first = extra.split()[0]
        pair = self.words[max(self.words.index(first) - 1, 0) :][:2] if first in self.words else []
        joined = next(filter(is_where, (":".join(pair), ",".join(sorted({*pair})))), "")
        if joined and len(pair) > 1:
            return f"did you mean {joined}?"
        is_code = self.prog == "%ongpu" and pair and not first.startswith("-")
        return f"for this code only, type %%ongpu {pair[0]} on a line above it" if is_code else ""


@cache
def parser_of(typed: str) -> LineParser:
    """Return the parser of a magic's line; each option's `help` holds examples of its value."""
    name = typed.lstrip("%")
    magic = MAGICS[name]
    words = [typed, magic.usage, *(f"[{option.usage}]" for option in options(name))]
    more = f"; {typed}? shows the options" if len(words) > _MOST_SHOWN else ""
    words[2:] = ["[options]"] if more else words[2:]
    words += ["-- expression"] * (typed in ("%gputime", "%gpudiff"))
    parser = LineParser(typed, usage=f"type {' '.join(words)}{more}", add_help=False)
    if magic.verbs:
        parser.add_argument("verb", nargs="?", choices=magic.verbs, type=str.lower)
    if magic.number:
        nothing = "" if magic.number == "?" else None
        parser.add_argument(magic.name, nargs=magic.number, default=nothing)
    for option in options(name):
        if option.examples:
            how = {"action": _StoreOnce, "type": option.type, "default": option.default}
            if option.optional:
                how |= {"nargs": "?", "const": ""}
            parser.add_argument(*option.flags, **how, help="|".join(option.examples))
        elif option.flag.startswith("--no-"):
            parser.add_argument(*option.flags, dest=option.flag[5:], action="store_false")
        else:
            parser.add_argument(*option.flags, action="store_true")
    return parser


def parse(magic: str, line: str) -> Namespace:
    """Parse a magic's line; raise UsageError if it does not match the usage."""
    parser = parser_of(magic)
    try:
        if magic.endswith("gpumem"):  # a name may have quotes and blanks, as in data["my net"]
            words = [filled(word) if word[0] == "$" else word for word in _NAMES.findall(line)]
            return parser.parse_args(words)
        line = _BLANKS.sub(lambda found: found[1] or found[2], line)
        words = parser.words = shlex.split(_ON.sub(r"--on '\1'", line), comments=True)
        for option in options(magic.lstrip("%")):
            if option.optional and option.flag in words[:-1]:
                at = words.index(option.flag)
                if words[at + 1] not in option.examples and not words[at + 1].endswith(_TRACES):
                    words.append(words.pop(at))  # `1` in `--check 1` is a device, not a value
        return parser.parse_intermixed_args(words)
    except ValueError as error:
        raise UsageError(f"{magic}: {error} in {line.strip()}; {parser.usage}") from None


def filled(line: str) -> str:
    """Return a line with its variables replaced by their values: `$device`, `cuda:{i}`."""
    known = user_namespace()
    line = _BRACED.sub(lambda found: str(known.get(found[1], found[0])), line)
    return Template(line).safe_substitute(known)


def checked(magic: str, line: str) -> Namespace:
    """Parse a magic's line; raise UsageError if it is invalid or its options conflict."""
    found = parse(magic, line if magic.endswith(("gpumem", "ongpu")) else filled(line))
    for mistake in _mistakes(magic, found):
        raise UsageError(f"{magic}: {mistake}")
    return found


def _mistakes(typed: str, found: Namespace) -> Iterator[str]:
    """Yield an error for each missing option, and for each pair of options that conflict."""
    magic = MAGICS[typed.lstrip("%")]
    known = {option.flag: option for option in options(typed.lstrip("%"))}
    given = [flag for flag, option in known.items() if option.given(found)]
    for flag, needed in magic.needs.items():
        if flag in given and needed not in given:
            # A flag in `alone` allows no arguments, so the two flags are the whole line to type.
            line = f"{typed} " * (flag in magic.alone)
            both = f"{known[needed].example} {known[flag].example}"
            yield f"{flag} needs {needed}; type {line}{both}"
    words = getattr(found, magic.name, "")
    word = words[:1] if isinstance(words, list) else [words] * bool(words)
    for group in (*product(magic.alone, word), *magic.excludes):
        if len(pair := [each for each in group if each in (*given, *word)]) > 1:
            yield f"{pair[0]} and {pair[1]} do not combine; leave out one of them"
    if word and f"--{word[0]}" in known and word[0] not in user_namespace():
        yield f"unexpected {word[0]}; did you mean --{word[0]}?"
    if typed.endswith("ongpu"):
        yield from _device_mistakes(typed, found.where, given)


def _device_mistakes(typed: str, where: str, given: list[str]) -> Iterator[str]:
    several = on_cluster(where) or on_several(where)
    if typed == "%ongpu" and (several or "--dry-run" in given):
        what, how = (where, "--split NAME") if several else ("--dry-run", "--dry-run")
        yield f"{what} works for one cell only; type %%ongpu {where} {how}"
    cure = "one device; leave it out, or type one device"
    if not several:
        instead = f", in place of {where}" if where else ""
        cure = f"several GPUs; type %%ongpu 0,1 --split NAME, or @all{instead}"
    others = ONE_DEVICE if several else SEVERAL
    yield from (f"{flag} is for {cure}" for flag in given if flag in others)
    if on_several(where) and "--split" not in given:
        how = f"type %%ongpu {where} --split NAME, or one device"
        yield f"{where} needs --split, the variables to divide among these GPUs; {how}"


def on_cluster(where: str) -> bool:
    """Whether a `%%ongpu` line names ipyparallel engines: `@all`, `@0,1`, `@1`."""
    return where.startswith("@")


def on_several(where: str) -> bool:
    """Whether a `%%ongpu` line names several devices of this process: `0,1`, `all`."""
    return not on_cluster(where) and ("," in where or where.lower() == "all")


@lru_cache(maxsize=64)
def placing_request(line: str, magic: str = "%%ongpu") -> Namespace:
    """Parse a ``%%ongpu`` or ``%ongpu`` line that `filled` returned; may raise UsageError."""
    asked = checked(magic, line)
    where = asked.where
    asked.standing = magic == "%ongpu"
    asked.elsewhere = asked.dry_run or on_cluster(where) or on_several(where)
    if where.lower() in ("off", "home"):
        raise UsageError(f"{magic}: type %ongpu {where.lower()}, on a line of its own")
    if asked.on is None and not where:
        typed = ", ".join(f"{magic} {where}" for where in ("1", "cuda:1", "cpu", "free"))
        raise UsageError(f"{magic}: which device? type {typed} (%gpus shows what there is)")
    if magic == "%ongpu" and not is_where(where):
        what = meant(where, ("home", "off")).strip() or "type 1, cuda:1, cpu, free, off or home"
        raise UsageError(f"{magic}: unexpected {where}; {what}")
    if twice := {*asked.gather} & dict(asked.reduce).keys():
        raise UsageError(f"{magic}: {min(twice)} is in --gather and in --reduce; type it in one")
    return asked


def timing_request(line: str, cell: str | None, name: str) -> tuple[Namespace, str]:
    """Parse a %gputime or %gpudiff line or cell; return the parsed line and the code to run."""
    if cell is not None:
        return checked(f"%%{name}", line), cell
    if (split := _BEFORE_CODE.match(line)) is None:
        example = f"%{name} cpu 0 -- torch.mm(a, a)"
        below = f"or below a line %%{name}"
        raise UsageError(f"%{name}: no code; put it after --, as in {example}, {below}")
    return checked(f"%{name}", split[1]), line[split.end() :]


_TYPED = re.compile(rf"\s*(%{{1,2}}(?:{'|'.join(MAGICS)}))\s+(.*?)(\S*)$")


def completions(context: Any) -> dict[str, Any]:
    """Complete an argument of gpumagic's magics; return no completions for other lines."""
    match = _TYPED.match(context.text_until_cursor)
    words = match[2].split() if match else []
    if match is None or "--" in words or words[-1:] == ["restore"]:
        return {"completions": []}  # IPython completes paths and Python names itself
    typed, last = match[1], match[3]
    valued = (option for option in options(typed.lstrip("%")) if option.examples)
    option = next((each for each in valued if {*words[-1:]} & {*each.flags}), None)
    if option is not None and option.type is file:
        return {"completions": []}
    fit = _offers(typed, words, option, last)
    # IPython replaces only `context.token`, perhaps only the end of `last`: the "1" of "cuda:1".
    skip = len(last) - len(context.token)
    found = [SimpleCompletion(text=text[skip:], type="device") for text in fit]
    return {"completions": found, "suppress": True}


def _offers(typed: str, words: list[str], option: Option | None, last: str) -> list[str]:
    """Complete `last` with values of `option`; if `option` is None, with options and arguments."""
    before = last[: max(last.rfind(","), last.rfind("+")) + 1]  # the finished items: "x," of "x,y"
    prefix, used = last.removeprefix(before), before.split(",") if before else words
    if option is None:
        flags = [] if before else [each.flag for each in options(typed.lstrip("%"))]
        offers = [*flags, *_arguments(typed, words, before, prefix)]
    else:
        offers = _values(option, prefix)
    fit = (each for each in offers if each.lower().startswith(prefix.lower()))
    return [before + each for each in fit if each not in used]


def _values(option: Option, prefix: str) -> list[str]:
    if option.type is reductions and "=" in prefix:
        from gpumagic.cluster.scattered import HOW

        return [f"{prefix.partition('=')[0]}={how}" for how in HOW]
    if option.type in (variables, reductions):
        return _variables(prefix)
    if option.flag == "--on":
        return [*option.examples, *(each.name.replace(" ", "-") for each in CARDS)]
    return [example for example in option.examples if " " not in example]


def _arguments(typed: str, words: list[str], before: str, prefix: str) -> list[str]:
    magic = MAGICS[typed.lstrip("%")]
    if magic.verbs or (magic.number == "?" and any(not word.startswith("-") for word in words)):
        return [*magic.verbs] if not words else []
    found = ["home", "off"] * (typed == "%ongpu")
    if typed == "%%ongpu" and not before:
        found += ["0,1", "all"] * (len(here(memory=False)) > 1)
        found += ["@all"] * (find_spec("ipyparallel") is not None)
    found += ["float32", "float64", "float16", "bfloat16"] * ("dtypes" in magic.completes)
    if "variables" in magic.completes:
        found += _variables(prefix)
    if {"devices", "gpus"} & {*magic.completes}:
        # Magics that show GPUs take no CPU. "all" is the default, or for `%%ongpu` was added above.
        left_out = ("all", "cpu") if "gpus" in magic.completes else ("all",)
        found += [name for name in complete(prefix) if name not in left_out]
    return found


def _variables(prefix: str) -> list[str]:
    shell = get_ipython()
    named = {n: v for n, v in shell.user_ns.items() if n not in shell.user_ns_hidden}
    holding = (n for n, v in named.items() if not isinstance(v, (ModuleType, FunctionType, type)))
    return sorted(n for n in holding if n.startswith(prefix) and not n.startswith("_"))
