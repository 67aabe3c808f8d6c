"""Fixtures for all tests: two virtual GPUs, and an IPython shell with the extension loaded."""

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest
from hypothesis import settings
from traitlets.config import Config

# How long an example takes says nothing on a busy machine.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

GIB = 2**30


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path_factory, monkeypatch):
    """State files of parallel tests must not meet."""
    monkeypatch.setenv("GPUMAGIC_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))


@pytest.fixture
def gpus(_own_runtime_folder):
    """Two virtual GPUs of 1 GiB."""
    import torch

    from gpumagic import virtual

    virtual.enable(2, GIB)
    yield
    torch.set_default_device(None)
    virtual.disable()


class Shell:
    """An IPython shell in this process, whose cells' output is caught."""

    def __init__(self):
        from IPython.core.interactiveshell import InteractiveShell

        config = Config()
        config.HistoryManager.hist_file = ":memory:"
        config.InteractiveShell.colors = "nocolor"
        config.InteractiveShell.xmode = "Plain"
        self.ip = InteractiveShell.instance(config=config)
        self.ns = self.ip.user_ns

    def run(self, cell, **options):
        """Run a cell; the result has `.text`, what it showed, and `.error`."""
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            result = self.ip.run_cell(cell, **({"store_history": True} | options))
        result.text = out.getvalue()
        result.error = result.error_in_exec or result.error_before_exec
        return result


@pytest.fixture
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    made = Shell()
    made.ip.run_line_magic("load_ext", "gpumagic")
    yield made
    made.ip.run_line_magic("unload_ext", "gpumagic")
    made.ip.history_manager.end_session()
    made.ip.reset(new_session=False)
    InteractiveShell.clear_instance()


@pytest.fixture
def ip(gpus, shell):
    """The shell with torch imported; afterwards nothing may be in force or patched."""
    import torch

    from gpumagic.cell import peak_memory
    from gpumagic.placement import scope, swap

    shell.run("import torch\nfrom torch import nn, zeros")
    yield shell
    assert not swap.installed()
    assert scope.placement() is None
    assert not peak_memory._running
    assert torch.cuda.current_device() == 0
