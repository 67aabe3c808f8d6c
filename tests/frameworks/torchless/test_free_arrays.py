"""`%gpufree` lets go of JAX's arrays that exceptions and outputs keep, where there is no torch."""

import gpumagic

START = (
    "import gpumagic, jax, jax.numpy as jnp\n"
    "x = jax.device_put(jnp.ones(1024), jax.devices('gpu')[1]) + 1\n"
    "def fail(a):\n    made = a * 3\n    raise ValueError('no')"
)


def held():
    """What others than JAX itself hold."""
    rows = (row for row in gpumagic.memory().holders if not row.path.startswith("held by"))
    return {row.path: row.nbytes for row in rows if row.nbytes >= 4096}


def run(notebook, cell):
    """Run a cell that has a number and an output, and may fail; what it shows."""
    notebook._capsys.readouterr()
    notebook.shell.run_cell(cell, store_history=True)
    return "".join(notebook._capsys.readouterr())


def test_what_no_variable_holds_comes_back(notebook):
    notebook.run(START)
    run(notebook, "x * 2")
    run(notebook, "fail(x)")
    assert len(held()) == 3
    shown = run(notebook, "%gpufree")
    assert "freed 8.0 KiB (the exception of In [2]: 4.0 KiB on cuda:1, Out[1]" in shown
    assert held() == {"x": 4096}
    assert "freed 4.0 KiB (x: 4.0 KiB on cuda:1)" in run(notebook, "%gpufree x")
    assert held() == {}


def test_in_an_except_block_the_frames_of_its_error_are_emptied(notebook):
    notebook.run(START + "\ntry: fail(x)\nexcept ValueError: freed = gpumagic.free_memory()")
    assert notebook.names["freed"].nbytes == 4096


def test_bad_input_is_one_line(notebook):
    notebook.run(START)
    assert "there is no variable 'y'" in run(notebook, "%gpufree y")
