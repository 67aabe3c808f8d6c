"""Share the items of variables out, and put together what came of each part.

What a cell's line asks for is checked before anything runs; what does not fit together in the end
is given as the list of its parts, so that no work is lost.
"""

import ast
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from gpumagic.cluster.gather import check_how, gather, reduce
from gpumagic.cluster.sending import Unsent
from gpumagic.cluster.split import length, pieces, shares, take, told
from gpumagic.display.units import some
from gpumagic.errors import GpuError, meant
from gpumagic.usercode.variables import names_assigned, names_read, variables_read


class Sharing(Protocol):
    """What a line asks for: names to split, to gather and to reduce, and items at a time."""

    @property
    def split(self) -> tuple[str, ...]: ...
    @property
    def gather(self) -> tuple[str, ...]: ...
    @property
    def reduce(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def chunk(self) -> int | None: ...


class SharedOut:
    """The variables of `--split`: a part for each rank, or with `--chunk` as many as there are."""

    def __init__(self, asked: Sharing, namespace: Mapping[str, Any], ranks: int) -> None:
        self._values = {name: _value(name, namespace) for name in asked.split}
        counts = {name: _length(name, value) for name, value in self._values.items()}
        if len({*counts.values()}) > 1:
            said = ", ".join(f"{name} has {count:,} items" for name, count in counts.items())
            raise GpuError(f"--split: {said}; split together what has as many")
        count = next(iter(counts.values()), 0)
        self.bounds = pieces(count, asked.chunk) if asked.chunk else shares(count, ranks)
        self.bounds = self.bounds or [(0, 0)]
        # Of nothing one part is run, so that what comes of it is of the right kind.
        filled = [n for n, (start, stop) in enumerate(self.bounds) if stop > start] or [0]
        self.total = len(filled)
        # The numbers of the parts that each rank runs: its own one, or of all who is free.
        common = deque(filled)
        self.queues = [
            common if asked.chunk else deque([rank] if rank in filled else [])
            for rank in range(ranks)
        ]

    def part(self, number: int) -> dict[str, Any]:
        """The variables of one part, by name."""
        return {name: take(value, *self.bounds[number]) for name, value in self._values.items()}

    def __str__(self) -> str:
        """``"17 prompts: 9 + 8"``."""
        return told(" and ".join(self._values), self.bounds)


def _value(name: str, namespace: Mapping[str, Any]) -> Any:
    if name not in namespace:
        question = meant(name, [known for known in namespace if not known.startswith("_")])
        raise GpuError(f"--split {name}: no such variable; {question}make it in a cell before")
    return namespace[name]


def _length(name: str, value: Any) -> int:
    try:
        return length(value)
    except GpuError as error:
        raise GpuError(f"--split {name}: {error}") from None


def check(asked: Sharing, tree: ast.AST, namespace: Mapping[str, Any]) -> None:
    """Raise `GpuError` for a name to split that the cell does not read, for one to gather that it
    does not assign, and for what is no way to reduce."""
    read = [name for name, _ in variables_read(names_read(tree), namespace)] if asked.split else []
    for name in asked.split:
        if name in namespace and name not in read:
            raise GpuError(
                f"--split {name}: the cell does not read {name}, so each would do all of it; "
                f"{meant(name, read)}it reads {some(read) or 'no variable'}"
            )
    assigned = names_assigned(tree)
    for option, names in (("gather", asked.gather), ("reduce", tuple(dict(asked.reduce)))):
        for name in names:
            if name not in (*assigned, *asked.split):
                there = f"it assigns {some(assigned)}" if assigned else "it assigns nothing"
                question = meant(name, assigned)
                raise GpuError(
                    f"--{option} {name}: the cell does not assign {name}; {question}{there}"
                )
    for _, how in asked.reduce:
        check_how(how)


def put_together(
    asked: Sharing, parts: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """What is to be set in the notebook, by name; and of lists of parts why they are that."""
    made: dict[str, Any] = {}
    wrong: list[str] = []
    hows = {**dict.fromkeys(asked.gather, ""), **dict(asked.reduce)}
    for name, how in hows.items():
        found = [part[name] for part in parts if name in part]
        option = f"--reduce {name}={how}" if how else f"--gather {name}"
        try:
            if len(found) < len(parts):
                raise GpuError(f"{len(parts) - len(found)} of {len(parts)} parts did not assign it")
            if unsent := next((each for each in found if isinstance(each, Unsent)), None):
                raise GpuError(f"it cannot leave its rank ({unsent.why})")
            made[name] = reduce(found, how) if how else gather(found)
        except GpuError as error:
            made[name] = found
            wrong.append(f"{option}: {error}; {name} is the list of its {len(found)} parts")
    return made, wrong


def said(asked: Sharing, made: Mapping[str, Any], parts: int) -> tuple[str, ...]:
    """What was put together of so many parts, in words."""
    reduced, words = dict(asked.reduce), []
    if asked.gather and made:
        on_cpu = any(isinstance(made[name], Tensor) for name in asked.gather)
        words.append(f"gathered {some(asked.gather)}{' on the CPU' * on_cpu}")
    if reduced and made:
        equal = "" if {*reduced.values()} == {"last"} else ", each counted the same"
        hows = ", ".join(f"{name} is the {how}" for name, how in reduced.items())
        words.append(f"{hows} of {parts} parts{equal}")
    return tuple(words)
