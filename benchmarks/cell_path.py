"""Through how many files of gpumagic does a cell go? Four cells, each after one like it.

Run it with `python benchmarks/cell_path.py`. It counts calls by `sys.setprofile`: the files of the
package that are entered, and the moves from one of them to another. What virtual GPUs do is left
out: on a machine with GPUs a driver does it. A path through few files is one that a reader can
follow. Exits 1 where a simple `%%ongpu` cell enters more than 16.
"""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

import gpumagic

PACKAGE = str(Path(gpumagic.__file__).parent)
LIMIT = 16
CELLS = {
    "%%ongpu 1": "%%ongpu 1\nY = X * 2",
    "dry run": "%%ongpu 1 --dry-run\nY = X * 2",
    "%gputime": "%gputime cpu 0 --max-time 0.1 -- X.cpu() @ X.cpu()",
    "an error explained": "X.to('cuda:0') + X.to('cuda:1')",
}


def path_of(shell: InteractiveShell, cell: str) -> tuple[dict[str, int], int]:
    """The files of gpumagic that a cell enters, with the calls in each, and the moves between."""
    entered: dict[str, int] = {}
    moves, last = 0, ""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal moves, last
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE) or _is_a_drivers(frame):
            return
        entered[file] = entered.get(file, 0) + 1
        moves += file != last
        last = file

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        sys.setprofile(profile)
        try:
            shell.run_cell(cell)
        finally:
            sys.setprofile(None)
    return entered, moves


def _is_a_drivers(frame: FrameType) -> bool:
    """Whether virtual GPUs do this: in a file of theirs, called by one, or wrapping a function."""
    wrapped = frame.f_locals.get("function") if frame.f_code.co_name == "call" else None
    caller = frame.f_back.f_code.co_filename if frame.f_back else ""
    files = (frame.f_code.co_filename, caller, getattr(wrapped, "__module__", "").replace(".", "/"))
    return any("/virtual/" in file for file in files)


def warm_shell() -> InteractiveShell:
    """A shell on two virtual GPUs, in which each cell has run once."""
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpumagic")
    gpumagic.virtual.enable(2)
    shell.run_cell("import torch\nX = torch.ones(8, 8)")
    return shell


def main() -> int:
    shell = warm_shell()
    failed = False
    print(f"{'':22}{'files':>6}{'moves':>7}")
    for name, cell in CELLS.items():
        for _ in range(2):  # what is imported for the first is looked at once by the second
            path_of(shell, cell)
        entered, moves = path_of(shell, cell)
        over = name == "%%ongpu 1" and len(entered) > LIMIT
        failed |= over
        print(f"{name:22}{len(entered):6}{moves:7}{f'   OVER {LIMIT}' if over else ''}")
        if "--files" in sys.argv:
            for file, calls in sorted(entered.items()):
                print(f"    {file.removeprefix(PACKAGE + '/'):36}{calls:5} calls")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
