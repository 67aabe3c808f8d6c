"""Show records (dataclasses with results) as text, HTML and JSON; lay out tables.

A view is a module whose functions `text` and `html` format a record. By default, the view is the
module of the record's class; the attribute `_view` can name another. JSON never names other users,
processes or notebooks.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from html import escape
from importlib import import_module
from importlib.resources import files
from itertools import zip_longest
from math import isfinite
from textwrap import TextWrapper
from typing import Any

JSON = "application/vnd.gpumagic+json"

# Names of fields that count bytes; the fields' JSON keys get the suffix "_bytes".
_BYTES = re.compile(
    r"memory_(free|reserved|total|used)|adds|after|allocated|before|fragmented|free|gives|held_for_it"
    r"|limit|measured|needed|other_in_process|others|peak|predicted|reserved|returned|room|taken"
    r"|total|traceback_holds|used|wanted"
)
_LEFT_OUT = {"file", "filename", "html", "others_by_name", "processes", "uuid"}
_MOST_ITEMS = 10  # longest list in the JSON, so that a notebook's file stays small


def as_json(record: object) -> dict[str, Any]:
    """Return a record's class name and fields; long lists are truncated."""
    return {"record": type(record).__name__, **_fields(record)}


def _fields(record: Any) -> dict[str, Any]:
    return {
        _key(field.name, str(field.type)): _plain(getattr(record, field.name))
        for field in fields(record)
        if field.name not in _LEFT_OUT and not field.name.startswith("_")
    }


def _key(name: str, kind: str) -> str:
    if "int" in kind and _BYTES.fullmatch(name):
        return f"{name}_bytes"
    return name.replace("nbytes", "bytes") if name.endswith("nbytes") else name


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in [*value][:_MOST_ITEMS]}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [_plain(item) for item in [*value][:_MOST_ITEMS]]
    # Name only the class, because reading a user's object may take long or wait for a GPU.
    return type(value).__name__


class Shown:
    """Base class of records. IPython shows a record's HTML; `repr` returns its text."""

    _view = ""  # the name of the view; empty for the class's module

    def __repr__(self) -> str:
        return str(view(self).text(self))

    def _repr_html_(self) -> str:
        return str(view(self).html(self))

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """Return the record as JSON. The view's function `panel`, if there is one, adds entries."""
        panel = getattr(view(self), "panel", None)
        return {JSON: as_json(self) | (panel(self) if panel else {})}


def view(record: Shown) -> Any:
    """Import and return the view of a record."""
    return import_module(record._view or type(record).__module__)


@lru_cache
def sheet(name: str) -> str:
    """Return the text of this folder's CSS file `name`, without the file's first comment."""
    css = files(__package__).joinpath(f"{name}.css").read_text(encoding="utf-8")
    return css.partition("*/\n")[2]


def block(content: str, *sheets: str, css: str = "gpumagic") -> str:
    """Wrap HTML in a `<div>` with the color palette and `sheets` (default: the tables' sheet)."""
    rules = "".join(sheet(name) for name in ("palette", *(sheets or ("table",))))
    return f'<div class="{css}"><style>{rules}</style>{content}</div>'


def tag(name: str, text: object, css: str = "", title: str = "") -> str:
    tip = f' title="{escape(title)}"' if title else ""
    return f"<{name}{_css(css)}{tip}>{escape(str(text))}</{name}>"


