"""Compare two reports on memory by name: what grew or shrank, what is new, what has gone."""

from dataclasses import dataclass

from gpumagic.display.table import Shown
from gpumagic.memory.memory_report import MemoryHolder, MemoryReport


@dataclass(frozen=True)
class MemoryChange:
    """A holder whose bytes on a GPU changed.

    Attributes
    ----------
    holder : MemoryHolder
        As it is now; as it was, where it has gone.
    before, after : int
        Bytes; 0 before for what is new, and after for what has gone.
    """

    holder: MemoryHolder
    before: int
    after: int

    @property
    def word(self) -> str:
        """``"new"``, ``"gone"``, ``"grew"`` or ``"shrank"``."""
        if not self.before or not self.after:
            return "gone" if self.before else "new"
        return "grew" if self.after > self.before else "shrank"


@dataclass(frozen=True, repr=False)
class MemoryChanges(Shown):
    """What changed from one report to another.

    Attributes
    ----------
    allocated : tuple of (str, int, int)
        Of each GPU the bytes allocated, before and after.
    changes : tuple of MemoryChange
        The largest first.
    unchanged : int
        How many holders hold what they held.
    """

    allocated: tuple[tuple[str, int, int], ...]
    changes: tuple[MemoryChange, ...]
    unchanged: int


def changes(before: MemoryReport, after: MemoryReport) -> MemoryChanges:
    """What changed, by any of the names that a holder has."""
    gone = {(h.device, h.path): h for h in before.holders}
    # A name may go while what it held stays under another one.
    known = {(h.device, name): h for h in before.holders for name in h.aliases} | gone
    found, unchanged = [], 0
    for holder in after.holders:
        names = ((holder.device, name) for name in (holder.path, *holder.aliases))
        was = next((known[name] for name in names if name in known), None)
        if was is None or gone.pop((was.device, was.path), None) is None:
            found.append(MemoryChange(holder, 0, holder.nbytes))
        elif was.nbytes != holder.nbytes:
            found.append(MemoryChange(holder, was.nbytes, holder.nbytes))
        else:
            unchanged += 1
    found += [MemoryChange(holder, holder.nbytes, 0) for holder in gone.values()]
    found.sort(key=lambda change: -abs(change.after - change.before))
    held = {device.device: [device.allocated or 0, 0] for device in before.devices}
    for device in after.devices:
        held.setdefault(device.device, [0, 0])[1] = device.allocated or 0
    allocated = tuple((name, old, new) for name, (old, new) in held.items())
    return MemoryChanges(allocated, tuple(found), unchanged)
