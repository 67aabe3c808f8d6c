"""Bring the ranks the variables that a cell reads, before any of them runs it.

A name goes where it is missing, and again when the notebook's value is another object, or was
changed here. What a rank has changed itself it keeps, unless the notebook has made it anew. Only
what a rank says it has taken counts as sent: a cell that is refused changes nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from gpumagic.cluster import engine, sending
from gpumagic.cluster.engines import Engines, RankEngine
from gpumagic.cluster.ranks_error import RanksError
from gpumagic.cluster.sending import Has, Parcel, Receipt
from gpumagic.errors import GpuError
from gpumagic.usercode.files import user_namespace

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
