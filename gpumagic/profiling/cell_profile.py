"""Hold the profile of a cell: its lines, their operators, and why the device was idle."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpumagic.display.table import Shown
from gpumagic.usercode.files import UserLine

Kind = Literal["loader", "copy", "wait", "launch", "python"]
"""A `DataLoader`, a copy, a wait of the host, the start of operators, the user's plain Python."""


class Operator(NamedTuple):
    """Record the calls of one operator at one line; seconds are without those that it called."""

    name: str
    calls: int
    host: float
    device: float | None

    @property
    def cost(self) -> float:
        """The longer one of its times."""
        return max(self.host, self.device or 0.0)


class ProfiledLine(NamedTuple):
    """Record one line of the user's code; None in `where` is for the time between lines.

    `device` and `launches` are None if the profiler does not see the device. `operators` are
    sorted, the dearest first.
    """

    where: UserLine | None
    host: float
    device: float | None
    launches: int | None
    copies: int
    waits: int
    operators: tuple[Operator, ...]


class Cause(NamedTuple):
    """Name a cause of idle time, and the line with most of it; seconds are None if unknown."""

    kind: Kind
    where: UserLine | None
    seconds: float | None


class Moment(NamedTuple):
    """Record one moment: the host's line, the lanes, and the cause if no kernel ran."""

    line: UserLine | None
    busy: bool
    copying: bool
    cause: Cause | None


@dataclass(frozen=True, repr=False)
class CellProfile(Shown):
    """Record where the time of one cell went.

    Attributes
    ----------
    device : str
        ``"cuda:1"``.
    virtual : bool
        Whether it is a virtual GPU, which has no time of its own.
    seconds : float
        From the cell's start until the device had finished, without what tracing of lines took.
    busy : float or None
        Seconds in which the device ran at least one kernel; None if the profiler does not see it.
    lines : tuple of ProfiledLine
        The dearest first; all operators have the sums of torch's own table.
    causes : tuple of Cause
        Why the device was idle, or what the host did if the device is not seen; the longest first.
    moments : tuple of Moment
        Samples at even distances, for the timeline.
    added : float
        Seconds that the recording took: what was measured of the lines, and 2 µs for each event.
    saved : str
        The file of the trace, for Perfetto.
    """

    device: str
    virtual: bool
    seconds: float
    busy: float | None
    lines: tuple[ProfiledLine, ...]
    causes: tuple[Cause, ...]
    moments: tuple[Moment, ...]
    added: float = 0.0
    saved: str = ""
