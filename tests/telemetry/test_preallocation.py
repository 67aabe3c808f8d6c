"""Hold what is told of a GPU that JAX took for itself: by whom, when it matters, what to type."""

import sys
from types import ModuleType

import pytest

from gpumagic.telemetry.collect import preallocated
from gpumagic.telemetry.doctor import check_jax
from gpumagic.telemetry.snapshot import GpuSample, ProcessSample

GIB = 2**30
GPU = GpuSample("GPU-0", "H100", ordinal=0, memory_total=80 * GIB, memory_used=70 * GIB)
MINE = ProcessSample("GPU-0", 1, 60 * GIB, name="python3", mine=True)
BOOK = ProcessSample("GPU-0", 2, 60 * GIB, name="python3", notebook="train.ipynb", kernel="k")
SMALL = ProcessSample("GPU-0", 3, GIB, name="python3")


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """Processes of which some have started JAX on a GPU, with these environments."""
    for name in ("torch", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("PREALLOCATE", "MEM_FRACTION"):
        monkeypatch.delenv(f"XLA_PYTHON_CLIENT_{name}", raising=False)

    def write(pid, maps="/lib/jax_plugins/xla_cuda13/xla_cuda_plugin.so", environ="HOME=/root"):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "maps").write_text(f"7f00-7f01 r-xp 0 08:01 1 {maps}\n")
        (tmp_path / str(pid) / "environ").write_text(environ.replace(" ", "\0"))

    return write, tmp_path


def test_a_notebook_that_stands_in_the_way_is_named_with_what_to_type(proc):
    write, root = proc
    write(2)
    [problem] = preallocated([GPU], [BOOK, SMALL], root)
    assert problem.cause.startswith("JAX in train.ipynb holds 75% of cuda:0")
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in problem.cure
    assert problem.uuid == "GPU-0"


def test_where_nobody_else_wants_the_gpu_nothing_is_told(proc, monkeypatch):
    write, root = proc
    write(1)
    write(2)
    assert preallocated([GPU], [MINE], root) == []
    assert preallocated([GPU], [BOOK], root) == []
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert "this notebook" in preallocated([GPU], [MINE], root)[0].cause
    assert "train.ipynb" in preallocated([GPU], [BOOK], root)[0].cause


@pytest.mark.parametrize(
    "environ",
    ["XLA_PYTHON_CLIENT_PREALLOCATE=false", "A=1 XLA_PYTHON_CLIENT_MEM_FRACTION=.9"],
)
def test_who_told_jax_what_to_take_meant_it(proc, monkeypatch, environ):
    write, root = proc
    write(1)
    write(2, environ=environ)
    assert preallocated([GPU], [BOOK, SMALL], root) == []
    monkeypatch.setenv(*environ.split()[-1].split("="))
    assert preallocated([GPU], [MINE, SMALL], root) == []


def test_other_programs_and_those_that_cannot_be_read_are_not_blamed(proc):
    write, root = proc
    write(2, maps="/lib/jaxlib/libjax_common.so")  # imported, and never started on a GPU
    assert preallocated([GPU], [BOOK, SMALL], root) == []
    assert preallocated([GPU], [ProcessSample("GPU-0", 9, 60 * GIB), SMALL], root) == []
    write(3)
    assert preallocated([GPU], [SMALL, ProcessSample("GPU-0", 4, None)], root) == []


def test_the_doctor_says_it_where_jax_is_imported(proc, monkeypatch):
    assert check_jax({}) == []
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    [check] = check_jax({})
    assert check.ok is None
    assert "75 % of each GPU" in check.found
    [check] = check_jax({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"})
    assert (check.ok, check.found) == (True, "XLA_PYTHON_CLIENT_MEM_FRACTION=.5")
