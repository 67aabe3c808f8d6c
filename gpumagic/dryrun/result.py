"""Record the result of a dry run; show it as text and HTML."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from textwrap import indent
from typing import Any, NamedTuple

from gpumagic.device.cards import CONTEXT, Card
from gpumagic.display import table
from gpumagic.display.table import Shown, block, folded, tag
from gpumagic.display.units import duration, many, size
from gpumagic.ledger import ledger_view
from gpumagic.ledger.entry import Ledger
from gpumagic.mismatch.explanation import Explanation
from gpumagic.moving.moved import Moved
from gpumagic.usercode.files import UserLine

LIMIT_S = 60.0  # seconds after which a dry run stops and returns its result so far
GUESSED = "a condition on a tensor was taken as False"
_FOLD = table.Fold(12)


@dataclass(frozen=True)
class Assigned:
    """Record a variable that the code assigns."""

    name: str
    kind: str  # "float32[128, 10]" for a tensor, "Sequential, 4 tensors" for a module
    device: str = ""  # comma-separated if several; empty if there are no tensors
    nbytes: int = 0  # bytes of the variable's tensors
    shape: tuple[int, ...] | None = None  # None if the variable is not a tensor
    dtype: Any = None  # None if the variable is not a tensor


@dataclass(frozen=True)
class Peak:
    """Record the peak memory on one device, in bytes; a real run needs at least this much.

    The workspaces of cuBLAS and cuDNN and the allocator's fragmentation are not included.
    """

    device: str
    peak: int  # including memory allocated earlier, as in max_memory_allocated
    needed: int  # bytes that the code must allocate, including moved inputs
    free: int | None  # bytes free now
    at: UserLine | None  # the line of the peak

    @property
    def fits(self) -> bool | None:
        """Whether the free memory suffices now; None if unknown."""
        return None if self.free is None else self.needed <= self.free


@dataclass(frozen=True)
class OnCard:
    """Record whether the code would fit on a card, a GPU model that this machine lacks."""

    card: Card
    needed: int  # bytes that the code needs at least
    at: UserLine | None  # first line that does not fit; None if all or not even the inputs do

    @property
    def left(self) -> int:
        """Bytes left on the card; negative if the code does not fit."""
        return self.card.usable - self.needed

    @property
    def fits(self) -> bool:
        return self.left >= 0


@dataclass(frozen=True)
class Unknown:
    """Record why a result is unknown or code was skipped, and whether the dry run ended there."""

    where: UserLine | None
    reason: str
    ended: bool

    def __str__(self) -> str:
        if self.where is None:
            return self.reason
        # IPython replaces a magic by other code. The user did not type this code, so omit it.
        typed = self.where.line and "get_ipython()" not in self.where.source
        source = f" · {self.where.source}" if typed and self.where.source else ""
        return f"{replace(self.where, source='')}: {self.reason}{source}"


@dataclass(frozen=True)
class Mismatch:
    """Record torch's error for an operation between devices, and an explanation of the error."""

    where: UserLine | None
    error: str
    explanation: Explanation | None = None

    def __str__(self) -> str:
        return self.error if self.explanation is None else str(self.explanation)


@dataclass(frozen=True, repr=False)
class DryRun(Shown):
    """Record what a cell or a function would do. Comments in the source describe the attributes."""

    device: str  # name of the device or of the first card; empty if neither is given
    assigned: tuple[Assigned, ...] = ()  # variables; a function's result is named "return"
    peak: dict[str, Peak] = field(default_factory=dict)  # by device; the first card is "cuda:0"
    moved: tuple[Moved, ...] = ()  # variables that `%%ongpu` would move to the device first
    ledger: Ledger = field(default_factory=Ledger)  # copies and waits by line, without times
    unknown: tuple[Unknown, ...] = ()  # unknown results, skipped code, and why the run ended early
    mismatches: tuple[Mismatch, ...] = ()  # at most one operation between devices that would fail
    error: str | None = None  # an error, other than a mismatch, that the code would raise
    error_at: UserLine | None = None
    printed: str = ""  # printed text; a "?" is a value that depends on data
    operators: int = 0  # operators that were run
    backward: bool = False  # whether a backward pass ran
    seconds: float = 0.0  # duration of the dry run, including the fork
    virtual: bool = False  # whether the device is a virtual GPU
    cards: tuple[OnCard, ...] = ()  # requested GPU models that this machine lacks

    @property
    def complete(self) -> bool:
        """Whether the dry run reached the end of the code."""
        return not (any(unknown.ended for unknown in self.unknown) or self.mismatches or self.error)

    def needed(self, device: str) -> int | None:
        """Return the bytes that the code needs on a device; None if the dry run ended early."""
        peak = self.peak.get(device)
        return (0 if peak is None else peak.needed) if self.complete else None


def text(run: DryRun) -> str:
    lines = [_head(run), *(f"  {words}" for words in (*_on_cards(run), *map(_memory, _peaks(run))))]
    for mismatch in run.mismatches:
        lines += [f"  would fail at {mismatch.where}", indent(str(mismatch), "    ")]
    lines += [f"  {words}" for words in _ends(run)]
    for title, columns in _tables(run):
        lines += [f"  {title}", *table.lines(columns, "    ", _FOLD)]
    if run.ledger:
        lines += ["  copies and waits", indent(ledger_view.text(run.ledger), "    ")]
    return "\n".join(lines)


