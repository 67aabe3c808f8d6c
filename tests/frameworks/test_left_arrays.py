"""Hold what a report says of arrays that nothing here can bring: whose, where, how large."""

import numpy as np
import pytest
from test_whereabouts import ByDLPack

from gpumagic.cell.report import last_report
from gpumagic.cell.run import left_alone
from gpumagic.device import Device

MLX = type("array", (ByDLPack,), {"__module__": "mlx.core", "nbytes": 5 * 2**20})
GPU1 = Device("cuda", 1, virtual=True)


def told(device=GPU1, **variables):
    return [(left.name, left.reason) for left in left_alone([*variables], variables, device)]


def test_an_array_on_another_gpu_is_named_with_its_library_place_and_size():
    assert told(a=MLX(2, 0)) == [("a", "MLX, on cuda:0, 5.0 MiB")]
    assert told(a=MLX(8, 0)) == [("a", "MLX, on mps, 5.0 MiB")]


def test_one_that_does_not_say_how_large_it_is_has_no_size():
    assert told(a=ByDLPack(2, 0))[0][1].endswith("on cuda:0, N/A")


def test_what_is_there_already_or_the_hosts_is_not_told():
    assert told(a=MLX(2, 1), b=np.ones(3), c=MLX(1, 0), d=3, e=[MLX(2, 0)]) == []


@pytest.mark.usefixtures("gpus")
def test_tensors_are_brought_and_not_left():
    import torch

    assert told(a=torch.ones(2, device="cuda:0")) == []


def test_the_report_of_a_cell_says_it(ip):
    ip.ns["a"], ip.ns["x"] = MLX(2, 0), zeros(2)
    text = ip.run("%%ongpu 1\nfirst = a, x").text
    assert "left a: MLX, on cuda:0, 5.0 MiB" in text
    assert [left.name for left in last_report().left] == ["a"]


def zeros(count):
    import torch

    return torch.zeros(count)
