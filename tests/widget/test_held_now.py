"""The monitor's table of what of this notebook holds memory: asked for, between cells."""

import json
import subprocess
import sys

import pytest
from fake_sampler import Clock, Sampler, monitor_of

from gpumagic import faults
from gpumagic.device import here
from gpumagic.widget import notebook_watch

pytestmark = pytest.mark.filterwarnings("ignore")


def test_it_has_the_rows_of_gpumem_by_gpu(ip):
    ip.run("x = zeros(10**6, device='cuda:1')\nsame = x[3:]\ny = zeros(3, device='cuda:0')")
    told = notebook_watch.held_now()
    assert json.loads(json.dumps(told)) == told
    assert notebook_watch.panel().data["gpus"] == told["gpus"]
    assert told["cell"] == ip.ip.execution_count - 1
    first, second = (told["gpus"][device.uuid] for device in here())
    assert [row["name"] for row in first["rows"]] == ["y"]
    (row,) = second["rows"]
    assert (row["name"], row["kind"], row["aliases"]) == ("x", "tensor", ["same"])
    assert row["nbytes"] == second["allocated"] == 4_000_256
    assert (second["more"], second["left"]) == (0, 0)


def test_what_is_small_is_a_sum(ip):
    ip.run("big = zeros(10**6, device='cuda')")
    ip.run("for n in range(20): globals()[f'x{n}'] = zeros(3, device='cuda')")
    told = notebook_watch.held_now()["gpus"][here()[0].uuid]
    assert (len(told["rows"]), told["more"], told["left"]) == (3, 18, 18 * 512)


def test_without_torch_nothing_is_held_and_none_is_imported():
    code = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "InteractiveShell.instance()\n"
        "from gpumagic.widget.notebook_watch import panel\n"
        "print(panel().data['gpus'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["{}", "False"], done.stderr


def test_the_widget_answers_a_view_that_asks(ip, monkeypatch):
    widget = monitor_of(monkeypatch, ip, Sampler(), Clock())
    widget._save_table = lambda: None
    try:
        ip.run("x = zeros(10**6, device='cuda')")
        assert widget.variables == {}  # nobody has it open
        widget.receive(None, {"type": "variables", "id": "a"}, [])
        assert widget.variables["gpus"][here()[0].uuid]["rows"][0]["name"] == "x"
    finally:
        widget.close()
    assert faults.all_kept() == []
