"""Run a notebook without a browser, and print the output of each cell."""

import sys
import time
from pathlib import Path
from typing import Any

from gpumagic.errors import GpuError


def run(notebook: Path | None, output: Path) -> int:
    """Run `notebook`, and write its HTML to the folder `output`. Return 1 if a cell raised."""
    path = notebook or example("quickstart")
    if not path.is_file():
        raise GpuError(f"there is no notebook {path}; type a path that ends in .ipynb")
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
        from nbconvert import HTMLExporter
    except ModuleNotFoundError as error:
        raise GpuError(f'the demo needs {error.name}; type: pip install "gpumagic[demo]"') from None
    book = nbformat.read(path, as_version=4)
    print(f"running {path.name} in a kernel of {sys.executable}")
    show = _Show(book)
    client = NotebookClient(
        book,
        timeout=600,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
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
    written = output / path.with_suffix(".html").name
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


def example(name: str) -> Path:
    """Return the path of an example notebook; raise GpuError if it is not installed."""
    here = Path(__file__).parent
    for folder in (here / "examples", here.parent / "examples"):
        if (folder / f"{name}.ipynb").is_file():
            return folder / f"{name}.ipynb"
    raise GpuError(f"{name}.ipynb is not installed; type: gpumagic demo PATH.ipynb")
