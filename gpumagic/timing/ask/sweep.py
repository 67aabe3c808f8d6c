"""Read a sweep: the values that a variable takes, as typed or as given, and items at each."""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from numbers import Integral, Real
from types import CodeType
from typing import TYPE_CHECKING, Any

from gpumagic.errors import GpuError
from gpumagic.usercode.variables import globals_of, variables_read

if TYPE_CHECKING:
    from gpumagic.timing.measure.program import Program

MOST_POINTS = 1000
# Of what torch has for a size, 64 bits.
_TOO_LARGE = 2.0**63
_TYPE_ITEMS = "type a number above 0, or an expression for one, such as len(sentences)"
_TYPE = "type n=64,256,1024, n=100..1000:100 or n=pow2:1..4096"
_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::({_NUMBER}))?")
_POWERS = re.compile(rf"pow(\d{{1,4}}):({_NUMBER})\.\.({_NUMBER})")


def parse(
    given: Iterable[str], names: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, ...]]:
    """What was typed after each ``--sweep``, by variable, in the order of typing; or GpuError.

    ``"n=64,256,1024"``; ``"n=100..1000:100"``, both ends included, in steps of 1 if none is given;
    ``"batch=pow2:1..4096"``, the powers of two between; ``"p=0.1,1e-3"``; ``"how=mean,sum"``,
    words, which become strings; ``"dtype=torch.float16"``, what `names` have; or these together,
    with commas.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for typed in given:
        text = " ".join(typed.split())
        name, equals, listed = (part.strip() for part in text.partition("="))
        if not equals:
            raise GpuError(f"--sweep {text}: no variable and values; {_TYPE}")
        if name in found:
            raise GpuError(
                f"--sweep {name} is there twice; type all its values in one: --sweep {name}=1,2"
            )
        pieces = [piece.strip() for piece in listed.split(",")]
        if not all(pieces):
            raise GpuError(f"--sweep {text}: a value is missing; {_TYPE}")
        values = [value for piece in pieces for value in _values(piece, text)]
        found[name] = tuple(_meant(value, names or {}) for value in values)
    return check(found)


def check(sweep: Mapping[str, Iterable[Any]]) -> dict[str, tuple[Any, ...]]:
    """The same for a sweep given as Python values."""
    if len(sweep) > 2:
        raise GpuError(
            f"a sweep is over two variables at most, not {', '.join(sweep)}; leave out one"
        )
    found: dict[str, tuple[Any, ...]] = {}
    for name, given in sweep.items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise GpuError(f"sweep: {name!r} cannot be a variable's name; {_TYPE}")
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise GpuError(
                f"sweep: {name} has no list of values, but {given!r}; give {{{name!r}: [1, 2]}}"
            )
        # One more than allowed is enough to refuse an endless iterator.
        values = tuple(value for value, _ in zip(given, range(MOST_POINTS + 1), strict=False))
        if not values:
            raise GpuError(f"sweep: {name} has no values; {_TYPE}")
        labels = [label(value) for value in values]
        twice = next((each for n, each in enumerate(labels) if each in labels[:n]), None)
        if twice is not None:
            raise GpuError(f"sweep: {name} = {twice} is there twice; give each value once")
        found[name] = values
    if math.prod(len(values) for values in found.values()) > MOST_POINTS:
        raise GpuError(
            f"a sweep of more than {MOST_POINTS:,} points; give fewer values, or steps:"
            " n=100..1000:100, n=pow2:1..4096"
        )
    return found


def points(sweep: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The variables at each point, the first variable outermost; ``[{}]`` without a sweep."""
    return [dict(zip(sweep, each, strict=True)) for each in product(*sweep.values())]


def label(value: Any, most: int = 40) -> str:
    """A value in a few characters: ``"4096"``, ``"0.001"``, ``"float16"``."""
    # NumPy's numbers say their type too.
    if number(value) is not None:
        value = int(value) if isinstance(value, Integral) else float(value)
    words = value if isinstance(value, str) else repr(value)
    words = " ".join(words.removeprefix("torch.").split())
    return words if len(words) <= most else words[: most - 1] + "…"


