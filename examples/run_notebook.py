"""Run a notebook without a browser, and print the output of each cell."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter


def run(notebook: Path, output: Path) -> int:
    """Run `notebook`, and write its HTML to the folder `output`. Return 1 if a cell raised."""
    book = nbformat.read(notebook, as_version=4)
    print(f"running {notebook.name} in a kernel of {sys.executable}")
    show = _Show(book)
    client = NotebookClient(
        book,
        timeout=600,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(notebook.parent)}},
        on_cell_execute=show.start,
        on_cell_executed=show.outputs,
    )
    status = 0
    try:
        client.execute()
    except CellExecutionError as error:
        print(f"\n{error.ename}: {error.evalue}", file=sys.stderr)
        status = 1
    html, _ = HTMLExporter().from_notebook_node(book)
    output.mkdir(parents=True, exist_ok=True)
    written = output / notebook.with_suffix(".html").name
    written.write_text(html, encoding="utf-8")
    print(f"\nthe notebook with its outputs: {written.resolve()}")
    return status


class _Show:
    """Print each code cell's number and first line, and then the cell's outputs and time."""

    def __init__(self, book: Any) -> None:
        self._code = [n for n, cell in enumerate(book.cells) if cell.cell_type == "code"]

    def start(self, cell: Any, cell_index: int) -> None:
        first, *_ = cell.source.strip().split("\n")
        print(f"\n[{self._code.index(cell_index) + 1}/{len(self._code)}] {first}", flush=True)
        self._started = time.perf_counter()

    def outputs(self, cell: Any, **_: Any) -> None:
        for line in "".join(map(_text, cell.outputs)).splitlines():
            print(f"    {line}")
        print(f"    ({time.perf_counter() - self._started:.1f} s)", flush=True)


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}\n"
    text = str(output.get("data", {}).get("text/plain", "")).rstrip()
    return f"{text}\n" if text else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    quickstart = Path(__file__).with_name("quickstart.ipynb")
    parser.add_argument("notebook", nargs="?", type=Path, default=quickstart)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the HTML")
    given = parser.parse_args()
    if not given.notebook.is_file():
        parser.error(f"there is no notebook {given.notebook}; type a path that ends in .ipynb")
    sys.exit(run(given.notebook, given.output))
