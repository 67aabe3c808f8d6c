"""Parse a sweep (one variable and its values), and count the items of work for each value.

Forms: ``n=64,256``, ``n=64..640:64``, ``n=pow2:1..64``. A point is one value: ``{"n": 64}``.
"""

import ast
import keyword
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from numbers import Integral, Real
from operator import attrgetter
from typing import Any

from gpumagic import faults
from gpumagic.errors import GpuError
from gpumagic.usercode.program import Program
from gpumagic.usercode.variables import variables_read

MOST_POINTS = 1000
_ITEMS = "type a number above 0, or an expression for one, such as len(sentences)"
TYPE = "type n=64,256,1024, n=100..1000:100 or n=pow2:1..4096"
_WHOLE = 2**63  # a length limit that no label reaches
_NUMBER = re.compile(r"[-+]?\.?\d[-+.\w]*")
_RANGE = re.compile(r"(?:pow(\d{1,4}):)?(.+?)\.\.([^:]+)(?::(.+))?")


def parse(
    typed: str, names: Mapping[str, Any] | None = None, option: str = "--sweep "
) -> dict[str, tuple[Any, ...]]:
    """Parse a variable's values: ``"n=64,256"``. A word with a dot is looked up in `names`."""
    typed = " ".join(typed.split())  # in one line
    text = option + typed
    name, _, listed = (part.strip() for part in typed.partition("="))
    if not all(pieces := [piece.strip() for piece in listed.split(",")]):
        raise GpuError(f"{text}: a value is missing; {TYPE}")
    return check({name: [value for each in pieces for value in _values(each, text, names or {})]})


def range_of(typed: str) -> tuple[str, Sequence[Any]]:
    """Parse one variable and its values; a range of integers may exceed MOST_POINTS."""
    name, _, listed = (part.strip() for part in typed.partition("="))
    between = _RANGE.fullmatch(listed)
    if between and not between[1] and name.isidentifier() and not keyword.iskeyword(name):
        first, last, step = (_number(end or "1", typed) for end in between.groups()[1:])
        whole = all(float(end).is_integer() for end in (first, last, step))  # 1e9 is whole too
        if whole and step > 0 and last >= first:
            return name, range(int(first), int(last) + 1, int(step))
    ((name, values),) = parse(typed, option="").items()
    return name, values


