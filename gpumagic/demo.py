"""Run a notebook headless and print what its cells show as they go."""

import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpumagic.errors import GpuError


def run(notebook: Path | None, output: Path) -> int:
    """Execute `notebook` in a real kernel and write it, with its outputs, as HTML into `output`.

    Returns 0, or 1 if a cell raised; GpuError where the notebook, or what runs one, is missing.
    """
    path = notebook or _first_notebook()
    if not path.is_file():
        raise GpuError(f"there is no notebook {path}; type a path that ends in .ipynb")
    try:
        import nbformat
        from nbclient.exceptions import CellExecutionError
        from nbconvert import HTMLExporter

        client_class = _live_client()
    except ModuleNotFoundError as error:
        raise GpuError(f'the demo needs {error.name}; type: pip install "gpumagic[demo]"') from None
    book = nbformat.read(path, as_version=4)
    print(f"running {path.name} in a kernel of {sys.executable}")
    client = client_class(
        book,
        timeout=600,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
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


def _live_client() -> Any:
    """nbclient's class that runs a notebook, made to print each output when it comes."""
    from nbclient import NotebookClient
    from nbformat.v4 import output_from_msg

    class LiveClient(NotebookClient):
        def output(self, outs: Any, msg: Any, display_id: Any, cell_index: Any) -> Any:
            shown = super().output(outs, msg, display_id, cell_index)
            if shown is not None and display_id is not None:
                self.changing.append(shown)
            elif shown is not None:
                _print(output_from_msg(msg))
            return shown

        def on_cell_execute(self, cell: Any, cell_index: int) -> None:
            # What it may still write over, such as a line that says how far it is.
            self.changing: list[Any] = []
            code = [n for n, other in enumerate(self.nb.cells) if other.cell_type == "code"]
            first = cell.source.strip().partition("\n")[0]
            print(f"\n[{code.index(cell_index) + 1}/{len(code)}] {first}", flush=True)
            self.started = time.perf_counter()

        def on_cell_executed(self, **kw: Any) -> None:
            for shown in self.changing:
                _print(shown)
            print(f"    ({time.perf_counter() - self.started:.1f} s)", flush=True)

    return LiveClient


def _print(output: Any) -> None:
    for line in _text(output).rstrip().splitlines():
        print(f"    {line}", flush=True)


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return str(output.data.get("text/plain", ""))


def _first_notebook() -> Path:
    """The quickstart; where there is no torch, the textbook's chapter in the framework there is."""
    names = {"torch": "quickstart", "jax": "d2l_gpus_jax", "tensorflow": "d2l_gpus_tensorflow"}
    return example(
        next((name for module, name in names.items() if find_spec(module)), "quickstart")
    )


def example(name: str) -> Path:
    """Return the path of an example notebook; raise GpuError if it is not installed."""
    here = Path(__file__).parent
    for folder in (here / "examples", here.parent / "examples"):
        if (folder / f"{name}.ipynb").is_file():
            return folder / f"{name}.ipynb"
    raise GpuError(f"{name}.ipynb is not installed; type: gpumagic demo PATH.ipynb")
