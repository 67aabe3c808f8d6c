"""Record how a cell went on the ranks, and what the ranks are: plain data, shown elsewhere."""

from dataclasses import dataclass, field
from typing import Any

from gpumagic.display.table import Shown


@dataclass(frozen=True)
class RankTime:
    """How one rank fared: seconds, the bytes of its peak (None if not known), parts that it ran."""

    rank: int
    seconds: float
    peak: int | None = None
    parts: int = 1
    virtual: bool = False
    device: str = ""  # in whose name a thread of this process ran

    @property
    def name(self) -> str:
        """``"rank 1"``, or ``"cuda:1"``."""
        return self.device or f"rank {self.rank}"


@dataclass(frozen=True, repr=False)
class RanksReport(Shown):
    """One cell on the ranks of a cluster, or on several devices of this process.

    Attributes
    ----------
    ranks : tuple of RankTime
        By rank; only those that ended by themselves.
    seconds : float
        Of all, from the order to the last answer.
    shared_out : str
        How many items each had: ``"17 prompts: 9 + 8"``; empty where nothing was split.
    sent : tuple of str
        The names that were sent to ranks, because they lacked them or had them otherwise.
    sent_bytes, sent_seconds : int, float
        To all ranks together, until the last one had it.
    returned_bytes : int
        Of the values that came back.
    moved_bytes : int
        Brought from the ranks' CPUs to their GPUs, all together.
    made : tuple of str
        What was set in the notebook.
    notes : tuple of str
        What else there is to know: a rank that was replaced, a group that was made anew.
    wrong : tuple of str
        What was not put together, and why: these variables are lists of their parts.
    """

    ranks: tuple[RankTime, ...]
    seconds: float
    shared_out: str = ""
    sent: tuple[str, ...] = ()
    sent_bytes: int = 0
    sent_seconds: float = 0.0
    returned_bytes: int = 0
    moved_bytes: int = 0
    made: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class RanksTable(Shown):
    """The ranks of a cluster: for each what it said of itself, and why it is gone if it is."""

    said: str
    rows: tuple[dict[str, Any], ...] = field(default=())
