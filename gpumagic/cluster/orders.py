"""Make out what each rank of a cell is to run: its part, and the variables that it lacks."""

import ast
import linecache
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from uuid import uuid4

from gpumagic.cluster import sending
from gpumagic.cluster.engine import CellOrder
from gpumagic.cluster.engines import RankEngine
from gpumagic.cluster.shared_out import SharedOut, Sharing, check
from gpumagic.errors import GpuError
from gpumagic.usercode.compile import awaits
from gpumagic.usercode.notebook import shell, user_namespace
from gpumagic.usercode.variables import names_read, variables_read

_BEGUN = re.compile(r"^get_ipython\(\)\.begin_ongpu\((.*)\)(?=;|$)", re.MULTILINE)


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
    """The orders of one cell. Making them marks what the ranks then have."""

    def __init__(
        self,
        tree: ast.Module,
        file: str,
        ranks: Sequence[RankEngine],
        asked: Sharing,
        every: Sequence[RankEngine],
    ) -> None:
        if line := awaits(tree):
            raise GpuError(f"line {line} awaits, and ranks have no loop; await it in a cell before")
        space, ipython = user_namespace(), shell()
        check(asked, tree, space)
        self.asked, self.cell = asked, uuid4().hex
        self.shared_out = SharedOut(asked, space, len(ranks)) if asked.split else None
        self.keep = (*asked.gather, *dict(asked.reduce))
        self.sent: dict[str, None] = dict.fromkeys(asked.split)
        self.sent_bytes = 0
        self._tree, self._file = tree, sending.file_in_rank(file)
        # Python, which an error's explanation reads; the magic's line as it was typed.
        self._source = _BEGUN.sub(_as_comment, "".join(linecache.getlines(file)), count=1)
        read = names_read(tree, ipython.transform_cell if ipython else str, space)
        names = [name for name in read if name not in asked.split]
        self._values, self._prints = sending.prints_of(variables_read(names, space))
        self._packed: dict[int, tuple[bytes, dict[str, str]]] = {}
        numbers = [rank.number for rank in ranks]
        own: list[deque[int]] = [deque([n]) for n in range(len(ranks))]
        queues = self.shared_out.queues if self.shared_out else own
        self.queues = dict(zip(numbers, queues, strict=True))
        self.parts = self.shared_out.total if self.shared_out else len(ranks)
        busy = [rank for rank in ranks if self.queues[rank.number]]
        self._pack(busy, every)

    def _pack(self, ranks: Sequence[RankEngine], every: Sequence[RankEngine]) -> None:
        alike: dict[int, list[RankEngine]] = {}
        for rank in ranks:
            alike.setdefault(id(rank.has), []).append(rank)
        for group in alike.values():
            has = group[0].has
            if any(rank.has is has and rank not in group for rank in every):
                has = has.copy()  # others are not sent the same
            wanted = has.wanted(self._prints)
            sources = {self._file: self._source}
            packed = sending.pack({n: self._values[n] for n in wanted}, has.tensors, sources)
            has.names.update({name: self._prints[name] for name in wanted})
            told = (n for n in wanted if not isinstance(self._values[n], ModuleType))
            self.sent.update(dict.fromkeys(told))
            for rank in group:
                rank.has = has
                self._packed[rank.number] = packed, sources
                self.sent_bytes += len(packed) if wanted else 0

    def unsent(self, ranks: Sequence[RankEngine]) -> list[RankEngine]:
        """Those to which their variables did not go, for the cell ended before."""
        return [rank for rank in ranks if rank.number in self._packed]

    def order(self, rank: RankEngine, part: int) -> CellOrder:
        """What a rank is to run for a part; the variables go with its first."""
        packed, sources = self._packed.pop(rank.number, (b"", {self._file: self._source}))
        given = b""
        if self.shared_out is not None:
            given = sending.pack(self.shared_out.part(part))
            self.sent_bytes += len(given)
        return CellOrder(self.cell, self._tree, self._file, sources, packed, given, self.keep)


def without_loss(ranks: Sequence[RankEngine]) -> None:
    """Forget what ranks have: a rank has lost something, and all is sent again."""
    for rank in ranks:
        rank.has = sending.Has()


def values_of(packed: Sequence[bytes]) -> list[Any]:
    """Values that came back; None for none."""
    return [sending.unpack(each) if each else None for each in packed]
