"""Keep what a fit found: the largest value, and what each value that was tried needs."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from gpumagic.display.table import Shown


@dataclass(frozen=True)
class Tried:
    """One value that was tried; bytes beside what was allocated before."""

    value: float
    predicted: int | None = None  # by a dry run
    measured: int | None = None  # by a run on copies
    ran: bool | None = None  # whether a run went to its end; None without one

    @property
    def needed(self) -> int | None:
        """What it needs, as far as is known."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class Largest:
    """The largest value that fits on one GPU or card."""

    where: str
    free: int  # bytes that tensors could have
    room: int  # of them, those that the margin leaves
    value: float | None  # None where no value fits
    confirmed: bool = False  # by a run
    virtual: bool = False


@dataclass(frozen=True)
class Steps:
    """How a batch that is too large is worked through: in `count` steps of `size`."""

    target: int
    count: int
    size: int
    last: int  # the size of the last step


@dataclass(frozen=True, repr=False)
class Fit(Shown):
    """The largest value of a variable with which code fits into memory.

    Attributes
    ----------
    code : str
    name : str
        The variable.
    largest : tuple of Largest
        For the GPU, or for each card that was named.
    tried : tuple of Tried
        What each value needs that was tried, in ascending order.
    trains : bool or None
        Whether a backward pass ran; None where no dry run could tell.
    margin : float
        The part of the free memory that is left free.
    target : int or None
        The batch that is wanted in all.
    notes : tuple of str
        What the user should know of how it was found, a line each.
    interrupted : bool
        Whether Ctrl-C ended it: what was known by then is here.
    stopped : str
        Why larger values may fit too: at which value it stopped, and what ended it there.
    values : sequence of numbers
        The values that were named, in ascending order.
    seconds : float
    time : float
        Unix time of the end.
    """

    code: str
    name: str
    largest: tuple[Largest, ...]
    tried: tuple[Tried, ...]
    trains: bool | None
    margin: float
    target: int | None = None
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    stopped: str = ""
    values: Sequence[float] = ()
    seconds: float = 0.0
    time: float = 0.0

    @property
    def value(self) -> float | None:
        """The largest value on the GPU, or on the first card; None where none fits."""
        return self.largest[0].value

    @property
    def confirmed(self) -> bool:
        """Whether a run with that value went to its end."""
        return self.largest[0].confirmed

    @property
    def steps(self) -> Steps | None:
        """How to accumulate gradients up to the target; None without one, or where none fits."""
        value = self.value
        if self.target is None or value is None or value < 1:
            return None
        count = math.ceil(self.target / int(value))
        size = math.ceil(self.target / count)
        if self.values:  # one of those that were named
            size = int(self.values[bisect_left(self.values, size)])
        return Steps(self.target, count, size, self.target - (count - 1) * size)

    @property
    def title(self) -> str:
        """The first line of the code."""
        return next((line.strip() for line in self.code.splitlines() if line.strip()), "no code")

    def at(self, value: float) -> Tried | None:
        """What is known of one value; None if it was not tried."""
        return next((tried for tried in self.tried if tried.value == value), None)
