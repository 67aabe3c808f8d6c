"""Keep what a dry run found: plain records, shown as text or HTML."""

from dataclasses import dataclass, field
from typing import Any

from gpumagic.device.cards import Card
from gpumagic.display.table import Shown
from gpumagic.ledger.entry import Ledger
from gpumagic.moving.moved import Moved
from gpumagic.usercode.lines import UserLine

LIMIT_S = 60.0
"""After so long a dry run stops, with the result up to there."""


@dataclass(frozen=True)
class Assigned:
    """A variable that the code assigns."""

    name: str
    kind: str  # "float32[128, 10]" for a tensor, else in words: "Sequential, 4 parameters"
    device: str = ""  # several are joined by a comma, and what is on none has none
    nbytes: int = 0  # of its tensors
    shape: tuple[int, ...] | None = None  # of a tensor, as is its dtype
    dtype: Any = None


@dataclass(frozen=True)
class Peak:
    """The memory of one device, in bytes: at least so much.

    Workspaces of cuBLAS and cuDNN, and the allocator's fragmentation, are not in it.
    """

    device: str
    peak: int  # the most at once, with what is there already: torch's max_memory_allocated
    needed: int  # of these, what is not allocated yet, what `%%ongpu` brings included
    free: int | None  # what there is for them now
    at: UserLine | None  # the line of the peak

    @property
    def fits(self) -> bool | None:
        """Whether there is room for it now; None where that is not known."""
        return None if self.free is None else self.needed <= self.free


CARD_STANDS_AS = "cuda:0"
"""What a card that is not here is called where its code runs dry."""


@dataclass(frozen=True)
class OnCard:
    """Whether the code would fit on a card that is not here."""

    card: Card
    needed: int  # bytes, at least
    at: UserLine | None  # the first line that needs more than there is; None before the first one

    @property
    def left(self) -> int:
        """Bytes that it leaves; below zero where it does not fit."""
        return self.card.usable - self.needed

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.left >= 0


@dataclass(frozen=True)
class Collective:
    """What one rank has part in, of one kind and among so many ranks."""

    name: str  # torch.distributed's: "all_reduce"; or "send", "recv"
    ranks: int
    calls: int
    nbytes: int  # of the whole tensors: what all_gather gives, what reduce_scatter takes

    @property
    def sent(self) -> int:
        """Bytes that the rank sends where ranks form a ring, as NCCL's own tests count them.

        With S for the whole: 2 (n - 1) / n S for all_reduce, (n - 1) / n S for all_gather,
        reduce_scatter, all_to_all, gather and scatter, S for broadcast, reduce and send
        (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
        """
        if self.name in ("broadcast", "reduce", "send", "recv"):
            return 0 if self.name == "recv" or self.ranks == 1 else self.nbytes
        passes = 2 if self.name == "all_reduce" else 1
        return passes * self.nbytes * (self.ranks - 1) // self.ranks


@dataclass(frozen=True)
class OnRank:
    """What one rank of many would need and send."""

    rank: int
    peak: Peak | None  # on its device; None without tensors there
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Unknown:
    """Where the dry run met what only data can tell, or what it does not do, and whether it ended
    there."""

    where: UserLine | None
    reason: str
    ended: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" if self.where else self.reason


@dataclass(frozen=True)
class Mismatch:
    """An operation between devices that would fail: torch's words, and the explanation of them."""

    where: UserLine | None
    error: str
    explanation: str | None = None
    html: str | None = None

    def __str__(self) -> str:
        return self.error if self.explanation is None else self.explanation


@dataclass(frozen=True, repr=False)
class DryRun(Shown):
    """What a cell or a function would do.

    Attributes
    ----------
    device : str
        Where it would be placed; nothing for where it is.
    assigned : tuple of Assigned
        Variables that it assigns, and ``return`` for what a function returns.
    peak : dict of str to Peak
        By device.
    moved : tuple of Moved
        What `%%ongpu` would bring there before the code.
    ledger : Ledger
        Copies between devices and waits of the host, by line. How long they take is not known.
    unknown : tuple of Unknown
        What could not be known or was left out; the last one may be where the dry run ended.
    mismatches : tuple of Mismatch
        The operation between devices at which the code would fail.
    error : str or None
        Another error at which it would fail.
    error_at : UserLine or None
    printed : str
        What it printed; a ``?`` is a value that depends on data.
    operators : int
        How many operators were followed.
    backward : bool
        Whether a backward pass ran.
    seconds : float
        What the dry run took, the copy of the process included.
    virtual : bool
        Whether the device is a virtual GPU.
    cards : tuple of OnCard
        The cards that it was asked for, which are not here. `device` is the first one's name, and
        in `peak` it is ``cuda:0``.
    world : int
        Of how many ranks one was followed.
    ranks : tuple of OnRank
        Those that were followed, where there are several: the first and the last. All else is of
        the first; of the last where only that one does not come to the end.
    """

    device: str
    assigned: tuple[Assigned, ...] = ()
    peak: dict[str, Peak] = field(default_factory=dict)
    moved: tuple[Moved, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    unknown: tuple[Unknown, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    error: str | None = None
    error_at: UserLine | None = None
    printed: str = ""
    operators: int = 0
    backward: bool = False
    seconds: float = 0.0
    virtual: bool = False
    cards: tuple[OnCard, ...] = ()
    world: int = 1
    ranks: tuple[OnRank, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether it followed the code to its end."""
        ended = any(unknown.ended for unknown in self.unknown)
        return not (ended or self.mismatches or self.error)
