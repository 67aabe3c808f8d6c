"""A `%%ongpu` cell goes through few files, so that a reader can follow it."""

import pytest


@pytest.mark.parametrize("read", ["X", "X.sum()"])
def test_a_simple_cell_enters_few_files(ip, benchmark_file, read):
    measured = benchmark_file("cell_path")
    ip.run("X = torch.ones(8, 8)")
    cell = f"%%ongpu 1\nY = {read} * 2"
    for _ in range(2):
        measured.path_of(ip.ip, cell)
    entered, moves = measured.path_of(ip.ip, cell)
    assert ip.ns["Y"].device.index == 1
    assert 8 < len(entered) <= measured.LIMIT, sorted(entered)
    assert moves < 80
