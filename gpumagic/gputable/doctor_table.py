"""Show what the doctor checked, what was found, and what to type: ``%gpus --doctor``."""

from collections.abc import Sequence
from html import escape

from gpumagic.display import table
from gpumagic.display.table import block
from gpumagic.telemetry.doctor import Check

_MARKS = {True: "✓", False: "✗", None: "·"}
_CSS = {True: "gm-ok", False: "gm-bad", None: "gm-dim"}


class DoctorTable:
    """Checks as text of at most 100 columns, and as HTML, in the order given."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self.checks = tuple(checks)

    def __repr__(self) -> str:
        return "\n".join(table.lines(self._columns()))

    def _repr_html_(self) -> str:
        return block(table.html(self._columns()))

    def _columns(self) -> list[table.Column]:
        cures = [f"→ {check.cure}" if check.cure else "" for check in self.checks]
        found = [escape(check.found) for check in self.checks]
        return [
            table.Column(
                "",
                [f"{_MARKS[check.ok]} {check.name}" for check in self.checks],
                html=[_marked(check) for check in self.checks],
            ),
            table.Column(
                "",
                [check.found for check in self.checks],
                fit="wrap",
                css=[f"gm-wrap{' gm-dim' * (check.ok is None)}" for check in self.checks],
                notes=cures,
                html=[
                    f"{words}<br><b>{escape(cure)}</b>" if cure else words
                    for words, cure in zip(found, cures, strict=True)
                ],
            ),
        ]


def _marked(check: Check) -> str:
    return f'<span class="gm-mark {_CSS[check.ok]}">{_MARKS[check.ok]}</span>{escape(check.name)}'
