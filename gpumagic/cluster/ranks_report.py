"""Record and show how a cell ran on the ranks, and the ranks themselves."""

from dataclasses import dataclass, field
from html import escape
from typing import Any

from gpumagic.display import table
from gpumagic.display.table import Shown, block, coded
from gpumagic.display.units import NOT_KNOWN, duration, share, size, some


@dataclass(frozen=True)
class RankTime:
    """One rank: seconds, peak bytes (None if unknown), number of parts."""

    rank: int
    seconds: float
    peak: int | None = None
    parts: int = 1
    virtual: bool = False
    device: str = ""  # the device of a thread of this process

    @property
    def name(self) -> str:
        """``"rank 1"``, or ``"cuda:1"``."""
        return self.device or f"rank {self.rank}"


@dataclass(frozen=True, repr=False)
class RanksReport(Shown):
    """One cell on the ranks of a cluster, or on several devices of this process.

    Attributes
    ----------
    ranks : tuple of RankTime
        By rank, without the interrupted ones.
    seconds : float
        From sending the orders to the last answer.
    split : str
        The items of each rank: ``"17 prompts: 9 + 8"``; empty if nothing was split.
    sent : tuple of str
        Names of variables that were sent, because ranks lacked them or had other values.
    sent_bytes, sent_seconds : int, float
        To all ranks, until the last one had them.
    returned_bytes : int
        Bytes of returned values.
    moved_bytes : int
        Bytes moved from the ranks' CPUs to their GPUs, in total.
    made : tuple of str
        Variables that were set in the notebook.
    notes : tuple of str
        Notes: a replaced rank, a recreated process group.
    wrong : tuple of str
        Variables that could not be gathered, and why: they are lists of their parts.
    """

    ranks: tuple[RankTime, ...]
    seconds: float
    split: str = ""
    sent: tuple[str, ...] = ()
    sent_bytes: int = 0
    sent_seconds: float = 0.0
    returned_bytes: int = 0
    moved_bytes: int = 0
    made: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class RanksTable(Shown):
    """The ranks of a cluster: a row for each, with the cause of its end."""

    title: str
    rows: tuple[dict[str, Any], ...] = field(default=())


_SHOWN = 4
# Report transfers above this many bytes.
_MUCH = 2**16


def text(record: RanksReport | RanksTable) -> str:
    """A line: `2 ranks · 3.20 s (rank 1 the slowest, rank 0 2.90 s) · sent X: 12 MiB · peak …`."""
    if isinstance(record, RanksTable):
        return "\n".join([record.title, *table.lines(_columns(record), "  ")])
    below = (f"  → {line}" for line in (*record.notes, *record.wrong))
    return "\n".join([" · ".join(_parts(record)), *below])


def html(record: RanksReport | RanksTable) -> str:
    """Return the line as HTML; a click shows each rank."""
    if isinstance(record, RanksTable):
        return block(f"<div>{escape(record.title)}</div>{table.html(_columns(record))}")
    head, *rest = _parts(record)
    line = f'<b class="gm-where">{escape(head)}</b>' + "".join(
        f' <span class="gm-dim">·</span> {coded(part)}' for part in rest
    )
    columns = [
        table.Column("", [each.name for each in record.ranks]),
        table.Column("parts", [f"{each.parts:,}" for each in record.ranks], number=True),
        table.Column("time", [duration(each.seconds) for each in record.ranks], number=True),
        table.Column("peak", [size(each.peak) for each in record.ranks], number=True),
    ]
    body = f"<details><summary>{line}</summary>{table.html(columns)}</details>"
    body += "".join(f"<div>→ {coded(line)}</div>" for line in (*record.notes, *record.wrong))
    return block(body, "report", css="gpumagic gm-report")


def _parts(report: RanksReport) -> list[str]:
    names = [each.name for each in report.ranks]
    virtual = " (virtual)" if any(each.virtual for each in report.ranks) else ""
    here = len(names) == 1 or any(each.device for each in report.ranks)
    head = some(names) if here else f"{len(names)} ranks"
    parts = [head + virtual, _times(report)]
    if report.split:
        parts.append(report.split)
    if report.sent and report.sent_bytes:
        sent = f"{size(report.sent_bytes)} in {duration(report.sent_seconds)}"
        parts.append(f"sent {some(report.sent)}: {sent}")
    if report.moved_bytes:
        parts.append(f"{size(report.moved_bytes)} moved to their GPUs")
    if report.returned_bytes > _MUCH:
        parts.append(f"{size(report.returned_bytes)} came back")
    parts += report.made
    if peaks := [each for each in report.ranks if each.peak is not None]:
        parts.append(f"peak {_by_rank([(e.name, e.peak or 0) for e in peaks], size)}")
    return parts


def _times(report: RanksReport) -> str:
    ran = sorted((e for e in report.ranks if e.parts), key=lambda each: -each.seconds)
    parts = []
    if len(ran) > 1:
        parts = [f"{ran[0].name} took longest, {duration(ran[0].seconds)}"]
        parts.append(f"{ran[-1].name} {duration(ran[-1].seconds)}")
    if idle := [each.name for each in report.ranks if not each.parts]:
        parts.append(f"{some(idle)} had nothing to do")
    return duration(report.seconds) + (f" ({'; '.join(parts)})" if parts else "")


def _by_rank(values: list[tuple[str, int]], spell: Any) -> str:
    """Return one value if all are equal, each with its rank, or the largest of many."""
    if len({spell(value) for _, value in values}) == 1:
        return f"{spell(values[0][1])}" + (" each" if len(values) > 1 else "")
    if len(values) <= _SHOWN:
        return ", ".join(f"{spell(value)} on {name}" for name, value in values)
    name, most = max(values, key=lambda pair: pair[1])
    return f"{spell(most)} at most, on {name}"


def _columns(record: RanksTable) -> list[table.Column]:
    rows = record.rows
    memory = [
        NOT_KNOWN if row.get("used") is None else share(row["used"], row["total"]) for row in rows
    ]
    virtual = ["virtual" if row.get("virtual") else row.get("name", "") for row in rows]
    return [
        table.Column("rank", [str(row["rank"]) for row in rows], number=True),
        table.Column("host", [row.get("host", "") for row in rows]),
        table.Column("device", [row.get("device", "") for row in rows]),
        table.Column("GPU", virtual, fit="cut"),
        table.Column("memory", memory, number=True),
        table.Column("pid", [str(row.get("pid", "")) for row in rows], number=True),
        table.Column("state", [row["state"] for row in rows], fit="wrap"),
    ]
