"""A notebook with JAX on two virtual GPUs, where torch cannot be imported."""

import sys

import pytest

# A machine without torch, also where it is installed. This process is one of these tests alone.
sys.modules["torch"] = None


class Notebook:
    """IPython with gpumagic loaded; `run` gives what a cell shows, or raises what it raised."""

    def __init__(self, capsys):
        from IPython.core.interactiveshell import InteractiveShell

        InteractiveShell.clear_instance()
        self.shell = InteractiveShell.instance()
        self.shell.run_line_magic("load_ext", "gpumagic")
        self._capsys = capsys
        self.names = self.shell.user_ns

    def run(self, cell):
        self._capsys.readouterr()
        result = self.shell.run_cell(cell)
        shown = "".join(self._capsys.readouterr())
        result.raise_error() if "UsageError" not in shown else None
        return shown


@pytest.fixture
def notebook(capsys):
    import gpumagic

    made = Notebook(capsys)
    gpumagic.virtual.enable(2)
    yield made
    made.shell.run_line_magic("unload_ext", "gpumagic")
