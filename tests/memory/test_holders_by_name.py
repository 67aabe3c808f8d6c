"""`gpumagic.memory()`: who holds the bytes on each GPU."""

import subprocess
import sys

import pytest
import torch

import gpumagic
from gpumagic.memory.holders_by_name import with_holders
from gpumagic.memory.memory_report import DeviceMemory


def test_rows_are_named_and_add_up(ip):
    ip.run("net = nn.Linear(1000, 100, device='cuda')\nx = zeros(300, device='cuda')\nsame = x[3:]")
    report = gpumagic.memory()
    held = {row.path: row for row in report.holders}
    assert held["net"].nbytes == 400384 + 512
    assert held["net"].kind == "parameter"
    assert held["x"].nbytes == 1536
    assert held["x"].aliases == ("same",)
    assert report.devices[0].allocated == torch.cuda.memory_allocated(0)
    assert sum(row.nbytes for row in report.holders) == report.allocated
    assert "net" in repr(report)
    assert "net" in report._repr_html_()


def test_a_name_that_is_none_is_told(ip):
    with pytest.raises(gpumagic.GpuError, match="no variable 'nonsense'"):
        gpumagic.memory("nonsense")


def test_the_function_is_not_hidden_by_the_room_of_its_name():
    code = (
        "from gpumagic.memory.memory_report import MemoryReport\n"
        "import gpumagic\n"
        "print(type(gpumagic.memory).__name__)\n"
        "from gpumagic import memory\n"
        "print(type(memory).__name__, memory is gpumagic.memory)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["function", "function", "True"], done.stderr


def test_what_a_name_holds_is_its_own_though_others_hold_it_too(ip):
    ip.run("x = zeros(300, device='cuda')\nsame = x[3:]\ny = zeros(3, device='cuda')")
    (row,) = gpumagic.memory("same").holders
    assert (row.path, row.nbytes, row.aliases) == ("same", 1536, ("x",))


@pytest.mark.parametrize("where", [1, "1", "cuda:1", torch.device("cuda:1"), "free"])
def test_gpus_are_named_as_in_the_magic(ip, where):
    ip.run("data = {'x': zeros(2**20, device='cuda'), 'y': zeros(2**10, device='cuda:1')}")
    report = gpumagic.memory(where)
    assert [(d.device, d.holders[0].path) for d in report.devices] == [("cuda:1", "data")]
    (row,) = gpumagic.memory(where, "data['x']", "data['y']").holders
    assert (row.path, row.nbytes, row.aliases) == ("data['y']", 4096, ("data",))


def test_what_is_no_gpu_is_told(ip):
    for wrong, said in ((7, "no GPU 7"), (2.5, "is not a device"), ("cpu", "is not a GPU")):
        with pytest.raises(gpumagic.GpuError, match=said):
            gpumagic.memory(wrong)


def test_what_nobody_holds_has_a_row():
    device = DeviceMemory("cuda:0", "H100", False, 80, 40, 35, 40)
    rows = with_holders(device, []).holders
    assert [(row.path, row.nbytes) for row in rows] == [("held by cuBLAS or C++ code", 35)]
    assert with_holders(device, [], names=["x"]).holders == ()
