"""The cells of a session that ran on all ranks, as a script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumagic import GpuError
from gpumagic.cluster.script import write_script
from gpumagic.magics.placing import placing_request

CELLS = [
    "%load_ext gpumagic\n"
    "import random, torch\n"
    "import torch.distributed as dist\n"
    "import matplotlib.pyplot as plt",
    "words = ['one', 'two', 'three', 'four', 'five']\n"
    "drawn = torch.randint(1000, (1,)).item(); unused = 1 / 0\n"
    "def length(word):\n"
    "    '''How long\nit is'''\n"
    "    return len(word) + zero\n"
    "zero = 0\n"
    "print(unused)",
    "%%ongpu @all --split words --gather lengths --reduce total=sum,rank=max\n"
    "%%time\n"
    "lengths = [length(word) for word in words]\n"
    "total, rank = sum(lengths), dist.get_rank()\n"
    "!nvidia-smi\n"
    "%time alike = torch.tensor([drawn, -drawn]); dist.all_reduce(alike, dist.ReduceOp.MAX)\n"
    "(len(words), alike.tolist() == [drawn, -drawn])",
    "plt.plot(lengths)",
    "%%ongpu @all --dry-run\n1 / 0",
    "%%ongpu @1\nprint(lengths, total, rank, len(words), '''a\n  b''', sep=';')",
]


def script(path, cells=tuple(CELLS), ranks=2, **options):
    return write_script(cells, path, ranks=ranks, asked=placing_request, **options)


@pytest.mark.slow
def test_it_runs_as_slurm_and_torchrun_start_it(tmp_path):
    """Slurm gives it to bash, which gives it to torchrun, which gives it to Python."""
    for name, does in {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    torchrun = tmp_path / "torchrun"  # of this Python, on a port of its own
    torchrun.write_text(
        f"#!/bin/sh\nshift 4\nexec {sys.executable} -m torch.distributed.run --standalone "
        '--nproc-per-node=2 "$@"\n'
    )
    torchrun.chmod(0o755)
    assert script(tmp_path / "train.py") == ["left out: get_ipython().system('nvidia-smi')"]
    text = (tmp_path / "train.py").read_text()
    for absent in ("plt", "unused", "load_ext", "1 / 0", "_here(words) if"):
        assert absent not in text
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "  b",
        "[3, 3, 5, 4, 4];19;1;5;a",
        "rank 0: (3, True)",
        "rank 1: (2, True)",
    ]


def test_its_header_asks_for_the_ranks_and_a_cell_is_written_once(tmp_path):
    cells = ["x = 1", "%%ongpu @all\nx + 1", "x = 2", "%%ongpu @all\nx + 1"]
    script(tmp_path / "a.py", cells, ranks=16, hosts=2)
    text = (tmp_path / "a.py").read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in text
    assert "torchrun --nproc-per-node 8 a.py" in text
    assert text.count("_value = x + 1") == 1
    assert "x = 1" not in text
    begins = "import torch.distributed as dist\ndist.init_process_group('nccl')"
    notes = script(tmp_path / "b.py", [begins, f"%%ongpu @all\n{begins}\nnet.train()"])
    assert (tmp_path / "b.py").read_text().count("init_process_group") == 1
    assert notes == ["no cell binds net: add it to the script"]


def test_what_a_function_reads_is_moved_too(tmp_path):
    above = "import torch\nnet = torch.nn.Linear(2, 2)\ndef step(x): return net(x)"
    calls = "def train():\n    return step(torch.ones(2))"
    script(tmp_path / "a.py", [above, calls, "%%ongpu @all\ntrain()"])
    text = (tmp_path / "a.py").read_text()
    assert text.index("\nnet = _here(net)\n") < text.index("_value = train()")


def test_what_cannot_be_written_is_one_line(tmp_path):
    there = tmp_path / "there.py"
    there.write_text("mine")
    with pytest.raises(GpuError, match="type --force to write over it"):
        script(there)
    assert there.read_text() == "mine"
    script(there, force=True)
    assert there.read_text() != "mine"
    with pytest.raises(GpuError, match="ran on ranks; run one of %%ongpu @all first"):
        script(tmp_path / "none.py", ["x = 1", "%%ongpu 1\nx"])
    with pytest.raises(GpuError, match="3 ranks are not as many on each of 2 hosts"):
        script(tmp_path / "none.py", ranks=3, hosts=2)
    with pytest.raises(GpuError, match="cannot be written: No such file"):
        script(Path(tmp_path / "no" / "a.py"))
