"""Define the arguments and options of the magics, and which options conflict.

The parser, `%magic?`, Tab completion and the table in docs/magics.md use `MAGICS` and `OPTIONS`.
"""

import keyword
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple


class Magic(NamedTuple):
    """Define the arguments of a magic, and which of its options conflict."""

    usage: str
    name: str = "where"  # attribute of the parsed line that holds the arguments
    number: str = "?"  # argparse's `nargs` for the arguments; empty if there are none
    verbs: tuple[str, ...] = ()  # possible first words
    completes: tuple[str, ...] = ("devices",)  # kinds that Tab offers: "gpus", "variables", …
    needs: Mapping[str, str] = {}  # maps an option to another option that it needs
    excludes: tuple[tuple[str, ...], ...] = ()  # a line may have at most one option of each group
    alone: tuple[str, ...] = ()  # options not allowed together with arguments


class Option(NamedTuple):
    """Define an option. `magics` has the names of its magics, separated by spaces."""

    magics: str
    typed: str  # flags, then examples of the value: "-o --output result", "--on h100|l4"
    does: str
    type: Callable[[str], Any] = str
    default: Any = None

    @property
    def flags(self) -> list[str]:
        """The spellings of the option, the long one last: ``-o`` and ``--output``."""
        return [word for word in self.typed.split() if word.startswith("-")]

    @property
    def flag(self) -> str:
        return self.flags[-1]

    @property
    def examples(self) -> list[str]:
        """Examples of the option's value; empty if the option takes no value."""
        value = self.typed.partition(self.flag)[2].strip(" []")
        return value.split("|") if value else []

    @property
    def optional(self) -> bool:
        """Whether the value may be left out, as in ``--check [nan]``."""
        return self.typed.endswith("]")

    @property
    def usage(self) -> str:
        """The option with at most two examples: ``--virtual 2|off``."""
        value = "|".join(self.examples[:2])
        return f"{self.flag} [{value}]" if self.optional else f"{self.flag} {value}".rstrip()

    @property
    def example(self) -> str:
        """The option with its first example, if any: ``--virtual 2``."""
        return " ".join([self.flag, *self.examples[:1]])

    def given(self, parsed: Any) -> bool:
        """Whether a parsed line sets the option to a value other than the default."""
        if self.flag.startswith("--no-"):
            return not getattr(parsed, self.flag[5:])
        value = getattr(parsed, self.flag[2:].replace("-", "_"))
        return bool(value != self.default if self.examples else value)


def _number(text: str, fits: Callable[[float], bool], what: str) -> float:
    with suppress(ValueError):
        if fits(number := float(text)):
            return number
    raise ArgumentTypeError(f"{text} is not a number {what}")


def _seconds(text: str) -> float:
    return _number(text, lambda number: 0 < number < math.inf, "above 0")


def _percent(text: str) -> float:
    return _number(text.removesuffix("%"), lambda n: 0 <= n < 100, "from 0 to below 100") / 100


def _count(text: str) -> int:
    digits = text.replace("_", "")
    if not digits.isdecimal() or not int(digits):
        raise ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(digits)


def _switch(text: str) -> str:
    if text.lower() not in ("on", "off"):
        raise ArgumentTypeError(f"{text} is neither on nor off")
    return text.lower()


def _nan(text: str) -> str:
    if text not in ("", "nan"):
        raise ArgumentTypeError(f"{text} is not nan")
    return text


def variable(text: str) -> str:
    """Return `text` if it can be the name of a variable; else raise ArgumentTypeError."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ArgumentTypeError(f"{text or 'an empty word'} cannot be the name of a variable")
    return text


def variables(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list of variables."""
    found = tuple(map(variable, text.split(",")))
    if twice := [name for name in found if found.count(name) > 1]:
        raise ArgumentTypeError(f"{twice[0]} is named twice")
    return found


def reductions(text: str) -> tuple[tuple[str, str], ...]:
    """Parse ``loss=mean,acc=max`` into pairs of a variable and its reduction."""
    pairs = [part.partition("=") for part in text.split(",")]
    if missing := [name for name, _, how in pairs if not how]:
        raise ArgumentTypeError(f"{missing[0]} has no reduction")
    names = variables(",".join(name for name, _, _ in pairs))
    return tuple(zip(names, (how for _, _, how in pairs), strict=True))


file: Callable[[str], str] = os.path.expanduser
"""The `type` of options that take a path. IPython completes these paths."""

