"""Show the ledger as one line, or as a table with advice below each line of the source."""

from gpumagic.display import table
from gpumagic.display.table import block, coded, tag
from gpumagic.display.units import duration, size
from gpumagic.ledger.advice import SILENT, Advice, advise, is_crawl
from gpumagic.ledger.entry import Entry, Ledger

NOTHING = "no copies between devices, and no waits for one"
_VIRTUAL = "Times on virtual GPUs are the CPU's and say nothing about a GPU: savings are in calls."
_PREDICTED = "Predicted: nothing was copied, so there are no times. Savings are in calls."
_REAL = (
    "Savings are estimated from the measured times; the time in which the GPU is idle after a wait "
    "is not included."
)
_CODE = 60  # characters of the source, at most
_HINTS = 3  # lines with advice, at most, where there is no table


def line(ledger: Ledger, *, without: tuple[str, ...] = ()) -> str:
    """``3 transfers: 12.0 MiB to cuda:1; 1,000 waits at line 4: `loss.item()```.

    Entries that came in the ways `without` (`Entry.via`) are said elsewhere.
    """
    entries = [e for e in ledger.entries if e.via not in without]
    other = [e for e in entries if e.via != "print"]
    printed = [e for e in entries if e.via == "print"]
    said = _transfers(other), _waits(other), _printed(printed), _elsewhere(other)
    return "; ".join(filter(None, said))


def _transfers(entries: list[Entry]) -> str:
    copies = [e for e in entries if e.kind == "copy"]
    to: dict[str, int] = {}
    for e in copies:
        to[e.destination] = to.get(e.destination, 0) + e.nbytes
    count = sum(e.count for e in copies)
    unsized = {e.destination for e in copies if e.unsized}
    each = ", ".join(f"{_bytes(n, device in unsized)} to {device}" for device, n in to.items())
    each = each.replace(size(None), "unknown bytes")
    return f"{_count(count, 'transfer')}: {each}{_at(copies, count)}" if copies else ""


def _bytes(nbytes: int, unsized: bool) -> str:
    """Return ``"3.2 MiB"``, or ``"≥ 3.2 MiB"`` if some bytes are unknown."""
    if not unsized:
        return size(nbytes)
    return f"≥ {size(nbytes)}" if nbytes else size(None)


def _waits(entries: list[Entry]) -> str:
    waits = [e for e in entries if e.kind == "wait"]
    count = sum(e.count for e in waits)
    return f"{_count(count, 'wait')}{_at(waits, count)}" if waits else ""


def _printed(entries: list[Entry]) -> str:
    """Each printing makes many waits and copies, which the table has."""
    count = sum(e.calls for e in entries)
    reads = _count(sum(e.count for e in entries), "read")
    what = "array" if any(e.framework for e in entries) else "tensor"
    words = f"{_count(count, what)} printed in {reads}{_at(entries, count, calls=True)}"
    return words if entries else ""


def _elsewhere(entries: list[Entry]) -> str:
    found = [e for e in entries if e.kind == "placement"]
    count = sum(e.count for e in found)
    where = ", ".join(dict.fromkeys(f"{e.destination}, not {e.source}" for e in found))
    return f"{_count(count, 'result')} on {where}{_at(found, count)}" if found else ""


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count > 1)}"


def _at(entries: list[Entry], total: int, *, calls: bool = False) -> str:
    """Return the line with most of them: ``" at line 4: `loss.item()`"``."""
    lines: dict[tuple[str, str], int] = {}
    for e in entries:
        if e.where is not None:
            key = e.where.place, e.code
            lines[key] = lines.get(key, 0) + (e.calls if calls else e.count)
    if not lines:
        return ""
    (place, code), most = max(lines.items(), key=lambda item: item[1])
    # One copy has a line where nobody asked for it.
    few = most < 2 and entries[0].operator not in SILENT
    if entries[0].kind == "copy" and (few or (len(lines) > 1 and most < total / 2)):
        return ""
    many = f", {most:,} of them" if most < total else ""
    return f"{many} at {place}: `{table.short(code, _CODE)}`" if code else f"{many} at {place}"


def hints(ledger: Ledger) -> list[str]:
    """Return advice for each line that copies or waits again and again, the worst first."""
    found: dict[str, int] = {}
    for e in filter(is_crawl, ledger.entries):
        if (advice := _advised(e, ledger)) is not None:
            place = f"{e.where.place}: " if e.where else ""
            found[f"{place}{advice.text}"] = e.count
    return sorted(found, key=lambda words: -found[words])[:_HINTS]


