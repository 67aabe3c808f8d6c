"""Record what happened to one cell: plain data, whose view is elsewhere."""

from dataclasses import dataclass, field

from gpumagic.cell.fixed import Fixed
from gpumagic.device import Device
from gpumagic.display.table import Shown
from gpumagic.ledger.entry import Ledger
from gpumagic.ledger.memory_used import Memory
from gpumagic.moving.moved import Left, Moved, Moves


@dataclass(frozen=True)
class Batches:
    """Batches of `DataLoader`s that were brought to the device: how many, and bytes copied."""

    count: int = 0
    nbytes: int = 0


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """One cell on one device.

    Attributes
    ----------
    device : Device
        Where it ran.
    seconds : float
        From its first statement until the device had finished what it was given.
    waited : bool
        False when the wait was cut short (an interrupt, an error of the device).
    moved, left : tuple
        The variables brought to the device (`Moved`: name, bytes, sources), and those that were not
        (`Left`: name, reason).
    move_seconds : float
        The time the moves took, apart from `seconds`.
    returned : Moves or None
        What `--back` brought home after the cell; None without it.
    stays : bool
        Nothing was moved for good before in this notebook: what this moved is told to stay.
    batches : Batches
        What loaders brought while the cell ran.
    memory : tuple of Memory
        Every CUDA device on which the cell allocated; bytes.
    peak : MemoryPeak or None
        What the peak of its device was made of, with `--memory`.
    ledger : Ledger
        Every copy between devices and every wait while the cell ran. The batches are among them,
        what moved before it ran is not.
    ledger_complete : bool
        False where a fault of gpumagic itself kept copies or waits from being counted.
    fixed : tuple of Fixed
        The operands that `--fix` brought together.
    table : bool
        Show the ledger's table too (`--report`).
    made : bool
        The cell made arrays of another framework than torch, whose memory may not be known.
    elsewhere : str
        Where most of its work was, by the tensors that it made, if not on its own device: ``"all
        work was on cpu"``, ``"96 % of it ran on cuda:0"``; else empty.
    error : str or None
        The name of the exception that ended the cell.
    fault : str or None
        What the device itself reported at the wait.
    """

    device: Device
    seconds: float
    waited: bool = True
    moved: tuple[Moved, ...] = ()
    left: tuple[Left, ...] = ()
    move_seconds: float = 0.0
    returned: Moves | None = None
    stays: bool = False
    batches: Batches = Batches()
    memory: tuple[Memory, ...] = ()
    peak: Shown | None = None
    ledger: Ledger = field(default_factory=Ledger)
    ledger_complete: bool = True
    fixed: tuple[Fixed, ...] = ()
    table: bool = False
    made: bool = False
    elsewhere: str = ""
    error: str | None = None
    fault: str | None = None

    @property
    def moved_bytes(self) -> int:
        """Bytes copied before the cell ran."""
        return sum(m.nbytes for m in self.moved)

    @property
    def touched(self) -> bool:
        """Whether the cell had anything to do with a device: moved, copied, loaded or allocated."""
        copied = self.batches.count or self.ledger.entries
        return bool(self.moved or self.left or copied or self.memory or self.made)


_last: list[Report] = []


def keep_last(report: Report) -> None:
    """Have `last_report` give this one."""
    _last[:] = [report]


def last_report() -> Report | None:
    """The report of the last cell that ran on a device; None before the first.

    Examples
    --------
    >>> report = gpumagic.last_report()
    >>> report.seconds, report.moved_bytes
    (1.24, 1234944)
    """
    return _last[0] if _last else None
