"""Read the values that a variable takes, as typed: ``n=64,256`` or ``n=1..4096``."""

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from gpumagic.errors import GpuError
from gpumagic.usercode.sweep import MOST_POINTS, TYPE, check

# Of what torch has for a size, 64 bits.
_TOO_LARGE = 2.0**63
_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::({_NUMBER}))?")
_POWERS = re.compile(rf"pow(\d{{1,4}}):({_NUMBER})\.\.({_NUMBER})")


def parse(
    given: Iterable[str], names: Mapping[str, Any] | None = None, option: str = "--sweep "
) -> dict[str, tuple[Any, ...]]:
    """What was typed after each ``--sweep``, by variable, in the order of typing; or GpuError.

    ``"n=64,256"``, ``"n=100..1000:100"``, ``"n=pow2:1..64"``, ``"how=mean,sum"``, or several with
    commas; ``"dtype=torch.float16"`` is what `names` have.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for typed in given:
        name, equals, listed = (part.strip() for part in typed.partition("="))
        text = option + " ".join(typed.split())
        if not equals:
            raise GpuError(f"{text}: no variable and values; {TYPE}")
        if name in found:
            raise GpuError(
                f"{option}{name} is there twice; type all its values in one: {option}{name}=1,2"
            )
        pieces = [piece.strip() for piece in listed.split(",")]
        if not all(pieces):
            raise GpuError(f"{text}: a value is missing; {TYPE}")
        values = [value for piece in pieces for value in _values(piece, text)]
        found[name] = tuple(_meant(value, names or {}) for value in values)
    return check(found)


def range_of(typed: str) -> tuple[str, Sequence[Any]]:
    """A variable and its values where there is one, of which ``batch=1..4096`` is not listed."""
    name, _, listed = (part.strip() for part in typed.partition("="))
    between = _RANGE.fullmatch(listed)
    ends = [_number(end or "1") for end in between.groups()] if between else []
    if ends and name.isidentifier() and all(isinstance(end, int) for end in ends):
        first, last, step = (int(end) for end in ends)
        if step > 0 and last >= first:
            return name, range(first, last + 1, step)
    ((name, values),) = parse([typed], option="").items()
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
    raise GpuError(f"{text}: {piece} is no value; {TYPE}")


def _meant(value: Any, names: Mapping[str, Any]) -> Any:
    """``"torch.float16"`` as what it names; other words stay words."""
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
        raise GpuError(f"--sweep: {text} is no number; {TYPE}") from None
    if not abs(found) < _TOO_LARGE:
        raise GpuError(f"--sweep: {text} is too large; {TYPE}")
    try:
        return int(text)
    except ValueError:
        return found


def _powers(base: int, first: float, last: float, text: str) -> list[Any]:
    if base < 2 or first <= 0 or last < first:
        raise GpuError(f"{text}: pow2:A..B needs 0 < A ≤ B; type pow2:1..4096")
    # One lower, for logarithms are rounded.
    exponent = math.floor(math.log(first) / math.log(base)) - 1
    found: list[Any] = []
    # An int from the exponent 0 on.
    while (value := base**exponent) <= last:
        found += [value] if value >= first else []
        exponent += 1
    if not found:
        raise GpuError(f"{text}: no power of {base} is between; type pow{base}:1..4096")
    return found


def _steps(first: float, last: float, step: float, text: str) -> list[Any]:
    if step == 0 or (last - first) * step < 0:
        raise GpuError(f"{text}: steps of {step} do not lead from {first} to {last}; {TYPE}")
    # A hair more, so that 0.1..0.5:0.1 has its end.
    count = (last - first) / step + 1 + 1e-9
    if count > MOST_POINTS + 1:
        raise GpuError(f"{text}: more than {MOST_POINTS:,} points; take larger steps")
    whole = isinstance(first, int) and isinstance(step, int)
    # The digits that were typed, without those of binary fractions: 0.3, not 0.30000000000000004.
    return [
        first + n * step if whole else float(f"{first + n * step:.12g}") for n in range(int(count))
    ]
