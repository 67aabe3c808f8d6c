"""An explained error between devices: a few lines of text, or the same as a small table."""

from __future__ import annotations

import textwrap
from html import escape

from gpumagic.display.units import size
from gpumagic.mismatch.explanation import Explanation, Fix, Operand

_LONGEST = 100
_CSS = """
.gpumagic-why { border-left: 3px solid var(--jp-error-color1, #e53935); margin: 2px 0;
  font: 12.5px/1.5 var(--jp-ui-font-family, system-ui, sans-serif);
  color: var(--jp-content-font-color1, inherit); padding: 1px 0 2px 10px; overflow-x: auto; }
.gpumagic-why.gpumagic-why :is(code, pre) { background: none; border: 0; color: inherit; margin: 0;
  font: 12.5px/1.5 var(--jp-code-font-family, ui-monospace, monospace); padding: 0; }
.gpumagic-why.gpumagic-why pre { background: rgba(128, 128, 128, .14); border-radius: 3px;
  display: inline-block; margin: 2px 0 0; padding: 2px 8px; white-space: pre; }
.gpumagic-why .gm-dim { opacity: .65; }
.gpumagic-why.gpumagic-why table { border: 0; border-collapse: collapse; color: inherit;
  font-size: inherit; margin: 1px 0; table-layout: auto; width: auto; }
.gpumagic-why.gpumagic-why tr:nth-child(n), .gpumagic-why.gpumagic-why tr:nth-child(n):hover {
  background: none; }
.gpumagic-why.gpumagic-why td { border: 0; color: inherit; line-height: inherit;
  padding: 0 16px 0 0; text-align: left; vertical-align: baseline; white-space: nowrap; }
.gpumagic-why.gpumagic-why td.gm-number { text-align: right; }
.gpumagic-why.gpumagic-why .gm-odd td { color: var(--jp-error-color1, #e53935); }
"""


def text(explanation: Explanation) -> str:
    """The expression, a line for each operand, the reason and the fix."""
    lines = [f"{_head(explanation)}: {_short(explanation.expression)}"]
    rows = [_row(operand) for operand in explanation.operands]
    widths = [max((len(row[n]) for row in rows), default=0) for n in range(4)]
    for name, device, nbytes, about, mark in rows:
        cells = (name.ljust(widths[0]), device.ljust(widths[1]), nbytes.rjust(widths[2]))
        lines.append(f"  {'  '.join(cells)}  {about.ljust(widths[3])}  {mark}".rstrip())
    if explanation.reason:
        lines += textwrap.wrap(
            f"why: {explanation.reason}",
            _LONGEST,
            initial_indent="  ",
            subsequent_indent="       ",
            break_long_words=False,
        )
    if explanation.fix:
        lines.append(f"  fix: {_where(explanation.fix)}{_cost(explanation.fix)}")
        lines.append(textwrap.indent(textwrap.dedent(explanation.fix.code), "      "))
    return "\n".join(lines)


def html(explanation: Explanation) -> str:
    """The same as HTML that changes nothing outside itself."""
    head = f"{escape(_head(explanation))}: <code>{escape(_short(explanation.expression))}</code>"
    rows = []
    for operand in explanation.operands:
        name, device, nbytes, about, mark = _row(operand)
        css = ' class="gm-odd"' if operand.odd else ""
        rows.append(
            f"<tr{css}><td><code>{escape(name)}</code></td><td><code>{escape(device)}</code></td>"
            f'<td class="gm-number">{escape(nbytes)}</td><td>{escape(about)}</td>'
            f"<td>{escape(mark)}</td></tr>"
        )
    body = f"<div>{head}</div>" + (f"<table>{''.join(rows)}</table>" if rows else "")
    if explanation.reason:
        body += f'<div><span class="gm-dim">why:</span> {escape(explanation.reason)}</div>'
    if fix := explanation.fix:
        code = escape(textwrap.dedent(fix.code))
        cost = f'<span class="gm-dim">{escape(_cost(fix))}</span>'
        body += f'<div><span class="gm-dim">fix:</span> {escape(_where(fix))}{cost}</div>'
        body += f"<pre>{code}</pre>"
    return f'<div class="gpumagic-why"><style>{_CSS}</style>{body}</div>'


def _head(explanation: Explanation) -> str:
    label = f"{explanation.label}, " if explanation.label else ""
    return f"between devices · {label}line {explanation.line}"


def _short(expression: str) -> str:
    return expression if len(expression) <= _LONGEST else f"{expression[: _LONGEST - 1]}…"


def _row(operand: Operand) -> tuple[str, str, str, str, str]:
    name = operand.name if not operand.also else f"{operand.name} ({operand.also})"
    mark = "← the odd one" if operand.odd else "← needed there next" if operand.along else ""
    return (
        _short(name),
        ", ".join(operand.devices),
        size(operand.nbytes),
        operand.about,
        mark,
    )


def _where(fix: Fix) -> str:
    label = f"{fix.label}, " if fix.label else ""
    if fix.where == "before":
        return f"{label}before line {fix.line}"
    lines = f"line {fix.line}"
    if fix.end_line > fix.line:
        lines = f"lines {fix.line} to {fix.end_line}"
    return f"{label}{lines}, write"


def _cost(fix: Fix) -> str:
    if fix.nbytes is None:
        return ""
    moves = f"moves {size(fix.nbytes)}" if fix.nbytes else "moves nothing"
    if fix.once and fix.nbytes:
        moves += " once"
    if fix.other_nbytes:
        moves += f"; the other way, {size(fix.other_nbytes)}{' each time' * fix.once}"
    return f" ({moves})"
