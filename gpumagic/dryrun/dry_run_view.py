"""A dry run as text and as HTML: the peak first, then what would fail, then the details."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape

from gpumagic.display.style import block, tag
from gpumagic.display.units import duration, size
from gpumagic.dryrun.result import DryRun, Peak, Unknown
from gpumagic.dryrun.transfers import Transfer

_SHOWN = 12
_WIDTH = 100


def text(run: DryRun) -> str:
    """For terminals."""
    lines = [head(run)]
    for peak in shown_peaks(run):
        lines.append(f"  {memory(peak)}{_at(peak)}")
    for mismatch in run.mismatches:
        lines += [f"  would fail at {mismatch.where}", *_indented(str(mismatch))]
    if run.error:
        lines.append(f"  would fail at {run.error_at}: {run.error}")
    lines += [f"  {words}" for words in unknowns(run)]
    lines += _table("assigns", [(a.name, a.kind, a.device) for a in run.assigned])
    lines += _table("transfers", [transfer(t) for t in run.transfers])
    return "\n".join(line[:_WIDTH] if line.startswith("    ") else line for line in lines)


def html(run: DryRun) -> str:
    """For notebooks."""
    parts = [f'<div class="gm-caption">{escape(head(run))}</div>']
    for peak in shown_peaks(run):
        css = "gm-bad" if peak.fits is False else ""
        place = f'<span class="gm-dim">{escape(_at(peak))}</span>'
        parts.append(f"<div>{tag('b', memory(peak), css)}{place}</div>")
    for mismatch in run.mismatches:
        inside = mismatch.html or f"<pre>{escape(str(mismatch))}</pre>"
        parts.append(_problem(f"would fail at {mismatch.where}") + inside)
    if run.error:
        parts.append(_problem(f"would fail at {run.error_at}: {run.error}"))
    parts += [f'<div class="gm-note">{escape(words)}</div>' for words in unknowns(run)]
    parts.append(_rows("assigns", [(a.name, a.kind, a.device) for a in run.assigned]))
    parts.append(_rows("transfers", [transfer(t) for t in run.transfers]))
    return block("".join(parts))


def head(run: DryRun) -> str:
    """``dry run on cuda:1 (virtual): nothing was computed · 85 ms``."""
    virtual = " (virtual)" if run.virtual else ""
    where = f" on {run.device}{virtual}" if run.device else ""
    printed = run.printed.count("\n")
    parts = [
        f"dry run{where}: nothing was computed",
        "" if run.complete else "ended early",
        f"{printed} line{'s' * (printed != 1)} printed, not shown" if printed else "",
        duration(run.seconds),
    ]
    return " · ".join(filter(None, parts))


def shown_peaks(run: DryRun) -> list[Peak]:
    """Of GPUs; of the CPU where the code is to run there."""
    gpus = [p for device, p in run.peak.items() if device != "cpu" and (p.needed or p.peak)]
    return gpus if gpus or run.device not in ("", "cpu") else list(run.peak.values())


def memory(peak: Peak) -> str:
    """``cuda:1: at least 14.2 GiB of 15.8 GiB free; peak 14.3 GiB``."""
    free = f"of {size(peak.free)} free" if peak.free is not None else "more"
    words = f"{peak.device}: at least {size(peak.needed)} {free}"
    if peak.fits is False:
        words += ": does not fit"
    return words if peak.peak == peak.needed else f"{words}; peak {size(peak.peak)} in all"


def _at(peak: Peak) -> str:
    return f", at {peak.at}" if peak.at is not None else ""


def unknowns(run: DryRun) -> Iterator[str]:
    """What could not be known, the end last."""
    for unknown in sorted(run.unknown, key=lambda u: u.ended):
        yield f"ended at {_said(unknown)}" if unknown.ended else _said(unknown)


def _said(unknown: Unknown) -> str:
    where = unknown.where
    if where is None:
        return unknown.reason
    # A magic's line is not what the user typed, and its reason names it.
    source = "" if not where.line or "get_ipython()" in where.source else where.source
    line = str(replace(where, source=""))
    return f"{line}: {unknown.reason}" + (f" · {source}" if source else "")


def transfer(entry: Transfer) -> tuple[str, str, str]:
    """A transfer's line, its bytes and direction, and its code."""
    count = f"{entry.count:,} × " if entry.count > 1 else ""
    what = f"{count}{entry.operator}"
    if entry.kind == "wait":
        words = f"{what}: the host waits for {entry.source}"
    else:
        words = f"{what}: {size(entry.nbytes)} {entry.source} → {entry.destination}"
    where = entry.where
    inside = f" of {where.function}()" if where.function else ""
    return (f"line {where.line}{inside}" if where.line else "before", words, where.source)


def _indented(words: str) -> list[str]:
    return [f"    {line}" for line in words.splitlines()]


def _table(title: str, rows: list[tuple[str, str, str]]) -> list[str]:
    if not rows:
        return []
    shown = rows[:_SHOWN]
    first, second = (max(len(row[n]) for row in shown) for n in (0, 1))
    lines = [f"    {a.ljust(first)}  {b.ljust(second)}  {c}".rstrip() for a, b, c in shown]
    more = [f"    and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return [f"  {title}", *lines, *more]


def _rows(title: str, rows: list[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    cells = "".join(
        f"<tr>{tag('td', a, 'gm-place')}{tag('td', b)}{tag('td', c, 'gm-place gm-dim')}</tr>"
        for a, b, c in rows
    )
    head = f'<tr><th colspan="3">{escape(title)}</th></tr>'
    table = f"<table><thead>{head}</thead><tbody>{cells}</tbody></table>"
    if len(rows) <= _SHOWN:
        return f'<div class="gm-section">{table}</div>'
    return (
        f'<details class="gm-section"><summary>{escape(title)}: {len(rows)}</summary>{table}'
        "</details>"
    )


def _problem(words: str) -> str:
    return f'<div class="gm-problem">{escape(words)}</div>'
