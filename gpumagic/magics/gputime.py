"""Run a `%%gputime` or `%%gpufit` cell: read its values, measure, show and assign the result.

Values are typed as ``n=64,256``, ``n=1..4096`` or ``n=pow2:1..64``.
"""

from __future__ import annotations

import ast
import math
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpumagic.errors import GpuError, torch_needed
from gpumagic.magics.run_elsewhere import compiled_name, give, progressing, refuse_others
from gpumagic.usercode.sweep import MOST_POINTS, TYPE, check

if TYPE_CHECKING:
    from gpumagic.timing.comparison import Comparison


def time_cell(shell: Any, asked: Namespace, magic: str, text: str, scope: Any = None) -> None:
    """Time `text` as it was typed, show the Comparison, and assign it as the line asks.

    `magic` is the line above the text, or empty; `scope` has the names of the calling function.
    """
    from gpumagic import timing

    namespace = shell.user_ns
    if scope is not None and scope is not namespace:
        namespace = {**namespace, **scope}
    against = _earlier(asked.against, namespace, timing.last_comparison())
    sweep = parse(asked.sweep, namespace) if asked.sweep else None
    setup = shell.transform_cell(asked.setup) if asked.setup else ""
    code, name = compiled_name(shell, text, magic, setup)
    with progressing(shell, asked, name) as line:
        made = timing.compare(
            code,
            tuple(asked.where) or None,
            setup=setup,
            sweep=sweep,
            items=asked.items,
            max_time=asked.max_time,
            in_place=asked.in_place,
            namespace=namespace,
            against=against,
            progress=line.update,
            filename=name,
            text=text,
        )
    give(shell, asked, line, made)


def _earlier(
    named: str | None, names: Mapping[str, Any], last: Comparison | None
) -> Comparison | Literal["last"] | None:
    """Return what `--against` names: a result of the notebook, or a file."""
    from gpumagic.timing.comparison import Comparison

    if named is None:
        return None
    if named == "last":
        if last is None:
            raise GpuError("--against last: nothing was timed before in this kernel")
        return "last"
    if isinstance(value := names.get(named), Comparison):
        return value
    path = Path(named).expanduser()
    if not path.is_file():
        raise GpuError(
            f"--against {named} is neither a comparison of this notebook nor a file;"
            " type --against last, or the NAME of an earlier -o NAME"
        )
    return Comparison.from_json(path)


def fit_cell(shell: Any, asked: Namespace, magic: str, text: str) -> None:
    """Find the largest value with which `text`, as it was typed below `magic`, fits."""
    with suppress(SyntaxError):  # reported below
        refuse_others("%%gpufit", shell, ast.parse(shell.transform_cell(text)))
    with torch_needed("%%gpufit"):
        from gpumagic.device.cards import cards
        from gpumagic.fitting.fit import fit

    wheres = [word for word in asked.where if "=" not in word]
    ranges = [word for word in asked.where if "=" in word]
    if len(ranges) != 1:
        raise GpuError("one variable with its values is needed; type batch=1..4096")
    if len(wheres) + (asked.on is not None) > 1:
        raise GpuError(f"one GPU is needed, {wheres[-1]} is one too many; or type --on CARD, CARD")
    variable, values = range_of(ranges[0])
    on: Any = cards(asked.on) if asked.on is not None else next(iter(wheres), None)
    code, name = compiled_name(shell, text, magic)
    with progressing(shell, asked, name) as line:
        made = fit(
            code,
            on,
            margin=asked.margin,
            target=asked.target,
            dry=asked.dry,
            namespace=shell.user_ns,
            progress=line.update,
            filename=name,
            text=text,
            **{variable: values},
        )
    give(shell, asked, line, made)


# The limit of torch's sizes, of 64 bits.
_TOO_LARGE = 2.0**63
_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::({_NUMBER}))?")
_POWERS = re.compile(rf"pow(\d{{1,4}}):({_NUMBER})\.\.({_NUMBER})")


