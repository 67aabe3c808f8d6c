"""Make out what each rank of a cell is to run: its part, and the variables that it lacks."""

import ast
import linecache
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from gpumagic.cluster import sending
from gpumagic.cluster.delivery import Delivery, taken_as_sent, to_be_sent
from gpumagic.cluster.engine import CellOrder, Outcome
from gpumagic.cluster.engines import Engines, RankEngine
from gpumagic.cluster.shared_out import SharedOut, Sharing, check
from gpumagic.errors import GpuError
from gpumagic.usercode.files import shell, user_namespace
from gpumagic.usercode.program import awaits
from gpumagic.usercode.variables import names_read, variables_read

_BEGUN = re.compile(r"^get_ipython\(\)\.begin_ongpu\((.*?)\)(?=;|$)", re.MULTILINE)


def _as_comment(begun: re.Match[str]) -> str:
    return f"# {ast.literal_eval(begun[1])}"


@dataclass(frozen=True)
class Whole:
    """Of a cell in which nothing is shared out: every rank runs the same."""

    split: tuple[str, ...] = ()
    gather: tuple[str, ...] = ()
    reduce: tuple[tuple[str, str], ...] = ()
    chunk: int | None = None


class Orders:
    """The orders of one cell; `deliver` comes before."""

    def __init__(
        self, tree: ast.Module, file: str, ranks: Sequence[RankEngine], asked: Sharing
    ) -> None:
        if line := awaits(tree):
            raise GpuError(f"line {line} awaits, and ranks have no loop; await it in a cell before")
        space, ipython = user_namespace(), shell()
        check(asked, tree, space)
        self.asked, self.cell = asked, uuid4().hex
        self.shared_out = SharedOut(asked, space, len(ranks)) if asked.split else None
        self.keep = (*asked.gather, *dict(asked.reduce))
        self._tree, self._file = tree, sending.file_in_rank(file)
        self._ranks = ranks
        # Python, which an error's explanation reads; the magic's line as it was typed.
        source = _BEGUN.sub(_as_comment, "".join(linecache.getlines(file)), count=1)
        read = names_read(tree, ipython.transform_cell if ipython else str)
        names = [name for name in read if name not in asked.split]
        hidden = ipython.user_ns_hidden if ipython else {}
        found = sending.prints_of(variables_read(names, space), space, hidden)
        self.delivery = Delivery(*found)
        self.delivery.sources[self._file] = source
        self.split_bytes = 0
        numbers = [rank.number for rank in ranks]
        own: list[deque[int]] = [deque([n]) for n in range(len(ranks))]
        queues = self.shared_out.queues if self.shared_out else own
        self.queues = dict(zip(numbers, queues, strict=True))
        self.parts = self.shared_out.total if self.shared_out else len(ranks)

    def deliver(self, engines: Engines) -> None:
        """Have the ranks that have something to do take the variables that they lack."""
        busy = [rank for rank in self._ranks if self.queues[rank.number]]
        self.delivery.deliver(engines, busy)

    @property
    def sent(self) -> tuple[str, ...]:
        """What was sent, as it is told."""
        sent = self.delivery.sent.items()
        return (*self.asked.split, *(f"{name} anew" if anew else name for name, anew in sent))

    @property
    def sent_bytes(self) -> int:
        return self.delivery.nbytes + self.split_bytes

    def order(self, part: int) -> CellOrder:
        """What a rank is to run for a part."""
        given = b""
        if self.shared_out is not None:
            given = sending.pack(self.shared_out.part(part))
            self.split_bytes += len(given)
        return CellOrder(self.cell, self._tree, self._file, self.delivery.sources, given, self.keep)

    def ended(self, outcomes: Iterable[Outcome]) -> None:
        """What the cell has assigned is the ranks' own from then on."""
        by_rank: dict[int, set[str]] = {}
        for outcome in outcomes:
            if outcome.deleted:
                mine = [rank for rank in self._ranks if rank.number == outcome.rank]
                to_be_sent(mine, outcome.deleted)
            by_rank.setdefault(outcome.rank, set()).update(outcome.assigned)
        alike: dict[frozenset[str], list[RankEngine]] = {}
        for rank in self._ranks:
            alike.setdefault(frozenset(by_rank.get(rank.number, ())), []).append(rank)
        for names, ranks in alike.items():
            taken_as_sent(ranks, names)


def values_of(packed: Sequence[bytes]) -> list[Any]:
    """Values that came back; None for none."""
    return [sending.unpack(each) if each else None for each in packed]
