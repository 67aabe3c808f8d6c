"""Record an error for want of memory, explained: plain data, no tensor and no frame."""

from dataclasses import dataclass

from gpumagic.display.table import Shown
from gpumagic.memory.memory_report import DeviceMemory


@dataclass(frozen=True)
class Remedy:
    """Something that would help.

    Attributes
    ----------
    do : str
        What to type or to change; code stands between back-ticks.
    gives : int or None
        The bytes that it gives, or saves; None where nothing has shown how many.
    fits : bool or None
        Whether the cell then runs to its end, as a dry run has shown; None where none did.
    """

    do: str
    gives: int | None = None
    fits: bool | None = None


@dataclass(frozen=True, repr=False)
class OutOfMemory(Shown):
    """An error for want of GPU memory, explained.

    Attributes
    ----------
    expression, line, label : str, int, str
        What failed, as the user wrote it, in which line of which cell or file.
    wanted : int or None
        The bytes that were asked for at once.
    device : DeviceMemory
        The GPU's figures at that moment, and who holds its memory, the largest first.
    cause : str
        ``"twice"``, ``"too large"``, ``"limit"``, ``"pool"``, ``"others"``, ``"torn"``, ``"kept"``,
        ``"graphs"``, ``"optimizer"``, ``"foreach"``, ``"no backward"``, ``"grown"``, ``"copy"``,
        ``"load"``, ``"move"``, ``"handled"``, ``"batch"``, ``"number"``, ``"loop"``, ``"not read"``
        or ``"full"``.
    reason : str
        The cause in one sentence.
    remedies : tuple of Remedy
        What would help, what gives the most first.
    traceback_holds : int
        The bytes that only the frames of this error hold.
    """

    expression: str
    line: int
    label: str
    wanted: int | None
    device: DeviceMemory
    cause: str
    reason: str
    remedies: tuple[Remedy, ...]
    traceback_holds: int
