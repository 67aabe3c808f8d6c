"""Plan what each rank runs, send it the variables it lacks, or predict the cell.

A variable is sent if the rank does not have it, or if the notebook has assigned or changed it
since. A value that the rank changed stays as it is until then. Only what a rank confirms counts as
sent, so a refused cell changes nothing.
"""

import ast
import linecache
import re
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from uuid import uuid4

import ipyparallel

from gpumagic.cluster import engine, sending
from gpumagic.cluster.engine import CellOrder, Outcome
from gpumagic.cluster.engines import Engines, RankEngine, RanksError, interrupt
from gpumagic.cluster.scattered import SharedOut, Sharing, check
from gpumagic.cluster.sending import Has, Parcel, Receipt
from gpumagic.display.progress_line import ProgressLine
from gpumagic.dryrun.dry_cell import dry_run_cell
from gpumagic.dryrun.result import DryRun
from gpumagic.errors import GpuError
from gpumagic.usercode.files import shell, user_namespace
from gpumagic.usercode.program import awaits
from gpumagic.usercode.variables import names_read, variables_read

_TRIES = 4


class Delivery:
    """The variables of one cell on their way to the ranks."""

    def __init__(self, values: Mapping[str, Any], prints: Mapping[str, bytes]) -> None:
        self._values, self._prints = values, prints
        self.sent: dict[str, bool] = {}  # whether ranks had another value of that name
        self.nbytes = 0
        self.kept: dict[str, None] = {}  # names that were changed here and in ranks
        self.sources: dict[str, str] = {}  # of the functions among them

    def deliver(self, engines: Engines, ranks: Sequence[RankEngine]) -> None:
        """Have all ranks take what they lack. Raises `GpuError`, and `RanksError` of one."""
        for _ in range(_TRIES):
            new: dict[int, Has] = {}
            parcels = self._parcels(ranks, new)
            asked = [(rank, engines.ask(rank, engine.receive, each)) for rank, each in parcels]
            receipts = [(rank, engines.answer(each)) for rank, each in asked]
            again = [self._again(rank, receipt, new) for rank, receipt in receipts]
            if not any(again):
                return
        raise GpuError("the ranks do not keep what the cell reads; type %gpucluster stop")

    def _parcels(
        self, ranks: Sequence[RankEngine], new: dict[int, Has]
    ) -> list[tuple[RankEngine, Parcel]]:
        made: dict[int, tuple[Parcel, Has]] = {}
        found = []
        for rank in ranks:
            if id(rank.has) not in made:
                made[id(rank.has)] = self._parcel(rank.has)
            parcel, new[rank.number] = made[id(rank.has)]
            self.nbytes += len(parcel.variables)
            if parcel.variables:
                found.append((rank, parcel))
        return found

    def _parcel(self, has: Has) -> tuple[Parcel, Has]:
        """For ranks that have this, and what they have then."""
        wanted, then = has.wanted(self._prints), has.copy()
        if not wanted:
            return Parcel(), has
        values = {name: self._values[name] for name in wanted}
        packed = sending.pack(values, then.tensors, self.sources)
        then.mark(wanted, self._values, self._prints)
        careful = [n for n in wanted if n in has.names and has.objects.get(n) == id(values[n])]
        for name in wanted:
            if not isinstance(values[name], ModuleType):
                self.sent[name] = name in has.names
        return Parcel(packed, tuple(careful)), then

    def _again(self, rank: RankEngine, receipt: Receipt, new: Mapping[int, Has]) -> bool:
        """Note what a rank has taken; whether it is to be sent something once more."""
        if receipt.error is not None:
            raise RanksError(rank.number, receipt.error, "", ())
        took = not (receipt.lacking or receipt.own)
        rank.has = new[rank.number] if took else rank.has.copy()
        if receipt.lacking:
            rank.has.tensors.clear()
        rank.has.mark(receipt.own, self._values, self._prints)
        self.kept |= dict.fromkeys(receipt.own)
        for name in receipt.own:
            self.sent.pop(name, None)
        return not took


def taken_as_sent(ranks: Sequence[RankEngine], names: Iterable[str]) -> None:
    """Leave variables of the ranks as they are until the notebook's of these names change."""
    space, prints = user_namespace(), dict[str, bytes]()
    for name in space.keys() & set(names):
        with suppress(GpuError):  # it cannot be sent at all
            prints[name] = sending.fingerprint(name, space[name])
    if prints:
        _changed(ranks, lambda has: has.mark(prints, space, prints))


def to_be_sent(ranks: Sequence[RankEngine], names: Iterable[str]) -> None:
    """Send the notebook's variables of these names with the next cell that reads them."""
    names = list(names)
    _changed(ranks, lambda has: has.forget(names))


def _changed(ranks: Sequence[RankEngine], change: Any) -> None:
    made: dict[int, Has] = {}
    for rank in ranks:
        if id(rank.has) not in made:
            made[id(rank.has)] = rank.has.copy()
            change(made[id(rank.has)])
    for rank in ranks:
        rank.has = made[id(rank.has)]


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


_LOOK_S, _PATIENCE_S, _END_S = 0.1, 2.0, 5.0


def foretell(engines: Engines, tree: ast.Module, file: str, on: str | None) -> DryRun:
    """What each rank would need for a cell: of cards, ``"8 x H100 80GB"``, else where it is.

    Raises `GpuError`, and KeyboardInterrupt.
    """
    rank = engines.ranks[0]
    orders = Orders(tree, file, [rank], Whole())
    orders.deliver(engines)
    asked = engines.ask(rank, follow, orders.order(0), on or f"{len(engines.ranks)} x cuda:0")
    try:
        found: DryRun = _awaited(asked)
    except KeyboardInterrupt:
        engines.signal([rank], signal.SIGINT)
        asked.wait(_END_S)
        raise interrupt("the dry run was ended; nothing of yours has changed", ()) from None
    except ipyparallel.error.RemoteError as error:
        raise GpuError(str(error.evalue)) from None
    return found


def _awaited(asked: Any) -> Any:
    began = time.monotonic()
    with ProgressLine(shell()) as line:
        while not asked.ready():
            asked.wait(_LOOK_S)
            seconds = time.monotonic() - began
            if seconds > _PATIENCE_S:
                line.update(f"dry run in rank 0: {seconds:.0f} s; Ctrl-C ends it")
    return asked.get()


def follow(order: CellOrder, on: str) -> DryRun:
    """In an engine: the dry run of a cell."""
    engine.bring(order)
    return dry_run_cell(shell(), order.tree, order.file, on)