def coded(text: str) -> str:
    """Escape text for HTML; turn parts in back-ticks into `<code>` elements."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def folded(summary: str, content: str, *, unfolded: bool = False) -> str:
    """Return a `<details>` element with an escaped summary and HTML content."""
    return f"<details{' open' * unfolded}>{tag('summary', summary)}{content}</details>"


def bar(parts: list[tuple[str, float]], label: str, *, short: bool = False) -> str:
    """Return an HTML bar; each part is a CSS class and a share of the width, from 0 to 1."""
    left, pieces, text = 1.0, "", escape(label)
    for css, part in parts:
        if (width := min(max(part, 0.0), left)) > 0:
            pieces += f'<i class="{css}" style="width:{100 * width:.2f}%"></i>'
            left -= width
    css = "gm-bar gm-short" if short else "gm-bar"
    return f'<span class="{css}" role="img" aria-label="{text}" title="{text}">{pieces}</span>'


WIDTH = 100
GLUE = "\N{NO-BREAK SPACE}"  # keeps words on one line, and is shown as a space
_GAP = "  "
_PAD = "\0"  # put after each wide character, which `TextWrapper` then counts as two
_BREAKS = re.compile(f"([\t\n\v\f\r ]+|.{_PAD})")  # the places where a line may be broken


@dataclass(frozen=True)
class Column:
    """A column of a table: its head and cells."""

    head: str
    cells: Sequence[str]
    number: bool = False  # right-aligned
    # How to narrow cells if a text table is too wide: "cut", "wrap", or "" (keep the width).
    fit: str = ""
    least: int = 20  # minimum width of a narrowed column
    notes: Sequence[str] = ()  # a note below each row, starting at this column; "" for no note
    css: str | Sequence[str] = ""  # CSS classes: a string for all cells, or one string per cell
    html: Sequence[str] = ()  # the cells as HTML; if empty, `cells` are escaped and used

    @property
    def width(self) -> int:
        return max(map(width, (self.head, *self.cells)))

    def note(self, row: int) -> str:
        return self.notes[row] if self.notes else ""


@dataclass(frozen=True)
class Fold:
    """The number of rows to show, and a note that counts the hidden rows."""

    first: int
    words: str = "and {} more"

    def note(self, count: int) -> str:
        """Return the note below a table with `count` rows; ``""`` if all are shown."""
        left = count - self.first
        return self.words.format(f"{left:,}") if left > 0 else ""


_UNFOLDED = Fold(sys.maxsize)


def width(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )


def short(text: str, most: int) -> str:
    """Cut a text to at most `most` columns."""
    if width(text) <= most:
        return text
    # First cut by length, because the loop below would be slow for a very long text.
    text = text[: max(most - 1, 0)]
    while width(text) > most - 1 > 0:
        text = text[:-1]
    return f"{text}…"


def wrapped(text: str, margin: str = "", more: str | None = None, room: int = WIDTH) -> list[str]:
    """Wrap a text; lines after the first begin with `more`, by default `margin` and two spaces."""
    more = f"{margin}  " if more is None else more
    wrapper = TextWrapper(max(room, 1), margin, more, break_on_hyphens=False)
    wrapper.wordsep_simple_re = _BREAKS
    padded = "".join(char + _PAD * (width(char) > 1) for char in text)
    return [line.replace(_PAD, "") for line in wrapper.wrap(padded)]


def lines(
    columns: Sequence[Column], margin: str = "", fold: Fold = _UNFOLDED, room: int = WIDTH
) -> list[str]:
    """Return a table as lines of text; columns that do not fit follow in another table."""
    if not columns or not (columns[0].cells or columns[0].head):
        return []
    count, space = len(columns), room - len(margin)
    # Show at least two columns, because the first column only names the rows.
    while _total(_widths(columns[:count], space)) > space and count > 2:
        count -= 1
    found = [f"{margin}{line}".rstrip() for line in _table(columns[:count], fold, space)]
    if count < len(columns):
        found += ["", *lines([columns[0], *columns[count:]], margin, fold, room)]
    return found


def _table(columns: Sequence[Column], fold: Fold, room: int) -> Iterator[str]:
    widths, count = _widths(columns, room), len(columns[0].cells)
    if any(column.head for column in columns):
        heads = [short(column.head, most) for column, most in zip(columns, widths, strict=True)]
        yield _line(heads, columns, widths)
    for n in range(count)[: fold.first]:
        yield from _row(columns, widths, n, room)
    if note := fold.note(count):
        yield note


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _widths(columns: Sequence[Column], room: int) -> list[int]:
    widths = [column.width for column in columns]
    # Wrap columns before cutting other columns, because wrapping loses no text.
    for fit in ("wrap", "cut"):
        for n, column in enumerate(columns):
            if column.fit == fit:
                over = max(_total(widths) - room, 0)
                widths[n] = min(widths[n], max(widths[n] - over, column.least))
    return widths


def _row(columns: Sequence[Column], widths: Sequence[int], n: int, room: int) -> list[str]:
    cells = [
        wrapped(column.cells[n], more="", room=most)
        if column.fit == "wrap"
        else [short(column.cells[n], most) if column.fit else column.cells[n]]
        for column, most in zip(columns, widths, strict=True)
    ]
    found = [_line(parts, columns, widths) for parts in zip_longest(*cells, fillvalue="")]
    for k, column in enumerate(columns):
        indent = " " * sum(most + len(_GAP) for most in widths[:k])
        found += wrapped(column.note(n), indent, room=max(room, len(indent) + column.least))
    return found


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = []
    for cell, column, most in zip(cells, columns, widths, strict=True):
        pad = " " * (most - width(cell))
        padded.append(pad + cell if column.number else cell + pad)
    return _GAP.join(padded).replace(GLUE, " ").rstrip()


def html(
    columns: Sequence[Column], *, title: str = "", css: str = "", fold: Fold = _UNFOLDED
) -> str:
    """Return a table as HTML; a title replaces the columns' heads."""
    heads = ""
    if title:
        heads = f'<th scope="colgroup" colspan="{len(columns)}">{escape(title)}</th>'
    elif any(column.head for column in columns):
        heads = "".join(
            f'<th scope="col"{_css("gm-number" * column.number)}>{escape(column.head)}</th>'
            for column in columns
        )
    count = len(columns[0].cells) if columns else 0
    body = "".join(_html_row(columns, n) for n in range(count)[: fold.first])
    head = f"<thead><tr>{heads}</tr></thead>" if heads else ""
    below = tag("div", note, "gm-note") if (note := fold.note(count)) else ""
    return f"<table{_css(css)}>{head}<tbody>{body}</tbody></table>{below}"


def _html_row(columns: Sequence[Column], n: int) -> str:
    cells, notes = [], ""
    for k, column in enumerate(columns):
        css = column.css if isinstance(column.css, str) else column.css[n]
        content = column.html[n] if column.html else escape(column.cells[n])
        cells.append(f"<td{_css(f'gm-number {css}' if column.number else css)}>{content}</td>")
        if column.note(n) and not column.html:
            note = f'<td colspan="{len(columns) - k}">{escape(column.note(n))}</td>'
            notes += f'<tr class="gm-below">{"<td></td>" * k}{note}</tr>'
    return f"<tr>{''.join(cells)}</tr>{notes}"


def _css(names: str) -> str:
    return f' class="{names.strip()}"' if names else ""
