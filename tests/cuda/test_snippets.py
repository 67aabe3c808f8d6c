"""Compare the errors between devices of torch's CUDA code and of virtual GPUs.

Their texts and explanations are compared. The virtual side is this file, run as a program, because
a process has either kind of GPU.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from mismatch.snippets import DATA, read, run

from gpumagic import virtual
from gpumagic.mismatch.explainer import explain

TESTS = Path(__file__).parents[1]


def outcomes():
    """By snippet: its error, and the explanation of it."""
    warnings.simplefilter("ignore")
    files = sorted(DATA.glob("cross_device*.txt"))
    return {f"{f.name}: {s.title}": _outcome(s) for f in files for s in read(f.name)}


def _outcome(snippet):
    error = run(snippet.code)
    explained = error and explain(error)
    text = str(error).strip().partition("\n")[0]
    return [f"{type(error).__name__}: {text}", str(explained)]


@pytest.fixture(scope="module")
def both():
    """(on CUDA, on virtual GPUs) by snippet."""
    env = {**os.environ, "STANDIN_CUDA_DEVICES": "0", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    command = [sys.executable, "-W", "ignore", __file__]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        here = outcomes()
        there = json.loads(process.communicate()[0])
    assert here.keys() == there.keys()
    return {name: (here[name], there[name]) for name in here}


def test_texts_are_those_of_cuda(both):
    assert len(both) >= 580
    _compare(both, 0)


def test_explanations_are_those_on_cuda(both):
    _compare(both, 1)


def _compare(both, which):
    """All outcomes must be the same: `which` is 0 for texts, 1 for explanations."""
    pairs = {name: (real[which], ours[which]) for name, (real, ours) in both.items()}
    differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    table = (f"{name}\n  CUDA    {a}\n  virtual {b}" for name, (a, b) in differ.items())
    assert not differ, "\n".join(table)


if __name__ == "__main__":
    if standin := sys.modules.get("standin_cuda"):
        standin.install = lambda: None  # its kernels, under those of virtual GPUs
    virtual.enable(2, 2**30)
    print(json.dumps(outcomes()))
