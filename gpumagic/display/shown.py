"""Show records by views that they do not know.

A room's façade names the views of each of its records; a view is imported when it is needed for the
first time, so that a record costs no import of what draws it.
"""

from __future__ import annotations

from importlib import import_module
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
