"""Show records by views that they do not know.

A room's façade names the view of each of its records; the view is imported when a record is shown
for the first time, so that a record costs no import of what draws it.
"""

from __future__ import annotations

from importlib import import_module

_views: dict[str, tuple[str, str]] = {}


def register(record: str, text: str, html: str = "") -> None:
    """Name the modules that show a class of records.

    Parameters
    ----------
    record : str
        The class, with its module: ``"gpumagic.cell.report.Report"``.
    text, html : str
        A module with ``text(record)``, and one with ``html(record)`` where it is another.
    """
    _views[record] = text, html or text


def _views_of(kind: type) -> tuple[str, str]:
    """The modules that show a class, or the nearest of its bases that has a view."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next(_views[name] for name in names if name in _views)


class Shown:
    """A record that IPython shows as HTML, and everything else as text."""

    def __repr__(self) -> str:
        text: str = import_module(_views_of(type(self))[0]).text(self)
        return text

    def _repr_html_(self) -> str:
        html: str = import_module(_views_of(type(self))[1]).html(self)
        return html
