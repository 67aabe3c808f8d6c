"""What crosses between devices in a dry run, gathered by line."""

import sys
from dataclasses import dataclass

from gpumagic.dryrun.running_line import BEFORE, Place, place


@dataclass
class Transfer:
    """Copies, or waits for a value, of one kind at one line.

    Attributes
    ----------
    kind : str
        ``"copy"``: bytes go from one device to the other. ``"wait"``: the host waits for a value.
    operator : str
        Such as ``"to"``, ``"copy_"``, ``"item"``; ``"move"`` for what `%%ongpu` brings.
    source, destination : str
        Devices, such as ``"cpu"`` and ``"cuda:1"``.
    nbytes : int
        Bytes in all.
    count : int
        How often.
    where : Place
        The line; `line` 0 is before the cell.
    """

    kind: str
    operator: str
    source: str
    destination: str
    nbytes: int
    count: int
    where: Place

    @property
    def direction(self) -> str:
        """``"host→device"``, ``"device→host"`` or ``"device→device"``."""
        ends = ("host" if d == "cpu" else "device" for d in (self.source, self.destination))
        return "→".join(ends)


class Transfers:
    """Notes transfers, one entry for each line, kind and pair of devices."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Transfer] = {}
        self.silent = False

    def note(self, kind: str, operator: str, source: str, destination: str, nbytes: int) -> None:
        if self.silent or source == destination or "meta" in (source, destination):
            return
        self.add(kind, operator, source, destination, nbytes, place(sys._getframe(1)))

    def add(
        self,
        kind: str,
        operator: str,
        source: str,
        destination: str,
        nbytes: int,
        where: Place | None,
    ) -> None:
        where = where or BEFORE
        key = (kind, operator, source, destination, where)
        entry = self._found.setdefault(
            key, Transfer(kind, operator, source, destination, 0, 0, where)
        )
        entry.nbytes += nbytes
        entry.count += 1

    def all(self) -> tuple[Transfer, ...]:
        return tuple(self._found.values())
