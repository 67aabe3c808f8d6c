"""Record what was given back to the GPUs, by cause: plain data."""

from dataclasses import dataclass

from gpumagic.display.table import Shown
from gpumagic.memory.memory_report import MemoryHolder


@dataclass(frozen=True)
class Released:
    """What one cause had held.

    Attributes
    ----------
    cause : str
        ``"the exception of In [7]"``, ``"Out[3], _"``, ``"gradients"``, ``"batch"``.
    nbytes : dict of str to int
        Bytes of torch's allocator that came back, by device.
    held_by : tuple of str
        Who else holds what it had held, where nothing came back.
    """

    cause: str
    nbytes: dict[str, int]
    held_by: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Freed(Shown):
    """What `%gpufree` gave back.

    Attributes
    ----------
    released : tuple of Released
        What was let go, in the order in which it was; some may have freed nothing.
    kept : tuple of str
        Outputs that are variables too, and so were left: to let them go would free nothing.
    returned : dict of str to int
        Bytes that torch's allocator gave back to the driver, by device.
    allocated : dict of str to int
        What tensors still hold, by device.
    holders : tuple of MemoryHolder
        Those that still hold the most.
    debug_gone : bool
        The frames of an exception were let go: ``%debug`` has nothing to look into any more.
    skipped : tuple of str
        Of several names those that could not be deleted, each with why.
    """

    released: tuple[Released, ...]
    kept: tuple[str, ...]
    returned: dict[str, int]
    allocated: dict[str, int]
    holders: tuple[MemoryHolder, ...]
    debug_gone: bool
    skipped: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that tensors hold no longer, on all GPUs together."""
        return sum(sum(each.nbytes.values()) for each in self.released)
