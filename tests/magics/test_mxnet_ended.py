"""Hold what is said below a cell that imports MXNet."""

import sys
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    "cell",
    [
        "import mxnet as mx",
        "from mxnet import np, npx",
        "def train():\n    import mxnet.gluon",
        "try:\n    import mxnet\nexcept ImportError:\n    pass",
    ],
)
def test_who_imports_mxnet_learns_that_it_ended_and_what_to_type(shell, cell):
    text = shell.run(cell).text
    assert "release is 1.9.1\n  (May 2022), and Apache retired it in 2023" in text
    assert 'torch.device("cuda:1")' in text
    assert "%%ongpu 1" in text


def test_it_is_said_once(shell):
    assert "has ended" in shell.run("import mxnet").text
    assert "has ended" not in shell.run("import mxnet").text


def test_it_is_said_where_mxnet_is_installed_too(shell, monkeypatch):
    monkeypatch.setitem(sys.modules, "mxnet", ModuleType("mxnet"))
    result = shell.run("import mxnet")
    assert result.error is None
    assert "has ended" in result.text


@pytest.mark.parametrize(
    "cell", ["note = 'import mxnet'", "mxnet", "import mxnet as", "1  # mxnet"]
)
def test_it_is_said_of_no_other_cell(shell, cell):
    assert "has ended" not in shell.run(cell).text
