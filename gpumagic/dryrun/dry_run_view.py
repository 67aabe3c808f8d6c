"""Show a dry run: the peak first, then what would fail, then the details."""

from collections.abc import Iterator
from dataclasses import replace
from textwrap import indent

from gpumagic.display import table
from gpumagic.display.table import block, folded, tag
from gpumagic.display.units import duration, size
from gpumagic.dryrun.result import CARD_STANDS_AS, DryRun, OnCard, Peak, Unknown
from gpumagic.ledger import watch

_FOLD = table.Fold(12)


def text(run: DryRun) -> str:
    """For terminals."""
    lines = [head(run)]
    lines += [f"  {words}" for words in (*on_cards(run), *by_rank(run))]
    for peak in shown_peaks(run):
        lines.append(f"  {memory(peak)}{_at(peak)}")
    for mismatch in run.mismatches:
        lines += [f"  would fail at {mismatch.where}", indent(str(mismatch), "    ")]
    if run.error:
        lines.append(f"  would fail at {run.error_at}: {run.error}")
    lines += [f"  {words}" for words in unknowns(run)]
    for title, columns in _tables(run):
        lines += [*[f"  {title}"] * bool(title), *table.lines(columns, "    ", _FOLD)]
    if run.ledger:
        lines += ["  copies and waits", indent(watch.text(run.ledger), "    ")]
    return "\n".join(lines)


def html(run: DryRun) -> str:
    """For notebooks."""
    parts = [tag("div", head(run), "gm-caption")]
    for n, words in enumerate((*on_cards(run), *by_rank(run))):
        parts.append(tag("div" if n else "b", words, "gm-dim" if n else ""))
    for peak in shown_peaks(run):
        fits = tag("b", memory(peak), "gm-bad" if peak.fits is False else "")
        parts.append(f"<div>{fits}{tag('span', _at(peak), 'gm-dim')}</div>")
    for mismatch in run.mismatches:
        parts.append(tag("div", f"would fail at {mismatch.where}", "gm-problem"))
        parts.append(mismatch.html or tag("pre", mismatch))
    if run.error:
        parts.append(tag("div", f"would fail at {run.error_at}: {run.error}", "gm-problem"))
    parts += [tag("div", words, "gm-note") for words in unknowns(run)]
    for title, columns in _tables(run):
        shown = table.html(columns, title=title, css="gm-section")
        count = len(columns[0].cells)
        parts.append(shown if count <= _FOLD.first else folded(f"{title}: {count}", shown))
    if run.ledger:
        parts.append(watch.html(run.ledger, with_line=False))
    return block("".join(parts))


def _tables(run: DryRun) -> Iterator[tuple[str, list[table.Column]]]:
    """What it assigns and what is brought before it, each under its title."""
    card = run.device if run.cards else CARD_STANDS_AS
    assigned = [(a.name, a.kind, a.device.replace(CARD_STANDS_AS, card)) for a in run.assigned]
    to = f" → {run.device}"
    brought = [(m.name, size(m.nbytes), ", ".join(m.sources) + to) for m in run.moved]
    yield from _sent(run)
    for title, rows in (("assigns", assigned), ("brings", brought)):
        if rows:
            first, middle, last = zip(*rows, strict=True)
            names = table.Column("", first, css="gm-code")
            devices = table.Column("", last, fit="cut", css="gm-code gm-dim")
            yield title, [names, table.Column("", middle), devices]


def _sent(run: DryRun) -> Iterator[tuple[str, list[table.Column]]]:
    """What each rank sends to the others."""
    alike = len({on.collectives for on in run.ranks}) == 1
    for on in run.ranks[:1] if alike else run.ranks:
        found = on.collectives
        if found:
            sends = f"{'each rank' if alike else f'rank {on.rank}'} sends"
            head = f"{sends} {size(sum(c.sent for c in found))}"
            yield (
                "",
                [
                    table.Column(head, [c.name for c in found], css="gm-code"),
                    table.Column("ranks", [str(c.ranks) for c in found], number=True),
                    table.Column("calls", [str(c.calls) for c in found], number=True),
                    table.Column("in all", [size(c.nbytes) for c in found], number=True),
                    table.Column("sent in a ring", [size(c.sent) for c in found], number=True),
                ],
            )


def by_rank(run: DryRun) -> Iterator[str]:
    """``rank 0 needs at least 61.3 GiB, rank 7 at least 61.1 GiB``."""
    if len(run.ranks) < 2 or not run.cards:  # of GPUs that are here, a line for each says it
        return
    needs = [0 if on.peak is None else on.peak.needed for on in run.ranks]
    if len({*needs}) == 1:
        yield f"{' and '.join(f'rank {on.rank}' for on in run.ranks)} need as much"
    else:
        each = (f"rank {on.rank} needs {size(n)}" for on, n in zip(run.ranks, needs, strict=True))
        yield ", ".join(each)


def head(run: DryRun) -> str:
    """``dry run on cuda:1 (virtual): nothing was computed · 85 ms``."""
    virtual = " (virtual)" if run.virtual else ""
    elsewhere = " (not here)" if run.cards else virtual
    where = f" on {run.device}{elsewhere}" if run.device else ""
    ranks = f" of one rank of {run.world}" if run.ranks else ""
    printed = run.printed.count("\n")
    parts = [
        f"dry run{ranks}{where}: nothing was computed",
        "" if run.complete else "ended early",
        f"{printed} line{'s' * (printed != 1)} printed, not shown" if printed else "",
        duration(run.seconds),
    ]
    return " · ".join(filter(None, parts))


def on_cards(run: DryRun) -> Iterator[str]:
    """``needs 61.3 GiB; fits on H100 80GB (17.3 GiB left)``, and what was taken off each card."""
    if not run.cards:
        return
    at_least = "" if run.complete else "at least "
    yield f"needs {at_least}{size(run.cards[0].needed)}; {'; '.join(map(_on_card, run.cards))}"
    for card in (each.card for each in run.cards):
        total = f"{size(card.total)}{' by torch' if card.reported else ' by its name'}"
        yield (
            f"{card.name}: {total}, less estimates of {size(card.context)} for CUDA's context and "
            f"{size(card.workspace)} for cuBLAS"
        )


def _on_card(on: OnCard) -> str:
    if on.fits:
        return f"fits on {on.card.name} ({size(on.left)} left)"
    start = "from the start" if on.at is None else f"from {replace(on.at, source='')} on"
    return f"{on.card.name}: no, {start} ({size(-on.left)} more than there is)"


def shown_peaks(run: DryRun) -> list[Peak]:
    """Of GPUs; of the CPU where the code is to run there. Of a card it is said in other words."""
    if run.cards:
        return []
    if run.ranks:
        found = [(on.peak, f"rank {on.rank} on {on.peak.device}") for on in run.ranks if on.peak]
        return [replace(peak, device=name) for peak, name in found]
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