def _advised(e: Entry, ledger: Ledger) -> Advice | None:
    """Advise on an entry; not to move operands one way where others of the line go the other."""
    advice = advise(e)
    for other in ledger.entries if advice is not None and e.operator == "operand" else ():
        ends = other.operator, other.source, other.destination
        if ends == (e.operator, e.destination, e.source) and other.where == e.where:
            first, second = sorted((e.source, e.destination))
            return Advice(
                f"it reads arrays on {first} and on {second}: make all on one", 0, 0.0, ""
            )
    return advice


def text(ledger: Ledger) -> str:
    """A row for each entry, advice below it."""
    if not ledger.entries:
        return NOTHING
    return "\n".join([*table.lines(_columns(ledger)), *table.wrapped(_note(ledger), more="")])


def html(ledger: Ledger, *, with_line: bool = True) -> str:
    """The same as a table, below its `line`."""
    if not ledger.entries:
        return block(tag("div", NOTHING, "gm-caption"))
    caption = f'<div class="gm-caption">{coded(line(ledger))}</div>' if with_line else ""
    note = tag("div", _note(ledger), "gm-note gm-dim")
    return block(f"{caption}{table.html(_columns(ledger))}{note}")


def _columns(ledger: Ledger) -> list[table.Column]:
    entries = ledger.entries
    times = [duration(e.seconds if e.count and not e.untimed else None) for e in entries]
    return [
        table.Column("line", [_location(e) for e in entries], number=True),
        table.Column(
            "source",
            [table.short((e.where and e.where.source) or e.code, _CODE) for e in entries],
            fit="cut",
            notes=[_advice(e, ledger) for e in entries],
            css="gm-code gm-long",
        ),
        table.Column("what", [_what(e) for e in entries], fit="wrap", least=38, css="gm-long"),
        table.Column("count", [f"{e.count:,}" for e in entries], number=True),
        table.Column("bytes", [_bytes(e.nbytes, e.unsized) for e in entries], number=True),
        table.Column("time", times, number=True),
    ]


def _location(entry: Entry) -> str:
    return "elsewhere" if entry.where is None else entry.where.place.removeprefix("line ")


def _what(e: Entry) -> str:
    if e.kind == "placement":
        return f"asked for {e.source}, on {e.destination} ({e.operator})"
    way = f"{e.source} → {e.destination}" if e.kind == "copy" else f"waits for {e.source}"
    how = e.via or (_inside(e.within) if e.within else "implicit" if e.implicit else "explicit")
    batch = e.kind == "copy" and e.source == "cpu" and e.operator == "copy_" and not e.implicit
    pinned = "" if e.pinned is None or not batch else ", pinned" if e.pinned else ", not pinned"
    return f"{way} ({e.operator}, {how}{pinned})"


def _inside(module: str) -> str:
    """``"torch.optim.lbfgs"`` as ``"in torch.optim"``."""
    return "in " + ".".join(module.split(".")[:2])


def _advice(e: Entry, ledger: Ledger) -> str:
    """Return what to do, and what it saves: time, or calls if there are no times of a GPU."""
    advice = _advised(e, ledger)
    if advice is None:
        return ""
    in_calls = ledger.virtual or ledger.predicted
    saved = f"≈ {duration((e.seconds or 0) * advice.share)} ({advice.how})"
    saved = saved if advice.share else ""
    if in_calls or e.untimed:
        kind = "waits" if e.kind == "wait" else "copies"
        saved = f"{advice.saved:,} of {e.count:,} {kind}" if advice.saved else ""
    return f"→ {advice.text}" + (f"; saves {saved}" if saved else "")


def _note(ledger: Ledger) -> str:
    if ledger.predicted:
        return _PREDICTED
    return _VIRTUAL if ledger.virtual else _REAL


class LedgerLine:
    """Show a cell's ledger as one line under it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _repr_mimebundle_(self, **_: object) -> dict[str, object]:
        return {table.JSON: table.as_json(self.ledger)}

    def _repr_html_(self) -> str:
        return block("".join(f'<div class="gm-note">{coded(line)}</div>' for line in self._lines()))

    def _lines(self) -> list[str]:
        said = line(self.ledger, without=("display",))
        return [said, *(f"→ {hint}" for hint in hints(self.ledger))] if said else []