def parse(
    typed: str, names: Mapping[str, Any] | None = None, option: str = "--sweep "
) -> dict[str, tuple[Any, ...]]:
    """Return the values typed for a variable; GpuError for others.

    ``"n=64,256"``, ``"n=100..1000:100"``, ``"n=pow2:1..64"``, ``"how=mean,sum"``, or several with
    commas; ``"dtype=torch.float16"`` is read from `names`.
    """
    typed = " ".join(typed.split())  # in one line
    text = option + typed
    name, equals, listed = (part.strip() for part in typed.partition("="))
    if not equals:
        raise GpuError(f"{text}: a variable or its values are missing; {TYPE}")
    pieces = [piece.strip() for piece in listed.split(",")]
    if not all(pieces):
        raise GpuError(f"{text}: a value is missing; {TYPE}")
    values = [value for piece in pieces for value in _values(piece, text)]
    return check({name: tuple(_meant(value, names or {}) for value in values)})


def range_of(typed: str) -> tuple[str, Sequence[Any]]:
    """Return one variable and its values; a range of ``batch=1..4096``, which may be long."""
    name, _, listed = (part.strip() for part in typed.partition("="))
    between = _RANGE.fullmatch(listed)
    ends = [_number(end or "1") for end in between.groups()] if between else []
    if ends and name.isidentifier() and all(isinstance(end, int) for end in ends):
        first, last, step = (int(end) for end in ends)
        if step > 0 and last >= first:
            return name, range(first, last + 1, step)
    ((name, values),) = parse(typed, option="").items()
    return name, values


def _values(piece: str, text: str) -> list[Any]:
    if powers := _POWERS.fullmatch(piece):
        return _powers(int(powers[1]), _number(powers[2]), _number(powers[3]), text)
    if between := _RANGE.fullmatch(piece):
        step = _number(between[3]) if between[3] else 1
        return _steps(_number(between[1]), _number(between[2]), step, text)
    if re.fullmatch(_NUMBER, piece):
        return [_number(piece)]
    if piece in ("True", "False", "None"):
        return [ast.literal_eval(piece)]
    if piece.strip("\"'").replace("-", "_").replace(".", "_").isidentifier():
        return [piece.strip("\"'")]
    raise GpuError(f"{text}: {piece} is not a value; {TYPE}")


def _meant(value: Any, names: Mapping[str, Any]) -> Any:
    """Return the value of ``"torch.float16"``; other words unchanged."""
    first, _, rest = value.partition(".") if isinstance(value, str) else ("", "", "")
    if not rest or first not in names:
        return value
    try:
        return attrgetter(rest)(names[first])
    except AttributeError:
        return value


def _number(text: str) -> int | float:
    try:
        found = float(text)
    except ValueError:
        raise GpuError(f"--sweep: {text} is not a number; {TYPE}") from None
    if not abs(found) < _TOO_LARGE:
        raise GpuError(f"--sweep: {text} is too large; {TYPE}")
    try:
        return int(text)
    except ValueError:
        return found


def _powers(base: int, first: float, last: float, text: str) -> list[Any]:
    if base < 2 or first <= 0 or last < first:
        raise GpuError(f"{text}: pow2:A..B needs 0 < A ≤ B; type pow2:1..4096")
    # One lower, since logarithms are rounded.
    exponent = math.floor(math.log(first) / math.log(base)) - 1
    found: list[Any] = []
    # Integers from the exponent 0 on.
    while (value := base**exponent) <= last:
        found += [value] if value >= first else []
        exponent += 1
    if not found:
        raise GpuError(f"{text}: there is no power of {base} between; type pow{base}:1..4096")
    return found


def _steps(first: float, last: float, step: float, text: str) -> list[Any]:
    if step == 0 or (last - first) * step < 0:
        raise GpuError(f"{text}: steps of {step} do not reach {last} from {first}; {TYPE}")
    # Slightly more, so that 0.1..0.5:0.1 includes its end.
    count = (last - first) / step + 1 + 1e-9
    if count > MOST_POINTS + 1:
        raise GpuError(f"{text}: more than {MOST_POINTS:,} points; take larger steps")
    whole = isinstance(first, int) and isinstance(step, int)
    # As typed: 0.3, not 0.30000000000000004.
    return [
        first + n * step if whole else float(f"{first + n * step:.12g}") for n in range(int(count))
    ]