def _values(piece: str, text: str, names: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values of one item of the comma-separated list."""
    if between := _RANGE.fullmatch(piece):
        base, *ends = between.groups()
        first, last, step = (_number(end or "1", text) for end in ends)
        if base and ends[2]:
            raise GpuError(f"{text}: powers have no step; {TYPE}")
        return _powers(int(base), first, last, text) if base else _steps(first, last, step, text)
    if _NUMBER.fullmatch(piece):
        return [_number(piece, text)]
    if piece in ("True", "False", "None"):
        return [ast.literal_eval(piece)]
    word = piece.strip("\"'")
    owner, _, rest = word.partition(".")
    if not word.replace("-", "_").replace(".", "_").isidentifier():
        raise GpuError(f"{text}: {piece} is not a value; {TYPE}")
    with suppress(AttributeError, KeyError):  # the word may be an attribute, such as torch.float16
        return [attrgetter(rest)(names[owner])]
    return [word]


def _number(typed: str, text: str) -> int | float:
    try:
        found = float(typed)
    except ValueError:
        raise GpuError(f"{text}: {typed} is not a number; {TYPE}") from None
    if not abs(found) < 2.0**63:  # torch's sizes have 64 bits
        raise GpuError(f"{text}: {typed} is too large; {TYPE}")
    with suppress(ValueError):
        return int(typed)
    return found


def _powers(base: int, first: float, last: float, text: str) -> list[Any]:
    # For base 2, these exponents reach from the smallest float to torch's largest size.
    exponents = range(-1075, 64) if base > 1 and first > 0 else ()
    if not (found := [base**n for n in exponents if first <= base**n <= last]):
        raise GpuError(f"{text}: there is no power of {base} in that range; type pow2:1..4096")
    return found


def _steps(first: float, last: float, step: float, text: str) -> list[Any]:
    if step == 0 or (last - first) * step < 0:
        between = f"{text.partition('=')[0]}={min(first, last)}..{max(first, last)}"
        raise GpuError(f"{text}: steps of {step} do not reach {last} from {first}; type {between}")
    # Increase the count slightly, so that 0.1..0.5:0.1 includes its end.
    count = min((last - first) / step + 1 + 1e-9, MOST_POINTS + 1)
    values = (first + n * step for n in range(int(count)))
    # Round to 12 digits, so that a value is 0.3, not 0.30000000000000004.
    return [each if isinstance(each, int) else float(f"{each:.12g}") for each in values]


def check(sweep: Mapping[str, Iterable[Any]]) -> dict[str, tuple[Any, ...]]:
    """Return a sweep with its values as a tuple; raise GpuError if the sweep is invalid."""
    if len(sweep) > 1:
        raise GpuError(f"a sweep is over one variable, not {', '.join(sweep)}; leave out one")
    return {name: _checked(name, given) for name, given in sweep.items()}


def _checked(name: Any, given: Any) -> tuple[Any, ...]:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise GpuError(f"{name!r} cannot be a variable's name; {TYPE}")
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise GpuError(f"{name} has no list of values: {given!r}; give {name}=[1, 2]")
    values = tuple(islice(given, MOST_POINTS + 1))  # the iterator may be endless
    if not 0 < len(values) <= MOST_POINTS:
        count = f"more than {MOST_POINTS:,}" if values else "no"
        raise GpuError(f"{name} has {count} values; {TYPE}")
    labels = [label(value, _WHOLE) for value in values]
    twice = next((each for n, each in enumerate(labels) if each in labels[:n]), None)
    if twice is not None:
        raise GpuError(f"{name} = {label(twice)} is given twice; give each value once")
    return values


def points(sweep: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the points of a sweep: ``[{"n": 64}, …]``; ``[{}]`` without a sweep."""
    return [{name: value} for name, values in sweep.items() for value in values] or [{}]


def label(value: Any, most: int = 40) -> str:
    """Return a short text of a value: ``"4096"``, ``"0.001"``, ``"float16"``."""
    if number(value) is not None:  # NumPy's repr would include the type
        value = int(value) if isinstance(value, Integral) else float(value)
    words = value if isinstance(value, str) else repr(value)
    words = " ".join(words.removeprefix("torch.").split())
    return words if len(words) <= most else words[: most - 1] + "…"


def key(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return a hashable key of a point."""
    return tuple(sorted((name, label(value, _WHOLE)) for name, value in values.items()))


def number(value: Any) -> float | None:
    """Return a value as a float; None if it is not a finite number, or is a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    with suppress(OverflowError, ValueError):
        if math.isfinite(found := float(value)):
            return found
    return None


def unread(names: Collection[str], program: Program, namespace: dict[str, Any]) -> list[str]:
    """Return a note on each variable in `names` that the code does not read."""
    if not names or program.function is not None:
        return []
    known = {**namespace, **dict.fromkeys(names)}
    read = {name for name, _ in variables_read(program.reads, known)}
    said = []
    for name in [name for name in names if name not in read]:
        if name in program.assigned:
            said.append(f"{name} makes no difference: the code sets it itself")
        elif not re.search(rf"\b{name}\b", program.text):
            said.append(f"{name} makes no difference: the code does not read it")
    return said


def items_per_run(
    items: float | str | None, namespace: Mapping[str, Any], points: Sequence[Mapping[str, Any]]
) -> list[float | None]:
    """Return the items per run at each point of a sweep; raise GpuError if any is 0 or less."""
    if items is None:
        return [None] * len(points)
    try:
        code = compile(str(items).strip(), "<items>", "eval") if isinstance(items, str) else None
    except (SyntaxError, ValueError):
        raise GpuError(f"items {items} is not an expression; {_ITEMS}") from None
    found: list[float | None] = []
    for values in points:
        given = ", ".join([f"items {items}", *(f"{n} = {value!r}" for n, value in values.items())])
        try:
            value: Any = items if code is None else eval(code, {**namespace, **values})
            count = math.nan if isinstance(value, str) else float(value)
        except Exception as error:  # noqa: BLE001  user code may raise anything
            raise GpuError(f"{given}: {faults.in_words(error)}; {_ITEMS}") from None
        if not 0 < count < math.inf:
            shown = " ".join(str(value).split())[:40]
            raise GpuError(f"{given}: {shown} is not a number above 0; {_ITEMS}")
        found.append(count)
    return found
