"""Plan what each rank runs, send it the variables it lacks, or predict the cell.

A variable is sent if the rank does not have it, or if the notebook has assigned or changed it
since. A value that the rank changed stays as it is until then. Only what a rank confirms counts as
sent, so a refused cell changes nothing.
"""

import ast
import linecache
import re
import signal
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
from gpumagic.cluster.scattered import Sharing, SplitValues, check
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
    """The delivery of a cell's variables to the ranks."""

    def __init__(self, values: Mapping[str, Any], prints: Mapping[str, bytes]) -> None:
        self._values, self._prints = values, prints
        self.sent: dict[str, bool] = {}  # whether ranks had another value of that name
        self.nbytes = 0
        self.kept: dict[str, None] = {}  # names that changed both here and in ranks
        self.sources: dict[str, str] = {}  # names of functions

    def deliver(self, engines: Engines, ranks: Sequence[RankEngine]) -> None:
        """Send all ranks what they lack. Raises `GpuError`, and a rank's `RanksError`."""
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
        """Return the parcel for ranks with these values, and their values after it."""
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
        """Record a rank's receipt; return whether something must be sent again."""
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
    """Keep the ranks' values of these names until the notebook's change."""
    space, prints = user_namespace(), dict[str, bytes]()
    for name in space.keys() & set(names):
        with suppress(GpuError):  # it cannot be sent
            prints[name] = sending.fingerprint(name, space[name])
    if prints:
        _changed(ranks, lambda has: has.mark(prints, space, prints))


def to_be_sent(ranks: Sequence[RankEngine], names: Iterable[str]) -> None:
    """Send these variables of the notebook with the next cell that reads them."""
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
    """A request without split variables: every rank runs the whole cell."""

    split: tuple[str, ...] = ()
    gather: tuple[str, ...] = ()
    reduce: tuple[tuple[str, str], ...] = ()
    chunk: int | None = None


class Orders:
    """The orders of one cell; call `deliver` first."""

    def __init__(
        self, tree: ast.Module, file: str, ranks: Sequence[RankEngine], asked: Sharing
    ) -> None:
        if line := awaits(tree):
            raise GpuError(f"line {line} awaits, and ranks have no loop; await it in a cell before")
        space, ipython = user_namespace(), shell()
        check(asked, tree, space)
        self.asked, self.cell = asked, uuid4().hex
        self.split = SplitValues(asked, space, len(ranks)) if asked.split else None
        self.keep = (*asked.gather, *dict(asked.reduce))
        self._tree, self._file = tree, sending.file_in_rank(file)
        self._ranks = ranks
        # Python for the explanation of errors; the magic's line as typed.
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
        queues = self.split.queues if self.split else own
        self.queues = dict(zip(numbers, queues, strict=True))
        self.parts = self.split.total if self.split else len(ranks)

    def deliver(self, engines: Engines) -> None:
        """Send the variables that ranks with work lack."""
        busy = [rank for rank in self._ranks if self.queues[rank.number]]
        self.delivery.deliver(engines, busy)

    @property
    def sent(self) -> tuple[str, ...]:
        """Return the names that were sent, in words."""
        sent = self.delivery.sent.items()
        return (*self.asked.split, *(f"{name} again" if again else name for name, again in sent))

    @property
    def sent_bytes(self) -> int:
        return self.delivery.nbytes + self.split_bytes

    def order(self, part: int) -> CellOrder:
        """Return the order of a rank for a part."""
        given = b""
        if self.split is not None:
            given = sending.pack(self.split.part(part))
            self.split_bytes += len(given)
        return CellOrder(self.cell, self._tree, self._file, self.delivery.sources, given, self.keep)

    def ended(self, outcomes: Iterable[Outcome]) -> None:
        """Record that the cell's variables are the ranks' own from then on."""
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
    """Unpack returned values; None if there are none."""
    return [sending.unpack(each) if each else None for each in packed]


_END_S = 5.0


def predict(engines: Engines, tree: ast.Module, file: str, on: str | None) -> DryRun:
    """Predict a cell's memory and traffic on each rank: on ``"8 x H100 80GB"``, or here.

    Raises `GpuError`, and KeyboardInterrupt.
    """
    rank = engines.ranks[0]
    orders = Orders(tree, file, [rank], Whole())
    orders.deliver(engines)
    asked = engines.ask(rank, follow, orders.order(0), on or f"{len(engines.ranks)} x cuda:0")
    try:
        with ProgressLine(shell()) as line:
            line.update("dry run in rank 0; Ctrl-C ends it")
            found: DryRun = asked.get()
    except KeyboardInterrupt:
        engines.signal([rank], signal.SIGINT)
        asked.wait(_END_S)
        raise interrupt("the dry run was ended; nothing of yours has changed", ()) from None
    except ipyparallel.error.RemoteError as error:
        raise GpuError(str(error.evalue)) from None
    return found


def follow(order: CellOrder, on: str) -> DryRun:
    """Dry-run a cell, in an engine."""
    engine.bring(order)
    return dry_run_cell(shell(), order.tree, order.file, on)
