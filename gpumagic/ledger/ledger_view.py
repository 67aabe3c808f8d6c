"""The ledger as one line, and as a table of lines with advice beside the source."""

from __future__ import annotations

from html import escape
from textwrap import wrap

from gpumagic.display.style import block, tag
from gpumagic.display.units import NOT_KNOWN, duration, size
from gpumagic.ledger.advice import Advice, advise, saving
from gpumagic.ledger.entry import Entry, Ledger

NOTHING = "no copies between devices, and no waits for one"
_VIRTUAL = "Times on virtual GPUs are the CPU's and say nothing about a GPU: savings are in calls."
_PREDICTED = "Predicted: nothing was copied, so there are no times. Savings are in calls."
_REAL = (
    "Savings are estimated from the measured times; what a wait costs beside its own time, the GPU "
    "that stands idle, comes on top."
)
_CODE = 60
_WIDTH, _LEAST = 100, 20  # characters: of the text, and of the source in it


def line(ledger: Ledger, *, without: tuple[str, ...] = ()) -> str:
    """``3 transfers: 12.0 MiB to cuda:1; 1,000 waits at line 4: `loss.item()```.

    Parameters
    ----------
    without : tuple of str
        Entries that came these ways (`Entry.via`) are said elsewhere.
    """
    entries = [e for e in ledger.entries if e.via not in without]
    other = [e for e in entries if e.via != "print"]
    printed = [e for e in entries if e.via == "print"]
    return "; ".join(filter(None, (_transfers(other), _waits(other), _printed(printed))))


def _transfers(entries: list[Entry]) -> str:
    copies = [e for e in entries if e.kind == "copy"]
    if not copies:
        return ""
    to: dict[str, int] = {}
    for e in copies:
        to[e.destination] = to.get(e.destination, 0) + e.nbytes
    count = sum(e.count for e in copies)
    each = ", ".join(f"{size(nbytes)} to {device}" for device, nbytes in to.items())
    return f"{count:,} transfer{'s' * (count > 1)}: {each}{_at(copies, count)}"


def _waits(entries: list[Entry]) -> str:
    waits = [e for e in entries if e.kind == "wait"]
    if not waits:
        return ""
    count = sum(e.count for e in waits)
    return f"{count:,} wait{'s' * (count > 1)}{_at(waits, count)}"


def _printed(entries: list[Entry]) -> str:
    """Each printing makes many waits and copies, which the table has."""
    if not entries:
        return ""
    count = sum(e.calls for e in entries)
    reads = sum(e.count for e in entries)
    words = f"{count:,} tensor{'s' * (count > 1)} printed"
    return f"{words} in {reads:,} reads{_at(entries, count, calls=True)}"


def _at(entries: list[Entry], total: int, *, calls: bool = False) -> str:
    """Where most of them were: ``" at line 4: `loss.item()`"``."""
    lines: dict[tuple[str | None, int | None, str], int] = {}
    for e in entries:
        if e.line is not None:
            key = e.file, e.line, e.code
            lines[key] = lines.get(key, 0) + (e.calls if calls else e.count)
    if not lines:
        return ""
    (_, number, code), most = max(lines.items(), key=lambda item: item[1])
    if entries[0].kind == "copy" and (most < 2 or (len(lines) > 1 and most < total / 2)):
        return ""
    many = f", {most:,} of them" if most < total else ""
    return f"{many} at line {number}: `{short(code)}`" if code else f"{many} at line {number}"


def short(code: str, most: int = _CODE) -> str:
    """An expression, cut if it is long."""
    return code if len(code) <= most else code[: most - 1] + "…"


def _place(entry: Entry, several: bool) -> str:
    if entry.line is None:
        return "elsewhere"
    return f"{entry.file}:{entry.line}" if several else str(entry.line)


def _rows(ledger: Ledger) -> list[tuple[str, ...]]:
    several = len({e.file for e in ledger.entries if e.line is not None}) > 1
    rows: list[tuple[str, ...]] = []
    for e in ledger.entries:
        advice = advise(e)
        rows.append(
            (
                _place(e, several),
                short((e.where and e.where.source) or e.code),
                _what(e),
                f"{e.count:,}",
                size(e.nbytes),
                duration(e.seconds) if e.count and e.seconds is not None else NOT_KNOWN,
                advice.text if advice else "",
                _saved(advice, e, ledger.virtual or ledger.predicted) if advice else "",
            )
        )
    return rows


