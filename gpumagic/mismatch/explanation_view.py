"""Show an explained error between devices: a few lines of text, or the same as a small table."""

from html import escape
from textwrap import dedent, indent

from gpumagic.display import table
from gpumagic.display.table import block, tag
from gpumagic.display.units import size
from gpumagic.mismatch.explanation import Explanation, Fix, Operand


def text(explanation: Explanation) -> str:
    """The expression, a line for each operand, the reason and the fix."""
    lines = [f"{_head(explanation)}: {table.short(explanation.expression, table.WIDTH)}"]
    lines += table.lines(_columns(explanation.operands), "  ")
    if explanation.reason:
        lines += table.wrapped(f"why: {explanation.reason}", "  ", "       ")
    if fix := explanation.fix:
        lines += [f"  fix: {_where(fix)}{_cost(fix)}", indent(dedent(fix.code), "      ")]
    return "\n".join(lines)


def html(explanation: Explanation) -> str:
    """The same as HTML."""
    code = tag("code", table.short(explanation.expression, table.WIDTH))
    body = f"<div>{escape(_head(explanation))}: {code}</div>"
    if explanation.operands:
        body += table.html(_columns(explanation.operands))
    if explanation.reason:
        body += f"<div>{tag('span', 'why:', 'gm-dim')} {escape(explanation.reason)}</div>"
    if fix := explanation.fix:
        cost = tag("span", _cost(fix), "gm-dim")
        body += f"<div>{tag('span', 'fix:', 'gm-dim')} {escape(_where(fix))}{cost}</div>"
        body += tag("pre", dedent(fix.code))
    return block(body, "explanation", css="gpumagic gm-why")


def _head(explanation: Explanation) -> str:
    label = f"{explanation.label}, " if explanation.label else ""
    return f"between devices · {label}line {explanation.line}"


def _columns(operands: tuple[Operand, ...]) -> list[table.Column]:
    odd = ["gm-bad" if operand.odd else "" for operand in operands]
    code = [f"gm-code {css}".strip() for css in odd]
    return [
        table.Column("", [_name(o) for o in operands], fit="cut", css=code),
        table.Column("", [", ".join(o.devices) for o in operands], css=code),
        table.Column("", [size(o.nbytes) for o in operands], number=True, css=odd),
        table.Column("", [o.about for o in operands], css=odd),
        table.Column("", [_mark(o) for o in operands], css=odd),
    ]


def _name(operand: Operand) -> str:
    return f"{operand.name} ({operand.also})" if operand.also else operand.name


def _mark(operand: Operand) -> str:
    return "← the odd one" if operand.odd else "← needed there next" if operand.along else ""


def _where(fix: Fix) -> str:
    label = f"{fix.label}, " if fix.label else ""
    if fix.where == "before":
        return f"{label}before line {fix.line}"
    several = fix.end_line > fix.line
    lines = f"lines {fix.line} to {fix.end_line}" if several else f"line {fix.line}"
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
