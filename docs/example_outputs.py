"""Run the example notebooks and keep what their cells show, as text and pictures.

`make examples` calls it. Text alone keeps a change readable in a diff, and GitHub shows it as the
notebook does. Paths, the host's name and the user's are replaced.
"""

import os
import re
import site
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

EXAMPLES = Path(__file__).parents[1] / "examples"
SHOWN = ("text/plain", "image/png")
# Escape sequences are torn where a path is replaced, and a diff of them cannot be read.
COLORS = re.compile(r"\x1b\[[0-9;]*m")
PRIVATE = {
    **{re.escape(folder): "…/site-packages" for folder in site.getsitepackages()},
    re.escape(str(EXAMPLES.parent)): "…/gpumagic",
    re.escape(str(Path.home())) + r"(?=/)": "~",
    rf"\b{re.escape(socket.gethostname())}\b": "ml-box",
    re.escape(tempfile.gettempdir()) + r"/tmp\w+": "/tmp/example",
    r"(?<=[Pp][Ii][Dd] )\d+": "4242",
}


def main(names: list[str]) -> None:
    """Run the notebooks of these names, or all of them, in their order."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for path in [EXAMPLES / f"{name}.ipynb" for name in names] or sorted(EXAMPLES.glob("*.ipynb")):
        start = time.perf_counter()
        book = nbformat.read(path, as_version=4)
        client = NotebookClient(
            book,
            timeout=900,
            kernel_name="python3",
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(EXAMPLES)}},
        )
        client.execute()
        book, _ = CoalesceStreamsPreprocessor().preprocess(book, {})
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.outputs = list(light(cell.outputs))
        book.metadata.language_info = {"name": "python"}
        book.metadata.pop("widgets", None)
        nbformat.validate(book)
        nbformat.write(book, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size:,} bytes")


def light(outputs: list[Any]) -> Iterator[Any]:
    """Yield the outputs as text and pictures, without colors and without names of this machine."""
    for output in outputs:
        if output.output_type == "stream":
            output.text = public(output.text)
        elif output.output_type == "error":
            output.traceback = [public(line) for line in output.traceback]
        else:
            data = {kind: text for kind, text in output.data.items() if kind in SHOWN}
            if "text/plain" in data:
                data["text/plain"] = public(data["text/plain"])
            output.data, output.metadata = data, {}
            if not any(data.values()):  # a progress line that has ended
                continue
        yield output


def public(text: str) -> str:
    """Return the text without colors, this machine's paths and its name."""
    text = COLORS.sub("", text)
    for private, shown in PRIVATE.items():
        text = re.sub(private, shown, text)
    return text


if __name__ == "__main__":
    main(sys.argv[1:])
