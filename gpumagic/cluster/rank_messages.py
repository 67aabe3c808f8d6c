"""Plan what each rank runs, and send it the variables it lacks.

A variable is sent if the rank does not have it, or if the notebook has assigned or changed it
since. A value that the rank changed stays as it is until then. Each rank remembers which of the
notebook's values it has received, so a rank that was replaced lacks all.
"""

import ast
import linecache
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any
from uuid import uuid4

from gpumagic.cluster import engine, sending
from gpumagic.cluster.engine import CellOrder, Wants
from gpumagic.cluster.engines import Engines, RankEngine, RanksError
from gpumagic.cluster.scattered import Sharing, SplitValues, check
from gpumagic.cluster.sending import Print
from gpumagic.errors import GpuError
from gpumagic.usercode.files import shell, user_namespace
from gpumagic.usercode.program import awaits
from gpumagic.usercode.variables import names_assigned, names_read, variables_read


def prints_here(names: Iterable[str]) -> dict[str, Print]:
    """Return the fingerprints of the notebook's variables that can be sent."""
    space, prints = user_namespace(), dict[str, Print]()
    for name in space.keys() & set(names):
        with suppress(GpuError):  # it cannot be sent
            prints[name] = sending.fingerprint(name, space[name]), id(space[name])
    return prints


class Orders:
    """The orders of one cell, and the delivery of its variables; call `deliver` first."""

    def __init__(
        self, tree: ast.Module, file: str, ranks: Sequence[RankEngine], asked: Sharing
    ) -> None:
        if line := awaits(tree):
            raise GpuError(f"line {line} awaits, and ranks have no loop; await it in a cell before")
        space, ipython = user_namespace(), shell()
        check(asked, tree, space)
        self.asked, self.cell = asked, uuid4().hex
        self.split = SplitValues(asked, space, len(ranks))
        self.keep = (*asked.gather, *dict(asked.reduce))
        self._tree, self._file = tree, sending.file_in_rank(file)
        self._ranks = ranks
        # The text of the cells by file, to explain errors in ranks.
        self._sources = {self._file: "".join(linecache.getlines(file))}
        read = names_read(tree, ipython.transform_cell if ipython else str)
        names = [name for name in read if name not in asked.split]
        hidden = ipython.user_ns_hidden if ipython else {}
        found = sending.prints_of(variables_read(names, space), space, hidden)
        self._values, self._prints = found
        self._assigned = prints_here(names_assigned(tree))
        self._sent: dict[str, bool] = {}  # whether ranks had another value of that name
        self.sent_bytes = 0
        self.kept: dict[str, None] = {}  # names that changed both here and in ranks
        self.queues = {r.number: queue for r, queue in zip(ranks, self.split.queues, strict=True)}

    def deliver(self, engines: Engines) -> None:
        """Send ranks with work what they lack. Raises `GpuError`, and a rank's `RanksError`."""
        if not self._prints:
            return
        busy = [rank for rank in self._ranks if self.queues[rank.number]]
        groups: dict[Any, list[tuple[RankEngine, Wants]]] = {}  # of ranks that want the same
        found = engines.answers(busy, engine.wanted, self._prints)
        for rank, wants in zip(busy, found, strict=True):
            key = *wants.names.items(), *wants.kept, *wants.tensors.items()
            groups.setdefault(key, []).append((rank, wants))
        for group in groups.values():
            self._send(engines, [rank for rank, _ in group], group[0][1])

    def _send(self, engines: Engines, ranks: Sequence[RankEngine], wants: Wants) -> None:
        """Send ranks that want the same what they lack."""
        values = {n: value for n, value in self._values.items() if n in wants.names}
        data = sending.pack(values, wants.tensors, self._sources) if values else b""
        self.sent_bytes += len(data) * len(ranks)
        self.kept |= dict.fromkeys(wants.kept)
        for name, value in values.items():
            if not isinstance(value, ModuleType):
                self._sent[name] = wants.names[name]
        prints = {name: self._prints[name] for name in (*values, *wants.kept)}
        if not prints:
            return
        errors = engines.answers(ranks, engine.receive, data, prints)
        for rank, error in zip(ranks, errors, strict=True):
            if error is not None:
                raise RanksError(rank.number, error, "", ())

    @property
    def sent(self) -> tuple[str, ...]:
        """Return the names that were sent, for the report."""
        sent = self._sent.items()
        return (*self.asked.split, *(f"{name} again" if again else name for name, again in sent))

    def order(self, part: int) -> CellOrder:
        """Return the order of a rank for a part."""
        given = sending.pack(self.split.part(part)) if self.asked.split else b""
        self.sent_bytes += len(given)
        return CellOrder(
            self.cell, self._tree, self._file, self._sources, given, self.keep, self._assigned
        )


def values_of(packed: Sequence[bytes]) -> list[Any]:
    """Unpack returned values; None if there are none."""
    return [sending.unpack(each) if each else None for each in packed]
