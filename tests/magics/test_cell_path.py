"""A `%%ongpu` cell goes through few files, so that a reader can follow it."""

import importlib.util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cell_path.py"


@pytest.fixture(scope="module")
def measured():
    spec = importlib.util.spec_from_file_location("cell_path", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("read", ["X", "X.sum()"])
def test_a_simple_cell_enters_at_most_17_files(ip, measured, read):
    ip.run("X = torch.ones(8, 8)")
    cell = f"%%ongpu 1\nY = {read} * 2"
    for _ in range(2):
        measured.path_of(ip.ip, cell)
    entered, moves = measured.path_of(ip.ip, cell)
    assert ip.ns["Y"].device.index == 1
    assert 8 < len(entered) <= 17, sorted(entered)
    assert moves < 80
