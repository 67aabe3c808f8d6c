"""Every display carries its record as JSON: units in the keys, short, and of nobody else."""

import json
import math
from dataclasses import dataclass

import pytest
from IPython.utils.capture import capture_output

from gpumagic.display.table import JSON, as_json
from gpumagic.memory.memory_report import DeviceMemory, MemoryReport
from gpumagic.telemetry import GpuSample, ProcessSample, Snapshot

CELLS = {
    "%gpus": "Snapshot",
    "%gpus --doctor": "Checks",
    "%gpumem": "MemoryReport",
    "%gpumem net": "MemoryTree",
    "%gpufree": "Freed",
    "%%ongpu 1\ny = net(x)": "Report",
    "%%ongpu 1 --dry-run\ny = net(x)": "DryRun",
    "net(zeros(3))": "Explanation",
    "%gputime cpu --max-time 0.01 -- zeros(2) + 1": "Comparison",
    "%gpudiff cpu 1 -- zeros(2).exp()": "NumericDiff",
    "%%gpufit batch=1..4\nx = torch.zeros(batch, 2, device='cuda')": "Fit",
    "gpumagic.watch()": "Ledger",
}


def displayed(shell, cell):
    """What a cell displays, by its type."""
    with capture_output() as captured:
        value = shell.ip.run_cell(cell).result
    found = [shown.data for shown in captured.outputs if JSON in shown.data]
    return found[0] if found else shell.ip.display_formatter.format(value)[0]


@pytest.fixture
def filled(ip):
    ip.run("import gpumagic\nx = zeros(4, 2)\nnet = nn.Linear(2, 1).to('cuda:1')")
    return ip


@pytest.mark.parametrize("cell", CELLS, ids=CELLS.values())
def test_a_display_has_text_html_and_json(filled, cell):
    shown = displayed(filled, cell)
    assert {"text/plain", "text/html"} <= shown.keys()
    assert shown[JSON]["record"] == CELLS[cell]
    assert json.loads(json.dumps(shown[JSON], allow_nan=False)) == shown[JSON]
    assert "nbytes" not in json.dumps(shown[JSON])


@dataclass
class Strange:
    """What a record may hold."""

    nbytes: int
    moved_nbytes: dict
    free: int | None
    peak: str
    share: float
    rows: tuple
    value: object
    _own: int = 0


def test_keys_have_units_and_nothing_of_the_users_is_read():
    class Tensor:
        def __repr__(self):
            raise AssertionError("this waits for a GPU")

    told = as_json(Strange(5, {"cuda:0": 6}, None, "line 3", math.nan, (*range(100),), Tensor()))
    assert told == {
        "record": "Strange",
        "bytes": 5,
        "moved_bytes": {"cuda:0": 6},
        "free_bytes": None,
        "peak": "line 3",
        "share": None,
        "rows": [*range(10)],
        "value": "Tensor",
    }


def test_others_are_not_named():
    device = DeviceMemory(
        "cuda:0", "H100", False, 9, 3, 2, 2, others=4, others_by_name=(("alice", 4),)
    )
    told = as_json(MemoryReport((device,)))
    assert told["devices"][0]["others_bytes"] == 4
    snapshot = as_json(
        Snapshot(
            1.0, gpus=(GpuSample("GPU-0"),), processes=(ProcessSample("GPU-0", 7, name="alice"),)
        )
    )
    assert "alice" not in json.dumps([told, snapshot])
    assert snapshot["gpus"][0]["memory_used_bytes"] is None