def _saved(advice: Advice, e: Entry, in_calls: bool) -> str:
    saved = saving(advice, in_calls=in_calls)
    calls = " waits" if e.kind == "wait" else " copies"
    return saved + calls if saved and in_calls else saved


_HEAD = ("line", "source", "what", "count", "bytes", "time")
_WRAPS = 'style="white-space:normal;overflow-wrap:anywhere;min-width:18ch"'
_NO_LINE = 'style="border:0;padding-top:0;white-space:normal"'


def _what(e: Entry) -> str:
    way = f"{e.source} → {e.destination}" if e.kind == "copy" else f"waits for {e.source}"
    how = e.via or (_inside(e.within) if e.within else "implicit" if e.implicit else "explicit")
    batch = e.kind == "copy" and e.source == "cpu" and e.operator == "copy_" and not e.implicit
    pinned = "" if e.pinned is None or not batch else ", pinned" if e.pinned else ", not pinned"
    return f"{way} ({e.operator}, {how}{pinned})"


def _inside(module: str) -> str:
    """``"torch.optim.lbfgs"`` as ``"in torch.optim"``."""
    return "in " + ".".join(module.split(".")[:2])


def text(ledger: Ledger) -> str:
    """Rows by line; advice under its row."""
    if not ledger.entries:
        return NOTHING
    rows = [(*_HEAD, "", ""), *_rows(ledger)]
    widths = [max(len(r[n]) for r in rows) for n in range(6)]
    room = _WIDTH - sum(widths) + widths[1] - 2 * 5
    widths[1] = min(widths[1], max(room, _LEAST))
    out = []
    for *row, text, saved in rows:
        row[1] = short(row[1], widths[1])
        cells = [
            c.rjust(w) if k in (0, 3, 4, 5) else c.ljust(w)
            for k, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        out.append("  ".join(cells).rstrip())
        if text:
            out += _wrapped(_advice(text, saved), " " * (widths[0] + 2))
    return "\n".join([*out, *_wrapped(_note(ledger), "")])


def _wrapped(text: str, margin: str) -> list[str]:
    more = f"{margin}  " if margin else ""
    return wrap(text, _WIDTH, initial_indent=margin, subsequent_indent=more)


def _advice(text: str, saved: str) -> str:
    return f"→ {text}" + (f"; saves {saved}" if saved else "")


def _note(ledger: Ledger) -> str:
    if ledger.predicted:
        return _PREDICTED
    return _VIRTUAL if ledger.virtual else _REAL


_line = line


class LedgerLine:
    """A cell's ledger as one line under it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __repr__(self) -> str:
        return line(self.ledger, without=("display",))

    def _repr_html_(self) -> str:
        return block(tag("div", repr(self), "gm-note"))


def html(ledger: Ledger, *, line: bool = True) -> str:
    """The same as a table, below its `line`."""
    if not ledger.entries:
        return block(tag("div", NOTHING, "gm-caption"))
    head = "".join(
        f'<th scope="col"{_number(n)}>{escape(name)}</th>' for n, name in enumerate(_HEAD)
    )
    body = "".join(_cells(row) for row in _rows(ledger))
    caption = tag("div", _line(ledger), "gm-caption") if line else ""
    note = tag("div", _note(ledger), "gm-note gm-dim")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return block(f"{caption}{table}{note}")


def _cells(row: tuple[str, ...]) -> str:
    """One entry's row, and below it, as wide as the table, the advice."""
    *cells, advice, saved = row
    html = "".join(f"<td{_class(n)}>{escape(text)}</td>" for n, text in enumerate(cells))
    html = f"<tr>{html}</tr>"
    if not advice:
        return html
    text = escape(_advice(advice, saved))
    return f'{html}<tr><td {_NO_LINE}></td><td {_NO_LINE} colspan="5">{text}</td></tr>'


def _number(n: int) -> str:
    return ' class="gm-number"' if n in (0, 3, 4, 5) else ""


def _class(n: int) -> str:
    if n == 1:
        return f' class="gm-place" {_WRAPS}'
    return f" {_WRAPS}" if n == 2 else _number(n)
