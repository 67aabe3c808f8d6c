"""Show records by views that they do not know, in HTML that changes nothing outside itself.

A room's façade names the views of each of its records; a view is imported when it is needed for the
first time, so that a record costs no import of what draws it. The colors are those of palette.css,
for light and for dark; text is always escaped.
"""

import re
from functools import lru_cache
from html import escape
from importlib import import_module
from importlib.resources import files
from typing import Any

_views: dict[str, dict[str, str]] = {}


def register(record: str, text: str, html: str = "", **others: str) -> None:
    """Name the modules that show ``"gpumagic.room.file.Class"``: its text, HTML and `others`."""
    _views[record] = {"text": text, "html": html or text, **others}


def view(record: object, kind: str) -> Any:
    """The module that shows a record, or that of the nearest of its bases that has one."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(record).__mro__)
    return import_module(next(_views[name][kind] for name in names if name in _views))


class Shown:
    """A record that IPython shows as HTML, and everything else as text."""

    def __repr__(self) -> str:
        return str(view(self, "text").text(self))

    def _repr_html_(self) -> str:
        return str(view(self, "html").html(self))

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """For JupyterLab's panel: title and bars of a measurement. It draws no HTML."""
        panel = getattr(view(self, "text"), "panel", None)
        return {"application/vnd.gpumagic+json": panel(self)} if panel else {}


@lru_cache
def sheet(name: str) -> str:
    """One of the style sheets beside this file, without its comments."""
    css = files(__package__).joinpath(f"{name}.css").read_text(encoding="utf-8")
    return css.partition("*/\n")[2]


def block(content: str, *sheets: str, css: str = "gpumagic") -> str:
    """HTML in the palette's colors and with the sheets named, those of tables if none is."""
    rules = "".join(sheet(name) for name in ("palette", *(sheets or ("table",))))
    return f'<div class="{css}"><style>{rules}</style>{content}</div>'


def tag(name: str, text: object, css: str = "", title: str = "") -> str:
    """One element around text, which is escaped."""
    attributes = f' class="{css}"' if css else ""
    if title:
        attributes += f' title="{escape(title)}"'
    return f"<{name}{attributes}>{escape(str(text))}</{name}>"


def coded(text: str) -> str:
    """Text, escaped, in which what stands between back-ticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def folded(summary: str, content: str, *, unfolded: bool = False) -> str:
    """HTML that is shown when one clicks its summary, which is text."""
    return f"<details{' open' * unfolded}>{tag('summary', summary)}{content}</details>"


def bar(parts: list[tuple[str, float]], label: str, *, short: bool = False) -> str:
    """A bar of colored parts, each a CSS class and its share from 0 to 1, with a label for those
    who do not see it."""
    left = 1.0
    pieces = []
    for css, part in parts:
        # Together never more than the bar, whatever the driver says.
        width = min(max(part, 0.0), left)
        left -= width
        if width > 0:
            pieces.append(f'<i class="{css}" style="width:{100 * width:.2f}%"></i>')
    css = "gm-bar gm-short" if short else "gm-bar"
    text = escape(label)
    attributes = f'class="{css}" role="img" aria-label="{text}" title="{text}"'
    return f"<span {attributes}>{''.join(pieces)}</span>"