def key(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """A point as what can be looked up, whatever its values are."""
    return tuple(sorted((name, label(value)) for name, value in values.items()))


def number(value: Any) -> float | None:
    """A value that can stand on an axis; None for any other."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except (OverflowError, ValueError):
        return None
    return found if math.isfinite(found) else None


def unread(
    sweep: Mapping[str, Sequence[Any]], program: Program, namespace: dict[str, Any]
) -> list[str]:
    """A line for each variable that makes no difference, for the code does not read it."""
    if not sweep or program.function is not None:
        return []
    seen = dict.fromkeys(sweep)
    read = {name for name, _ in variables_read(program.reads, {**namespace, **seen})}
    read |= set(program.reads)
    said = []
    for name in sweep:
        if name in program.assigned and name not in read:
            said.append(f"{name} makes no difference: the code sets it itself")
        elif name not in read and not re.search(rf"\b{name}\b", program.text):
            said.append(f"{name} makes no difference: the code does not read it")
    return said


def worked_through(
    items: float | str | None,
    namespace: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
) -> list[float | None]:
    """Items of one run, at each point of a sweep; an expression is computed once for equal values.

    Raises GpuError for what is no number above 0.
    """
    if not isinstance(items, str):
        return [None if items is None else _above_0(items, f"items={items}")] * len(points)
    try:
        code = compile(items.strip(), "<items>", "eval")
    except (SyntaxError, ValueError):
        raise GpuError(f"items {items} is no expression; {_TYPE_ITEMS}") from None
    named = globals_of(code)
    known: dict[tuple[tuple[str, str], ...], float] = {}
    found: list[float | None] = []
    for values in points:
        mine = {name: value for name, value in values.items() if name in named}
        at = tuple((name, repr(value)) for name, value in mine.items())
        if at not in known:
            told = "".join([f"items {items}", *(f", {name} = {value}" for name, value in at)])
            known[at] = _computed(code, told, {**namespace, **values})
        found.append(known[at])
    return found


def _computed(code: CodeType, told: str, names: dict[str, Any]) -> float:
    try:
        value = eval(code, names)
    except Exception as error:  # noqa: BLE001  it is the user's
        raise GpuError(f"{told}: {type(error).__name__}: {error}; {_TYPE_ITEMS}") from None
    return _above_0(value, f"{told}: {str(value)[:40]}")


def _above_0(value: Any, told: str) -> float:
    try:
        found = math.nan if isinstance(value, str) else float(value)
    except Exception:  # noqa: BLE001  what a user's object does not turn into
        found = math.nan
    if not (found > 0 and math.isfinite(found)):
        told = " ".join(told.split())
        raise GpuError(f"{told} is not a number above 0; {_TYPE_ITEMS}") from None
    return found


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
    raise GpuError(f"--sweep {text}: {piece} is no value; {_TYPE}")


def _meant(value: Any, names: Mapping[str, Any]) -> Any:
    """``"torch.float16"`` as what it names; other words stay words."""
    first, *rest = value.split(".") if isinstance(value, str) else [""]
    if not rest or first not in names:
        return value
    found = names[first]
    for name in rest:
        if not hasattr(found, name):
            return value
        found = getattr(found, name)
    return found


def _number(text: str) -> int | float:
    try:
        found = float(text)
    except ValueError:
        raise GpuError(f"--sweep: {text} is no number; {_TYPE}") from None
    if not abs(found) < _TOO_LARGE:
        raise GpuError(f"--sweep: {text} is too large; {_TYPE}")
    try:
        return int(text)
    except ValueError:
        return found


def _powers(base: int, first: float, last: float, text: str) -> list[Any]:
    if base < 2 or first <= 0 or last < first:
        raise GpuError(f"--sweep {text}: pow2:A..B needs 0 < A ≤ B; type pow2:1..4096")
    # One lower, for logarithms are rounded.
    exponent = math.floor(math.log(first) / math.log(base)) - 1
    found: list[Any] = []
    # An int from the exponent 0 on.
    while (value := base**exponent) <= last:
        found += [value] if value >= first else []
        exponent += 1
    if not found:
        raise GpuError(f"--sweep {text}: no power of {base} is between; type pow{base}:1..4096")
    return found


def _steps(first: float, last: float, step: float, text: str) -> list[Any]:
    if step == 0 or (last - first) * step < 0:
        raise GpuError(
            f"--sweep {text}: steps of {step} do not lead from {first} to {last}; {_TYPE}"
        )
    # A hair more, so that 0.1..0.5:0.1 has its end.
    count = (last - first) / step + 1 + 1e-9
    if count > MOST_POINTS + 1:
        raise GpuError(f"--sweep {text}: more than {MOST_POINTS:,} points; take larger steps")
    whole = isinstance(first, int) and isinstance(step, int)
    # The digits that were typed, without those of binary fractions: 0.3, not 0.30000000000000004.
    return [
        first + n * step if whole else float(f"{first + n * step:.12g}") for n in range(int(count))
    ]
