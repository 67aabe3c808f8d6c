"""Record how a cell went on several devices of this process: plain data, shown elsewhere."""

from dataclasses import dataclass

from gpumagic.device import Device
from gpumagic.display.shown import Shown


@dataclass(frozen=True)
class DeviceTime:
    """How one device fared: seconds, the bytes of its peak, and how many parts it ran."""

    device: Device
    seconds: float = 0.0
    peak: int | None = None
    parts: int = 0


@dataclass(frozen=True)
class PartsDone:
    """How many parts are done."""

    done: int
    total: int
    where: str

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.done / self.total

    def __str__(self) -> str:
        return f"{self.where}: {self.done} of {self.total} parts"


@dataclass(frozen=True, repr=False)
class DevicesReport(Shown):
    """One cell on several devices, a thread for each.

    Attributes
    ----------
    devices : tuple of DeviceTime
        In the order of the line.
    seconds : float
        From the first statement until all devices had finished what they were given.
    shared_out : str
        How many items each had: ``"17 prompts: 9 + 8"``.
    sent : tuple of str
        The names of the variables that were copied to the devices.
    sent_bytes, sent_seconds : int, float
        To all devices together; the seconds apart from `seconds`.
    made : tuple of str
        What was set in the notebook, and how it came to be.
    notes : tuple of str
        What else there is to know.
    """

    devices: tuple[DeviceTime, ...]
    seconds: float
    shared_out: str
    sent: tuple[str, ...] = ()
    sent_bytes: int = 0
    sent_seconds: float = 0.0
    made: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
