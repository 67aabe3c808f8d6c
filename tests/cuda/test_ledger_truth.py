"""The ledger against the CUDA runtime's own log, and virtual GPUs against both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
from ledger_programs import PROGRAMS  # noqa: E402

# Where peers can be accessed, a kernel of the GPU that sends writes these bytes: the log has its
# launch alone. Without access they are copies of the runtime's, of the dtype that crosses.
WRITTEN_BY_A_KERNEL = {
    "to the other, converted": 16_384,
    "to the other, strided": 4_096,
    "to the other, ints to floats": 256,
    "set columns of the other": 4_096,
}
WAYS = {
    "peers": {"STANDIN_CUDA_PEER": "1"},
    "no peers": {"STANDIN_CUDA_PEER": "0"},
    "virtual": {"STANDIN_CUDA_DEVICES": "0"},
}


@pytest.fixture(scope="module")
def measured():
    """What torch asks the runtime for, and what the ledger says of it, by way and program."""
    run = [sys.executable, "-W", "ignore", FOLDER / "ledger_truth.py"]
    started = {
        way: subprocess.Popen(run, env=os.environ | env, stdout=subprocess.PIPE, text=True)
        for way, env in WAYS.items()
    }
    return {way: json.loads(process.communicate()[0]) for way, process in started.items()}


@pytest.mark.timeout(1800)  # the first waits for all of them
@pytest.mark.parametrize("way", ["peers", "no peers"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_ledger_says_what_torch_asked_for(measured, name, way):
    found = measured[way][name]
    assert "error" not in found, found["error"]
    true = [*found["torch"]]
    if way == "peers":
        true[2] += WRITTEN_BY_A_KERNEL.get(name, 0)
    assert found["ledger"] == true
    assert found["watched"] == found["after"] == found["torch"], "the ledger copies or waits"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PROGRAMS)
def test_virtual_gpus_say_the_same(measured, name):
    assert measured["virtual"][name]["ledger"] == measured["peers"][name]["ledger"]
