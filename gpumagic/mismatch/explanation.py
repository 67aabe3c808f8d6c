"""Record what is wrong between devices: plain data that holds no tensor and no frame."""

from dataclasses import dataclass

from gpumagic.display.shown import Shown


@dataclass(frozen=True)
class Operand:
    """A tensor, module or other thing of the failing expression, by its name in the user's code.

    Attributes
    ----------
    name : str
    devices : tuple of str
        Where it is: ``("cuda:0",)``; several for a module or a list that is spread, most bytes
        first.
    nbytes : int or None
        Bytes; None where they are not known, because the value has gone.
    dtype : str or None
    shape : tuple of int or None
    about : str
        What it is in words: ``"float32[3, 2]"``, ``"Linear, 2 tensors"``.
    odd : bool
        Whether it is the one that is elsewhere.
    also : str or None
        Its name in the code that called the function, where that differs.
    along : bool
        Whether it is no operand, but meets the result further on, and so must move too.
    """

    name: str
    devices: tuple[str, ...]
    nbytes: int | None
    dtype: str | None
    shape: tuple[int, ...] | None
    about: str
    odd: bool = False
    also: str | None = None
    along: bool = False


@dataclass(frozen=True)
class Fix:
    """Code to paste.

    Attributes
    ----------
    code : str
        With ``where == "before"`` lines to put before line `line`; with ``"replace"`` what lines
        `line` to `end_line` become. The indentation is that of its lines.
    where : str
        ``"before"`` or ``"replace"``.
    line, end_line : int
        Counted from 1.
    filename : str
        The file or cell that the lines are of, as in the traceback.
    label : str
        The same as people know it: ``"In [3]"``, ``"train.py"``.
    nbytes : int or None
        Bytes that it moves; None where that is not known.
    other_nbytes : int or None
        Bytes that the other way would move, where there is one.
    once : bool
        Whether it moves modules for good, where the other way would move data each time.
    """

    code: str
    where: str
    line: int
    end_line: int
    filename: str
    label: str = ""
    nbytes: int | None = None
    other_nbytes: int | None = None
    once: bool = False

    def apply(self, source: str) -> str:
        """The source of `filename` with the fix in it."""
        lines = source.splitlines(keepends=True)
        new = [f"{line}\n" for line in self.code.splitlines()]
        end = self.line - 1 if self.where == "before" else self.end_line
        return "".join([*lines[: self.line - 1], *new, *lines[end:]])


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """An error between devices, explained. `str()` is text, and IPython shows HTML.

    Attributes
    ----------
    expression : str
        What failed, as the user wrote it.
    line : int
        Its line, counted from 1.
    filename, label : str
        Its file or cell, as in the traceback and as people know it.
    operands : tuple of Operand
    fix : Fix or None
    reason : str or None
        Why it is where it is, in one sentence, where the cause is a typical one.
    """

    expression: str
    line: int
    filename: str
    label: str
    operands: tuple[Operand, ...]
    fix: Fix | None
    reason: str | None
