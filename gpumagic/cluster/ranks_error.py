"""Tell what ended a cell of ranks: an error in one of them, or Ctrl-C; without frames of ours."""

from collections.abc import Sequence

from gpumagic.cluster.engine import ErrorInRank
from gpumagic.cluster.engines import RankEngine
from gpumagic.display.units import some
from gpumagic.errors import show_as


class RanksError(Exception):
    """A cell failed in a rank; shown as that rank's own traceback, without frames of ours."""

    def __init__(self, rank: int, error: ErrorInRank, others: str, notes: Sequence[str]) -> None:
        place = f", {error.place}" if error.place else ""
        super().__init__(f"rank {rank}{place}: {error}")
        lines = [f"in rank {rank}{others}:", error.lines, *(f"  → {note}" for note in notes)]
        self._shown = ["\n".join(lines)]

    def _render_traceback_(self) -> list[str]:
        return self._shown


def interrupt(words: str, notes: Sequence[str]) -> KeyboardInterrupt:
    """A KeyboardInterrupt that is shown in a line, and what there is to note."""
    error = KeyboardInterrupt(words)
    lines = "\n".join([f"KeyboardInterrupt: {words}", *(f"  → {note}" for note in notes)])
    show_as(error, lambda: [lines])
    return error


def named(ranks: Sequence[RankEngine]) -> str:
    """Some ranks, as a sentence has them."""
    return f"{len(ranks)} ranks" if len(ranks) > 1 else f"rank {ranks[0].number}"


def others(ranks: Sequence[RankEngine], failed: int) -> str:
    """Which ones ended because one failed."""
    found = [str(rank.number) for rank in ranks if rank.number != failed]
    return f"; rank{'s' * (len(found) > 1)} {some(found)} ended too" if found else ""
