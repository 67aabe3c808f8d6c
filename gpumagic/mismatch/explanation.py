"""Record what is wrong between devices: plain data that holds no tensor and no frame."""

from dataclasses import dataclass

from gpumagic.display.table import Shown


@dataclass(frozen=True)
class Operand:
    """A tensor, module or other thing of the failing expression, by its name in the user's code."""

    name: str
    devices: tuple[str, ...]  # several where it is spread, most bytes first
    nbytes: int | None  # None where they are not known, because the value has gone
    dtype: str | None
    shape: tuple[int, ...] | None
    about: str  # in words: "float32[3, 2]", "Linear, 2 tensors"
    odd: bool = False  # it is the one that is elsewhere
    also: str | None = None  # its name in the code that called the function, where that differs
    along: bool = False  # no operand, but it meets the result further on, and so must move too


@dataclass(frozen=True)
class Fix:
    """Code to paste."""

    # Lines to put before line `line`, or what lines `line` to `end_line` become: "before" or
    # "replace". The indentation is that of its lines, which count from 1.
    code: str
    where: str
    line: int
    end_line: int
    filename: str  # of the file or cell, as in the traceback
    label: str = ""  # the same as people know it: "In [3]", "train.py"
    nbytes: int | None = None  # that it moves; None where that is not known
    other_nbytes: int | None = None  # that the other way would move, where there is one
    once: bool = False  # it moves modules for good, where the other way would move data each time

    def apply(self, source: str) -> str:
        """The source of `filename` with the fix in it."""
        lines = source.splitlines(keepends=True)
        new = [f"{line}\n" for line in self.code.splitlines()]
        end = self.line - 1 if self.where == "before" else self.end_line
        return "".join([*lines[: self.line - 1], *new, *lines[end:]])


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """An error between devices, explained. `str()` is text, and IPython shows HTML."""

    expression: str  # what failed, as the user wrote it
    line: int
    filename: str  # as in the traceback
    label: str  # and as people know it
    operands: tuple[Operand, ...]
    fix: Fix | None
    reason: str | None  # why it is where it is, in one sentence, where the cause is a typical one
