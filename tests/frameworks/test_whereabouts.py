"""Hold `gpumagic.where`: of torch, of any library that exchanges arrays, of what holds them."""

from collections import UserDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

import gpumagic
from gpumagic.errors import GpuError


class ByDLPack:
    """An array of a library that we know nothing of."""

    def __init__(self, kind, ordinal):
        self.told = kind, ordinal

    def __dlpack_device__(self):
        return self.told


class OnCuda:
    """An array as Numba's: it has CUDA's interface alone."""

    def __init__(self, device=None):
        self.device = device

    @property
    def __cuda_array_interface__(self):
        return {"data": (4096, False)}


@pytest.mark.parametrize(
    ("told", "device"),
    [
        ((1, 0), "cpu"),
        ((3, 1), "cpu"),  # pinned memory of the host
        ((11, 0), "cpu"),
        ((2, 1), "cuda:1"),
        ((10, 2), "cuda:2"),  # ROCm, as torch calls it
        ((13, 0), "cuda:0"),
        ((8, 0), "mps"),
        ((14, 1), "xpu:1"),
        ((99, 0), "DLPack's device type 99:0"),
    ],
)
def test_an_array_says_it_by_dlpack(told, device):
    assert gpumagic.where(ByDLPack(*told)) == device


@pytest.mark.parametrize(
    ("said", "device"),
    [(None, "cuda"), (1, "cuda:1"), (SimpleNamespace(id=1), "cuda:1"), ("cuda:1", "cuda:1")],
)
def test_an_array_with_cudas_interface_alone_says_it_by_its_device(said, device):
    assert gpumagic.where(OnCuda(said)) == device


def test_arrays_of_numpy_and_tables_are_on_the_cpu():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1], "b": ["x"]})
    for value in (np.ones(3), np.float32(1), np.array([None]), table, table["b"]):
        assert gpumagic.where(value) == "cpu"


def test_a_table_of_cudf_is_on_cuda():
    frame = type("DataFrame", (), {"__module__": "cudf.core.dataframe"})
    assert gpumagic.where(frame()) == "cuda"


def test_tensors_and_modules_of_torch_are_where_torch_says(gpus):
    from torch import nn, ones, optim

    net = nn.Sequential(nn.Linear(2, 2, device="cuda:1"), nn.BatchNorm1d(2))
    assert gpumagic.where(ones(2, device="cuda:1")) == "cuda:1"
    assert gpumagic.where(ones(2, device="meta")) == "meta"
    assert gpumagic.where(net[0]) == "cuda:1"
    assert gpumagic.where(net) == "cuda:1 and cpu"
    assert gpumagic.where(optim.SGD(net[0].parameters())) == "cuda:1"


@dataclass
class State:
    params: object
    step: int = 0


class Slotted:
    __slots__ = ("array", "unset")

    def __init__(self, array):
        self.array = array


@pytest.mark.parametrize(
    "holder",
    [
        lambda array: [[array], 1, "words"],
        lambda array: {"a": (array,)},
        lambda array: UserDict(a=array),
        lambda array: State({"w": array}),
        Slotted,
        lambda array: partial(print, array),
        lambda array: SimpleNamespace(array=array),
        lambda array: [array] * 3000,
    ],
)
def test_what_holds_arrays_is_where_they_are(holder):
    assert gpumagic.where(holder(ByDLPack(2, 1))) == "cuda:1"


def test_all_devices_are_named_gpus_first_by_number():
    held = {"a": np.ones(2), "b": [ByDLPack(2, n) for n in (10, 9, 0)]}
    assert gpumagic.where(held) == "cuda:0, cuda:9, cuda:10 and cpu"


def test_what_holds_itself_has_an_end():
    around = [np.ones(1)]
    around.append(around)
    assert gpumagic.where(around) == "cpu"


@pytest.mark.parametrize("nothing", [3, "cuda:1", None, [], {}, print, np, ByDLPack])
def test_what_has_no_array_is_on_no_device(nothing):
    with pytest.raises(GpuError, match=r"where: this \w+ contains no array; give an array"):
        gpumagic.where(nothing)


def test_what_has_whatever_it_is_asked_for_is_no_array():
    with pytest.raises(GpuError):
        gpumagic.where(MagicMock())
