"""Wrap content in HTML that brings its own looks along and changes nothing outside itself.

The colors are those of palette.css, for light and for dark; text inside is always escaped.
"""

from __future__ import annotations

from functools import lru_cache
from html import escape
from importlib.resources import files


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
