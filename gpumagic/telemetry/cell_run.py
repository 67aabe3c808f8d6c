"""A cell that ran, as the server and the widget tell it; mirrored in ``js/src/snapshot.ts``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CellRun:
    """A cell that ran, or runs (``end`` is None).

    Parameters
    ----------
    id : str
        The same run told again has the same id.
    kernel, notebook : str, optional
    count : int, optional
        The number in brackets before the cell.
    start, end : float
        Seconds of Unix time.
    gpus : tuple of str
        UUIDs of the GPUs on which its kernel was seen to hold memory.
    """

    id: str
    kernel: str | None
    notebook: str | None
    count: int | None
    start: float
    end: float | None = None
    gpus: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "gpus": list(self.gpus)}