_CLUSTER = ("start", "status", "restart", "stop", "pull", "checkpoint", "restore")
_RUNS = ("--report", "--strict", "--check", "--fix", "--back", "--quiet", "--memory", "--profile")
MAGICS = {
    "gpus": Magic(
        "[WHERE]",
        needs=dict.fromkeys(("--memory", "--force"), "--virtual"),
        alone=("--live", "--doctor", "--virtual"),
    ),
    "ongpu": Magic(
        "WHERE",
        needs={"--save": "--memory", "--chunk": "--split", "--on": "--dry-run"},
        excludes=(
            *(("--dry-run", option) for option in _RUNS),
            *(("--report", "--quiet"), ("--memory", "--profile"), ("--back", "--no-move")),
            ("--on", "--no-move"),
        ),
        alone=("--on",),
    ),
    "gpuwatch": Magic("on|off", number="", verbs=("on", "off")),
    "gputime": Magic("WHERE WHERE …", number="*"),
    "gpudiff": Magic("WHERE WHERE, or DTYPE DTYPE", number="*", completes=("devices", "dtypes")),
    "gpufit": Magic("[WHERE] batch=1..4096", number="*"),
    "gpumem": Magic(
        *("[WHERE or NAME …]", "what", "*"),
        completes=("gpus", "variables"),
        excludes=(("--record", "--since"),),
        alone=("--record", "--since"),
    ),
    "gpufree": Magic("[WHERE or NAME …]", "names", "*", completes=("variables",)),
    "gpucluster": Magic(
        *(f"{'|'.join(_CLUSTER)} [N, RANK, NAME or DIR]", "what", "*", _CLUSTER),
        needs={"--partition": "--slurm", "--python": "--ssh"},
        excludes=(("--slurm", "--ssh"),),
        alone=("--slurm", "--ssh"),
    ),
}
# Options of `%%ongpu` that work for one device only.
ONE_DEVICE = ("--no-move", "--dry-run", *(flag for flag in _RUNS if flag != "--quiet"))
SEVERAL = ("--split", "--gather", "--reduce", "--chunk")  # for several devices only

OPTIONS = (
    Option("gpus", "-p --processes", "add a line for each process"),
    Option("gpus", "--live", "update the table live, also while a cell runs"),
    Option("gpus", "--doctor", "say why a GPU is not found, and how to fix it"),
    Option("gpus", "--virtual 2|off|1|4|8", "create virtual GPUs in this process, or remove them"),
    Option("gpus", "--memory 16GiB", "the memory of each virtual GPU; by default at most 16 GiB"),
    Option("gpus", "--force", "with --virtual: hide real GPUs; with off: move tensors to the CPU"),
    Option("ongpu", "--back", "after the cell, move its variables back"),
    Option("ongpu", "--no-move", "leave variables and batches where they are"),
    Option("ongpu gpuwatch", "--report", "show copies and waits by line, with advice"),
    Option("ongpu gpuwatch", "--strict", "raise an error at the first implicit copy or wait"),
    Option(
        "ongpu gpuwatch", "--check [nan]", "fail at a bad index or label; nan: also at a NaN", _nan
    ),
    Option("ongpu", "--fix", "copy operands from other devices to this one; report the lines"),
    Option("ongpu", "--memory", "show which lines allocated the peak memory"),
    Option("ongpu", "--save peak.pickle", "with --memory: write torch's snapshot to a file", file),
    Option("ongpu", "--profile [trace.json]", "show the time of each line; save the trace", file),
    Option("ongpu", "--dry-run", "run nothing: predict copies, memory, and errors"),
    Option("ongpu", "--split x,y", "split the items of these variables among GPUs", variables, ()),
    Option("ongpu", "--gather images", "join the GPUs' parts of these variables", variables, ()),
    Option(
        *("ongpu", "--reduce loss=mean", "combine the parts: mean, sum, min, max or last"),
        *(reductions, ()),
    ),
    Option("ongpu", "--chunk 4", "give this many items at a time to the next free GPU", _count),
    Option(
        "ongpu gpufit", "--on h100|24GiB|a100-80gb|l4", "predict for these cards, present or not"
    ),
    Option("gpufit", "--margin 5|10", "percent of free memory to leave unused", _percent, 0.05),
    Option("gpufit", "--dry", "predict only, run nothing"),
    Option("gputime", "--sweep n=64,256,1024", "repeat the code for each value of a variable"),
    Option("gputime", "--setup 'x = f(n)'", "run this code first on each device, not timed"),
    Option("gputime", "--items 1000|'len(x)'", "items in one run, to report items per second"),
    Option("gputime", "--max-time 5", "limit in seconds for each device and value", _seconds, 5.0),
    Option("gputime", "--against last", "compare with the last result, or a variable's result"),
    Option(
        "gputime gpudiff gpufit", "-o --output result", "assign the result to a variable", variable
    ),
    Option("ongpu gputime gpudiff gpufit", "-q --quiet", "show nothing"),
    Option("gpumem", "--since", "show what changed since the last %gpumem"),
    Option("gpumem", "--record on|off", "record the line of each allocation, from now on", _switch),
    Option("gpucluster", "--slurm 2x8", "start: nodes x GPUs on each, as a Slurm job"),
    Option("gpucluster", "--partition gpu", "start: the Slurm partition"),
    Option("gpucluster", "--ssh host1,host2:4", "start: hosts, and the number of GPUs on each"),
    Option("gpucluster", "--python /opt/bin/python", "start: Python's path on the --ssh hosts"),
    Option("gpucluster", "--ip 10.0.0.1", "start: this machine's address, as engines reach it"),
    Option("gpucluster", "--to runs/cats", "checkpoint: the directory", file),
)


def options(magic: str) -> list[Option]:
    return [option for option in OPTIONS if magic in option.magics.split()]
