"""Collect what the programs gave; `--write-table` writes it into docs/virtual-gpus.md.

A row is a library's: a run of some libraries alone writes theirs, and the sums anew.
"""

import re
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

# transformers looks for a library `kernels`, and would find our tests/kernels.py.
sys.path.remove(str(Path(__file__).parents[1]))
PAGE = Path(__file__).parents[2] / "docs" / "virtual-gpus.md"
TABLE = re.compile(r"(?<=<!-- make test-libraries -->\n).*?(?=<!-- end -->)", re.DOTALL)
NUMBERS = ("programs", "runs", "exact", "close", "differs", "elsewhere", "fails")


class Table:
    """One row for each library: its programs, the ways they ran, and what became of those."""

    def __init__(self):
        self._rows, self._titles = {}, set()

    def note(self, program, way, outcome, why):
        """Note what became of one way of running one program, and why it is not exact."""
        library = program.library.replace("_", "-")
        counts, reasons = self._rows.setdefault(library, (Counter(), {}))
        counts.update(["runs", outcome])
        if (library, program.title) not in self._titles:
            self._titles.add((library, program.title))
            counts["programs"] += 1
        if outcome != "exact":
            reasons[why] = None

    def text(self, page=""):
        """The table in Markdown, with the rows of other libraries as the page has them."""
        rows = {}
        for line in page.splitlines()[2:-1]:
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            counts = dict(zip(NUMBERS, map(int, cells[:-1]), strict=True))
            rows[name.split()[0]] = name, counts, cells[-1]
        for library, (counts, reasons) in self._rows.items():
            rows[library] = f"{library} {version(library)}", counts, "; ".join(reasons)
        total = Counter()
        for _, counts, _ in rows.values():
            total.update(counts)
        lines = [f"| library | {' | '.join(NUMBERS)} | why |", "|---" * (len(NUMBERS) + 2) + "|"]
        for name, counts, why in [*(rows[library] for library in sorted(rows)), ("all", total, "")]:
            numbers = " | ".join(str(counts[number]) for number in NUMBERS)
            lines.append(f"| {name} | {numbers} | {why} |")
        return "\n".join(lines) + "\n"


def pytest_addoption(parser):
    parser.addoption("--write-table", action="store_true", help="into docs/virtual-gpus.md")


def pytest_configure(config):
    config.library_table = Table()


@pytest.fixture
def table(pytestconfig):
    return pytestconfig.library_table


def pytest_terminal_summary(terminalreporter, config):
    """Show the table, and write it where that was asked for."""
    terminalreporter.write_line(config.library_table.text())
    if config.getoption("--write-table"):
        page = PAGE.read_text()
        found = TABLE.search(page)
        PAGE.write_text(TABLE.sub(lambda _: config.library_table.text(found[0]), page))
