"""An error of JAX's for want of memory is explained in the form of torch's."""

from dataclasses import replace

import pytest

import gpumagic
from gpumagic.frameworks.framework import Pool
from gpumagic.memory import holders_by_name

GIB = 2**30
# As allocators have written them, of JAX 0.2 to 0.10, on GPUs and on the CPU.
SAID = [
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.", 4 * GIB),
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.00GiB.", 4 * GIB),
    (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.\n"
        "BufferAssignment OOM Debugging.\nBufferAssignment stats:\n"
        "             parameter allocation:  372.76MiB\n",
        4 * GIB,
    ),
    (
        "RESOURCE_EXHAUSTED: Failed to allocate request for 4.00GiB (4294967296B) on device "
        "ordinal 1",
        4 * GIB,
    ),
    ("Resource exhausted: Failed to allocate request for 4.00GiB (4294967296B)", 4 * GIB),
    ("RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes.", 4 * GIB),
    ("INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory", None),
]
OTHERS = [
    "INTERNAL: no kernel image is available",
    "INVALID_ARGUMENT: Argument does not match host shape or layout of computation parameter 0",
]


@pytest.fixture
def fails(notebook):
    """Have a function of a library's, `big`, raise JAX's error when a cell calls it."""
    import jax

    def make(said):
        notebook.run("import jax, jax.numpy as jnp, gpumagic\nx = jnp.ones(64)")
        names = {"error": jax.errors.JaxRuntimeError, "said": said}
        exec(compile("def big(*of): raise error(said)", jax.__file__, "exec"), names)
        notebook.names |= {"big": names["big"], "found": None}
        notebook.run("x = jax.device_put(x, jax.devices('gpu')[1])")
        notebook.run(
            "idle = jax.device_put(jnp.ones(4096), jax.devices('gpu')[1]) + 1\n"
            "try:\n    y = big(x)\nexcept Exception as e:\n"
            "    found = gpumagic.explain_out_of_memory(e)"
        )
        return notebook.names["found"]

    return make


@pytest.mark.parametrize(("said", "wanted"), SAID)
def test_each_form_of_the_error_is_read(fails, said, wanted):
    found = fails(said)
    assert (found.wanted, found.device.device) == (wanted, "cuda:1")
    assert (found.expression, found.line) == ("big(x)", 3)
    assert {"idle", "x"} <= {row.path for row in found.device.holders}


@pytest.mark.parametrize("said", OTHERS)
def test_other_errors_are_not(fails, said):
    assert fails(said) is None


@pytest.mark.parametrize(
    ("figures", "limit", "said"),
    [
        ({"total": 2 * GIB, "free": GIB}, None, "more than the 2.0 GiB"),
        ({"free": 12 * GIB, "reserved": 4 * GIB}, 8 * GIB, "JAX may take 8.0 GiB of"),
        ({"free": 0, "reserved": 0, "others": 12 * GIB}, None, "hold 12.0 GiB"),
        ({"free": 0, "reserved": 6 * GIB}, None, "more than is left"),
    ],
)
def test_the_reason_is_told_by_the_figures(fails, monkeypatch, figures, limit, said):
    def with_other_libraries(*args):
        pool = Pool("JAX", 6 * GIB, None, 8 * GIB, limit)
        given = {"total": 16 * GIB, "allocated": 6 * GIB, "others": 0} | figures
        return replace(real(*args), **given, pools=(pool,))

    real = holders_by_name.with_other_libraries
    monkeypatch.setattr(holders_by_name, "with_other_libraries", with_other_libraries)
    found = fails("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.")
    assert said in found.reason
    assert any("MEM_FRACTION" in lever.do for lever in found.levers) is (limit is not None)


def test_it_stands_below_the_traceback_and_what_is_not_read_can_go(fails, notebook):
    fails(SAID[0][0])
    shell = notebook.shell
    notebook._capsys.readouterr()
    shell.run_cell("y = big(x)")
    shown = notebook._capsys.readouterr().out
    below = shown[shown.index("out of memory ·") :]
    assert "cuda:1 (virtual): 4.0 GiB wanted" in below
    assert "%gpufree idle, which this code does not read" in below
    assert "%gpufree x " not in below


def test_an_array_that_could_not_be_made_ends_no_kernel_and_is_told_once(notebook):
    """JAX ends the process where it is asked for the address of such an array."""
    notebook.run("import jax.numpy as jnp\nx = jnp.ones((2**21, 1))")
    shown = notebook.run("%%ongpu 1\ny = x @ x.T")
    assert "the device reports: RESOURCE_EXHAUSTED" in shown
    assert "RESOURCE" not in notebook.run("%%ongpu 1\nz = x[0] + 1")
    assert "y" not in {row.path for row in gpumagic.memory().holders}
    notebook.run("del y")
