"""The rows of `%gpumem` say which cell made JAX's arrays, where there is no torch."""

import gpumagic

START = "import jax, jax.numpy as jnp\ngpu = jax.devices('gpu')[1]\n"


def made():
    rows = (row for row in gpumagic.memory().holders if row.kind == "JAX array")
    return {row.path: str(row.made or "") for row in rows}


def test_arrays_are_of_the_cell_after_which_they_lived(notebook):
    run, first = notebook.shell.run_cell, notebook.shell.execution_count
    cells = [f"In [{first + n}]" for n in range(5)]
    run(START + "x = jax.device_put(jnp.ones(64), gpu) + 1", store_history=True)
    run("%%ongpu 1\ny = x * 2", store_history=True)
    run("p = {'w': [y + 1], 'again': x}", store_history=True)
    run("def fail(): raise ValueError\ny = fail()", store_history=True)
    run("z = y", store_history=True)
    found = made()
    assert {name: found[name] for name in "xyp"} == dict(zip("xyp", cells, strict=False))
    run("y = y + 1", store_history=True)
    assert made()["y"] == f"In [{first + 5}]"
    assert made()["z"] == cells[1]  # the array that `y` was


def test_what_was_there_before_anybody_looked_is_of_no_cell(notebook):
    notebook.run("%unload_ext gpumagic")
    notebook.run(START + "x = jax.device_put(jnp.ones(64), gpu) + 1")
    notebook.run("%load_ext gpumagic")
    notebook.shell.run_cell("q = x + 1", store_history=True)
    assert made()["x"] == ""
    assert made()["q"].startswith("In [")
