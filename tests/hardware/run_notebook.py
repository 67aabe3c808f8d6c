"""Run the notebook in a process of its own; print as JSON what each cell showed.

Where it runs, real GPU or virtual, is said by CUDA_VISIBLE_DEVICES and GPUMAGIC_VIRTUAL.
"""

import io
import json
from contextlib import redirect_stderr, redirect_stdout

from hardware.programs import NOTEBOOK
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


def main() -> None:
    config = Config()
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.xmode = "Minimal"
    shell = InteractiveShell.instance(config=config)
    shown = {}
    for name, cell in NOTEBOOK.items():
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            shell.run_cell(cell, store_history=True)
        shown[name] = out.getvalue()
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
