"""Reads the pages, README.md and docs/*.md, and runs their code as a reader would paste it.

A page's Python blocks are the cells of one notebook, which begins empty. A block of text right
below one is what it shows, line by line and but for numbers; `…` is the rest of a line, or others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from traitlets.config.loader import PyFileConfigLoader

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_NUMBER = re.compile(r"[\d.,]+[  ]?(?:ns|µs|ms|s|B|[KMGT]iB|%|k/s|M/s)?(?!\w)")
_FAILS = re.compile(r"^\w*(Error|Warning): ", re.M)
_CONFIG = "c = get_config()"


@dataclass
class Block:
    """A fenced block, where it stands, and what the page says that it shows."""

    language: str
    code: str
    place: str
    shows: list[str] = field(default_factory=list)


def tokens(page: Path) -> list[Token]:
    return MarkdownIt("gfm-like", {"linkify": False}).parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    """Each block of code; one of text belongs to the one above it."""
    last: Block | None = None
    for token in tokens(page):
        if token.type != "fence":
            # What stands between a block and a text makes that a text of its own.
            if last is not None:
                yield last
            last = None
        elif token.info == "text" and last is not None:
            last.shows = token.content.splitlines()
        else:
            if last is not None:
                yield last
            last = Block(token.info, token.content, f"{page.name}:{(token.map or [0])[0] + 1}")
    if last is not None:
        yield last


def words(line: str) -> str:
    """A line without its numbers, which are another machine's, and without alignment."""
    return " ".join(_NUMBER.sub("#", line.replace("\N{NO-BREAK SPACE}", " ")).split())


def run(page: Path, notebook, folder: Path) -> None:
    """Run a page's cells in order; each must end, and show, as the page says."""
    for block in blocks(page):
        if block.language == "python" and not block.code.startswith(_CONFIG):
            _run(block, notebook)
        elif block.language == "python":
            (folder / "config.py").write_text(block.code)
            assert PyFileConfigLoader("config.py", str(folder)).load_config(), block.place


def _run(block: Block, notebook) -> None:
    done = notebook.run(block.code)
    told = f"{block.place}\n{block.code}\n{done.text}"
    fails = _FAILS.search("\n".join(block.shows))
    assert done.success == (fails is None), told
    # An iterator: what comes further down the page is looked for below what was found.
    shown = iter(words(line) for line in done.text.splitlines())
    for line in (line for line in block.shows if line.strip(" …")):
        assert any(_says(one, line) for one in shown), f"{line}\nis not shown by {told}"


def _says(shown: str, line: str) -> bool:
    """Whether a line has all that the page's has, in that order; a table may have more columns."""
    there = iter(shown.split())
    return all(word in there for word in words(line.replace("…", "")).split())
