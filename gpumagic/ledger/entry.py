"""Record each copy between devices and each wait of the host, by line, operator and devices.

Plain data: what a watch has counted is told by it, and what a dry run has predicted, with no times.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpumagic.display.table import Shown
from gpumagic.usercode.lines import UserLine


@dataclass(frozen=True)
class Entry:
    """What one operator did at one line, all its calls together."""

    # "copy": bytes went from one device to another; "wait": the host waited for a result that
    # decides a value or a shape; "placement": a result is on another device than was asked for.
    kind: str
    operator: str  # torch's own name: "copy_", "item", "nonzero", "index" …; JAX: see `frameworks`
    source: str  # a device, such as "cuda:1" or "cpu"
    destination: str
    count: int  # copies, or waits: a call may wait more than once
    nbytes: int  # in all of them; a wait reads few: an element, or the size of a result
    # Of copies: on a real GPU, device time between two events of the stream, else the time of the
    # call. Of waits: the time for which the host stood still. None where it is only predicted.
    seconds: float | None
    # No device was named: `.item()`, `print`, a mask, an index of the CPU. `.to`, `.cpu`, `copy_`,
    # `device=` and `synchronize()` are explicit.
    implicit: bool
    where: UserLine | None = None  # in the user's own code; None if no code of the user's did
    code: str = ""  # the expression there
    # "print", "display" (the notebook showed a value), "loader" (a batch that `%%ongpu` brought),
    # "fix" (`--fix` did), "backward", or nothing.
    via: str = ""
    within: str = ""  # the library's module that did it by itself, such as "torch.optim.lbfgs"
    calls: int = 0  # of printing: how often a tensor was printed; else `count`
    sites: int = 1  # places in the line that made them: two in `print(x); print(y)`
    repeats: int = 0  # copies of the very tensor that the copy before had copied, unchanged
    blocking: int = 0  # copies that the host waited for
    # Whether the host's side lay in pinned memory; None where there is none, or it differed.
    pinned: bool | None = None
    names: tuple[str, ...] = ()  # of the variables that were copied, or that held what was
    framework: str = ""  # whose arrays: "JAX"; nothing for torch's
    unsized: bool = False  # the bytes of some of its copies are not known, and not in `nbytes`
    untimed: bool = False  # its seconds are a part of its operation's, and not known

    @property
    def file(self) -> str | None:
        """``"In [3]"`` for a cell, ``"train.py"`` for a file; None if no code of the user's did."""
        return None if self.where is None else self.where.label

    @property
    def line(self) -> int | None:
        """The line's number in its cell or file."""
        return None if self.where is None else self.where.line

    @property
    def direction(self) -> str:
        """``"host_to_device"``, ``"device_to_host"`` or ``"device_to_device"``."""
        if self.source == "cpu":
            return "host_to_device"
        return "device_to_host" if self.destination == "cpu" else "device_to_device"


@dataclass(frozen=True, repr=False)
class Ledger(Shown):
    """Every copy between devices and every wait of a stretch of code; displays as a table."""

    entries: tuple[Entry, ...] = ()  # those in a file together, in the order of their lines
    virtual: bool = False  # on virtual GPUs, whose times say nothing about a GPU

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def copies(self) -> tuple[Entry, ...]:
        """The entries that are copies."""
        return tuple(e for e in self.entries if e.kind == "copy")

    @property
    def transfers(self) -> int:
        """How many copies between devices there were."""
        return sum(e.count for e in self.copies)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies between devices."""
        return sum(e.nbytes for e in self.copies)

    @property
    def waits(self) -> int:
        """How often the host waited for a result, copies apart."""
        return sum(e.count for e in self.entries if e.kind == "wait")

    @property
    def implicit(self) -> int:
        """How many of the copies and waits were implicit."""
        return sum(e.count for e in self.entries if e.implicit)

    @property
    def predicted(self) -> bool:
        """Whether any of it was only predicted, as by a dry run: then there are no times."""
        return any(e.seconds is None for e in self.entries)


def merged(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """One entry for each line, operator, way and pair of devices, in the order of the lines."""
    found: dict[tuple[object, ...], Entry] = {}
    for e in entries:
        line = e.where and (e.where.file, e.where.line)
        key = (line, e.kind, e.operator, e.source, e.destination, e.implicit, e.via, bool(e.within))
        found[key] = _sum(found[key], e) if key in found else e
    return tuple(sorted(found.values(), key=lambda e: (e.file or "~", e.line or 0)))


def _sum(a: Entry, b: Entry) -> Entry:
    return replace(
        a if a.count >= b.count else b,
        count=a.count + b.count,
        nbytes=a.nbytes + b.nbytes,
        seconds=None if a.seconds is None or b.seconds is None else a.seconds + b.seconds,
        calls=a.calls + b.calls,
        # A call may be two instructions of one expression, and so it is from two threads.
        sites=max(a.sites, b.sites) if a.code == b.code else a.sites + b.sites,
        repeats=a.repeats + b.repeats,
        blocking=a.blocking + b.blocking,
        unsized=a.unsized or b.unsized,
        pinned=a.pinned if a.pinned == b.pinned else None,
        names=tuple(dict.fromkeys((*a.names, *b.names))),
    )