def html(run: DryRun) -> str:
    parts = [tag("div", _head(run), "gm-caption")]
    for n, words in enumerate(_on_cards(run)):
        parts.append(tag("div", words, "gm-dim" if n else "gm-this"))
    for peak in _peaks(run):
        parts.append(tag("div", _memory(peak), "gm-bad" if peak.fits is False else "gm-this"))
    for mismatch in run.mismatches:
        parts.append(tag("div", f"would fail at {mismatch.where}", "gm-problem"))
        found = mismatch.explanation
        parts.append(found._repr_html_() if found is not None else tag("pre", mismatch))
    parts += [tag("div", words, "gm-problem" if run.error else "gm-note") for words in _ends(run)]
    for title, columns in _tables(run):
        shown = table.html(columns, title=title, css="gm-section")
        count = len(columns[0].cells)
        parts.append(shown if count <= _FOLD.first else folded(f"{title}: {count}", shown))
    if run.ledger:
        parts.append(ledger_view.html(run.ledger, with_line=False))
    return block("".join(parts))


def _head(run: DryRun) -> str:
    """Return a heading: ``dry run on cuda:1 (virtual): nothing was computed · 85 ms``."""
    place = " (not here)" if run.cards else " (virtual)" * run.virtual
    printed = run.printed.count("\n")
    parts = [
        f"dry run{f' on {run.device}{place}' if run.device else ''}: nothing was computed",
        "" if run.complete else "ended early",
        f"{many(printed, 'line')} printed, not shown" if printed else "",
        duration(run.seconds),
    ]
    return " · ".join(filter(None, parts))


def _on_cards(run: DryRun) -> Iterator[str]:
    """Yield ``needs 61.3 GiB; fits on H100 80GB (17.3 GiB left)``, then a line for each card."""
    if not run.cards:
        return
    at_least = "" if run.complete else "at least "
    yield f"needs {at_least}{size(run.cards[0].needed)}; {'; '.join(map(_on_card, run.cards))}"
    for known in (each.card for each in run.cards):
        total = f"{size(known.total)} according to {'torch' if known.reported else 'its name'}"
        yield (
            f"{known.name}: {total}, minus an estimated {size(CONTEXT)} for CUDA's context "
            f"and {size(known.workspace)} for cuBLAS"
        )


def _on_card(on: OnCard) -> str:
    if on.fits:
        return f"fits on {on.card.name} ({size(on.left)} left)"
    start = "from the start" if on.at is None else f"from {replace(on.at, source='')} on"
    return f"does not fit on {on.card.name} {start} ({size(-on.left)} short)"


def _peaks(run: DryRun) -> list[Peak]:
    """Return the peaks of GPUs, or of the CPU if no GPU is used; empty if cards are given."""
    if run.cards:
        return []
    gpus = [p for device, p in run.peak.items() if device != "cpu" and (p.needed or p.peak)]
    gpus = [p for p in gpus if p.needed or p.device == run.device] or gpus * (not run.device)
    return gpus if gpus or run.device not in ("", "cpu") else list(run.peak.values())


def _memory(peak: Peak) -> str:
    """Return ``cuda:1: at least 14.2 GiB of 15.8 GiB free; peak 14.3 GiB in all, at line 7``."""
    free = f"of {size(peak.free)} free" if peak.free is not None else "more"
    fits = ": does not fit" if peak.fits is False else ""
    whole = "" if peak.peak == peak.needed else f"; peak {size(peak.peak)} in all"
    at = f", at {peak.at}" if peak.at is not None else ""
    return f"{peak.device}: at least {size(peak.needed)} {free}{fits}{whole}{at}"


def _ends(run: DryRun) -> Iterator[str]:
    """Yield the error, then everything unknown or skipped. The reason for an early end is last."""
    if run.error:
        yield f"would fail{f' at {run.error_at}' * bool(run.error_at)}: {run.error}"
    for unknown in sorted(run.unknown, key=lambda u: u.ended):
        yield f"{'ended at ' * unknown.ended}{unknown}"


def _tables(run: DryRun) -> Iterator[tuple[str, list[table.Column]]]:
    card = run.device if run.cards else "cuda:0"  # cuda:0 simulates the first card
    assigned = [(a.name, a.kind, a.device.replace("cuda:0", card)) for a in run.assigned]
    moved = [(m.name, size(m.nbytes), ", ".join(m.sources) + f" → {run.device}") for m in run.moved]
    for title, rows in (("assigns", assigned), ("moves", moved)):
        if rows:
            first, middle, last = zip(*rows, strict=True)
            devices = table.Column("", last, fit="cut", css="gm-code gm-dim")
            yield title, [table.Column("", first, css="gm-code"), table.Column("", middle), devices]


class Need(NamedTuple):
    """Record how much memory a dry run needed."""

    most: int  # peak, in bytes
    grows: int | None = 0  # bytes that each pass of the loop keeps; None if unknown
    whole: bool = True  # False if the dry run ended early, so that the code may need more
    noted: Sequence[Any] = ()  # reasons and lines that the dry run noted

    @property
    def first(self) -> int:
        """A lower bound of the bytes that the first pass needs."""
        return self.most - (self.grows or 0)
