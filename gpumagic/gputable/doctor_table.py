"""``%gpus --doctor``: what was checked, what was found, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import Protocol

from gpumagic.display.style import block, tag

_MARKS = {True: "✓", False: "✗", None: "·"}
_CSS = {True: "gm-ok", False: "gm-bad", None: "gm-dim"}
_WIDTH = 100


class Checked(Protocol):
    """What a check must tell, as ``gpumagic.telemetry.doctor.Check`` does."""

    @property
    def name(self) -> str: ...
    @property
    def ok(self) -> bool | None: ...
    @property
    def found(self) -> str: ...
    @property
    def cure(self) -> str: ...


class DoctorTable:
    """Checks as text of at most 100 columns, and as HTML.

    Parameters
    ----------
    checks : sequence of Check
        In the order in which they are to be read.
    """

    def __init__(self, checks: Sequence[Checked]) -> None:
        self.checks = tuple(checks)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """For terminals; a cure stands below what it cures, after an arrow."""
        width = max((len(check.name) for check in self.checks), default=0)
        indent = " " * (width + 4)
        lines = []
        for check in self.checks:
            found = wrap(check.found, _WIDTH - len(indent)) or [""]
            lines.append(f"{_MARKS[check.ok]} {check.name.ljust(width)}  {found[0]}")
            lines += [indent + line for line in found[1:]]
            if check.cure:
                cure = wrap(f"→ {check.cure}", _WIDTH - len(indent), subsequent_indent="  ")
                lines += [indent + line for line in cure]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr>{tag('td', _MARKS[check.ok], _CSS[check.ok])}{tag('td', check.name)}"
            f'<td class="gm-wrap">{escape(check.found)}{_cure(check)}</td></tr>'
            for check in self.checks
        )
        return block(f"<table><tbody>{body}</tbody></table>")


def _cure(check: Checked) -> str:
    return f"<br><b>→ {escape(check.cure)}</b>" if check.cure else ""
