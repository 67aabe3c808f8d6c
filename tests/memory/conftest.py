"""Let what looks through memory meet what a notebook's process has, and not all tests."""

import pytest

from gpumagic import virtual
from gpumagic.memory import oom_trials, split_rows


@pytest.fixture(autouse=True)
def _as_in_a_notebook(as_in_a_notebook):
    pass


@pytest.fixture(autouse=True)
def _time_for_all_changes(monkeypatch):
    """What is found depends on no clock, also on a busy machine."""
    monkeypatch.setattr(oom_trials, "_LIMIT_S", 16.0)
    monkeypatch.setattr(oom_trials, "_PATIENCE_S", 120.0)
    monkeypatch.setattr(split_rows, "_TESTS_S", 9.0)


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
