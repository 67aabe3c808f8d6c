"""Let what looks through memory meet what a notebook's process has, and not all tests."""

import pytest

from gpumagic import virtual


@pytest.fixture(autouse=True)
def _as_in_a_notebook(as_in_a_notebook):
    pass


@pytest.fixture
def small(shell, _own_runtime_folder, kept_kernels):
    """A notebook on two GPUs of 64 MiB."""
    virtual.enable(2, 64 * 2**20)
    yield shell
    shell.run("%reset -f")
    virtual.disable()


@pytest.fixture
def shown(monkeypatch):
    """The explanations that are shown."""
    found = []
    monkeypatch.setattr("gpumagic.magics.hooks.display", found.append)
    return found
