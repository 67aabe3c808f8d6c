"""All of it works for JAX where there is no torch."""

import json
import sys

import pytest


@pytest.fixture(autouse=True)
def _no_torch_comes_in():
    yield
    assert sys.modules["torch"] is None


def test_a_cell_is_placed_and_what_it_reads_is_brought(notebook):
    notebook.run(
        "import jax, jax.numpy as jnp\n"
        "X = jnp.ones((100, 100)); Y = X; data = [X, {'a': (X,)}]; inner = data[1]"
    )
    shown = notebook.run("%%ongpu 1\nZ = X @ X + data[1]['a'][0]")
    assert shown.startswith("cuda:1 (virtual)")
    assert "moved X: 39.1 KiB from cpu" in shown  # once, for they are one array
    assert "for good (%ongpu home undoes it)" in shown
    names = notebook.names
    gpu = names["jax"].devices("gpu")[1]
    assert names["Z"].devices() == names["X"].devices() == {gpu}
    assert names["data"][0] is names["X"] is names["data"][1]["a"][0]
    assert names["data"][1] is names["inner"]  # a dict stays the dict that it is
    assert names["Y"].devices() != {gpu}  # an array of JAX's never changes: Y is the one of before
    home = notebook.run("%ongpu home")
    assert "moved back X: 39.1 KiB from cuda:1" in home
    assert "still on a GPU: Z" in home
    assert names["X"].devices() == {names["jax"].devices("cpu")[0]}


def test_back_brings_home_and_a_failed_cell_is_reported(notebook):
    notebook.run("import jax, jax.numpy as jnp\nX = jnp.ones(8)")
    assert "back in" in notebook.run("%%ongpu 0 --back\nq = X.sum()")
    assert notebook.names["X"].devices() == {notebook.names["jax"].devices("cpu")[0]}
    with pytest.raises(ZeroDivisionError):
        notebook.run("%%ongpu 0\n1 / 0")
    import gpumagic

    assert gpumagic.last_report().error == "ZeroDivisionError"
    notebook.run("new = jnp.ones(2)")  # the placement has ended
    assert notebook.names["new"].devices() == {notebook.names["jax"].devices("cpu")[0]}


def test_what_the_cell_imports_is_placed_too(notebook):
    notebook.run("%%ongpu 1\nimport jax.numpy as jnp\nmade = jnp.zeros(3)")
    import gpumagic

    assert gpumagic.where(notebook.names["made"]) == "cuda:1"


def test_gpus_show_what_arrays_hold(notebook):
    import gpumagic

    def used():
        gpus = json.loads(gpumagic.snapshot().to_json())["gpus"]
        return {gpu["virtual_ordinal"]: gpu["memory_used"] for gpu in gpus}

    notebook.run("import jax.numpy as jnp")
    before = used()
    notebook.run("%%ongpu 1\nbig = jnp.zeros((4, 2**20))")
    after = used()
    assert after[1] - before[1] == 2**24
    assert after[0] == before[0]
    assert "this process" in notebook.run("%gpus")
    notebook.run("del big")
    assert used() == before


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%%ongpu 5\nx = 1", "no GPU 5: there are cuda:0 and cuda:1 (virtual)"),
        ("%%ongpu 1 --fix\nx = 1", "--fix is for torch; this cell uses JAX"),
        ("%%ongpu 1 --memory\nx = 1", "--memory is for torch; this cell uses JAX"),
        ("%%ongpu 1 --profile\nx = 1", "--profile is for torch; this cell uses JAX"),
        ("%%gpufit 1 n=1..9\njnp.ones(n)", "%%gpufit is for torch; this cell uses JAX"),
        (
            "%%ongpu 0,1 --split x\nx + 1",
            "%%ongpu 0,1 is for torch; this cell uses JAX; JAX computes on",
        ),
        ("%gpus --virtual 3", "3 requested, 2 of"),
    ],
)
def test_bad_input_is_one_line(notebook, cell, said):
    notebook.run("import jax.numpy as jnp\nx = jnp.ones(2)")
    shown = notebook.run(cell).strip()
    assert said in shown
    assert "\n" not in shown


def test_a_cell_of_no_framework_says_what_there_is_to_install(notebook, monkeypatch):
    for name in ("jax", "jnp", "x", "X"):
        notebook.names.pop(name, None)
    shown = notebook.run("%%ongpu 1\nx = 1")
    assert 'pip install "gpumagic[torch]"' in shown
    assert "JAX" in shown


def test_a_watch_counts_what_jax_copies(notebook):
    notebook.run("import gpumagic, jax, jax.numpy as jnp\nX = jnp.ones(1024)")
    notebook.run(
        "with gpumagic.watch() as w:\n    for i in range(3):\n"
        "        jax.device_put(X, jax.devices('gpu')[1])"
    )
    ledger = notebook.names["w"].ledger
    assert [(e.count, e.nbytes, e.destination, e.line) for e in ledger] == [
        (3, 3 * 4096, "cuda:1", 3)
    ]
    assert "say nothing about a GPU" in str(ledger)
    notebook.run("%gpuwatch on")
    shown = notebook.run("for i in range(2):\n    jax.device_put(X, jax.devices('gpu')[0])")
    assert "2 transfers: 8.0 KiB to cuda:0 at" in shown
    notebook.run("%gpuwatch off")
    assert "transfer" not in notebook.run("again = jax.device_put(X, jax.devices('gpu')[0])")


def test_a_report_says_where_the_work_was(notebook):
    notebook.run("import gc, jax, jax.numpy as jnp\ncpu = jax.devices('cpu')[0]")
    notebook.run("%%ongpu 1\nB = jnp.ones(8)")
    elsewhere = notebook.run("%%ongpu 1\nhost = jax.device_put(1.0, cpu)")
    assert elsewhere.startswith("asked for cuda:1; all arrays that the cell created are on cpu")
    # Where the old B was a new one may lie.
    both = notebook.run("%%ongpu 1\nhost = jax.device_put(2.0, cpu)\nfor _ in range(9): B = B + 1")
    assert both.startswith("cuda:1 (virtual)")


def test_a_standing_cell_has_a_line_where_it_made_arrays(notebook):
    notebook.run("import jax.numpy as jnp")
    notebook.run("%ongpu 1")
    assert notebook.run("made = jnp.ones(3)").startswith("cuda:1 (virtual)")
    assert notebook.run("number = 3") == ""
    notebook.run("%ongpu off")


def test_a_peak_is_the_cells_only_where_it_is_a_new_one(notebook, monkeypatch):
    from gpumagic.frameworks.known import imported

    notebook.run("import jax.numpy as jnp")
    (jax,) = (each for each in imported() if each.name == "JAX")
    peak = notebook.names["peak"] = [512]
    monkeypatch.setattr(jax, "allocated", lambda device: (64, peak[0]))
    assert "peak" not in notebook.run("%%ongpu 1\nsmall = jnp.ones(3)")
    assert "peak 2.0 KiB" in notebook.run("%%ongpu 1\npeak[0] = 2048")


def test_the_rows_of_memory_add_up_outputs_among_them(notebook):
    import gpumagic

    notebook.run(
        "import jax, jax.numpy as jnp\nX = jax.device_put(jnp.ones(256), jax.devices('gpu')[0])"
    )
    notebook.run("X + 1")
    for device in gpumagic.memory().devices:
        assert sum(row.nbytes for row in device.holders) == device.allocated


def test_back_brings_home_what_a_cell_has_made_of_its_variables(notebook):
    notebook.run(
        "import jax, jax.numpy as jnp\nfrom collections import deque\n"
        "cpu, (one, two) = jax.devices('cpu')[0], jax.devices('gpu')\n"
        "M = {'w': jnp.ones(4)}; net = (jnp.ones(2), 1); X = jnp.ones(3); last = deque([X])\n"
        "there = jax.device_put(jnp.ones(3), one)"
    )
    names = notebook.names
    X, there = names["X"], names["there"]
    shown = notebook.run(
        "%%ongpu 1 --back\nM['w'] = M['w'] * 2\nnet = (net[0] - 1, 2)\nsum = X + there + last[0]"
    )
    assert "and back in" in shown
    assert names["X"] is X  # the array that it was: uncommitted, as before
    assert names["there"] is there
    assert names["last"][0] is X
    assert names["M"]["w"].devices() == names["net"][0].devices() == {names["cpu"]}
    assert names["M"]["w"].tolist() == [2] * 4
    assert names["sum"].devices() == {names["two"]}
    notebook.run("X + there, M['w'] + net[0].sum() + X[0]")  # no two are committed apart


def test_back_keeps_what_a_cell_made_where_a_copy_had_been(notebook):
    """Arrays that a cell lets go leave their addresses to new ones."""
    notebook.run("import jax, jax.numpy as jnp\nx, log = jnp.arange(5.), [jnp.ones(3)]")
    notebook.run("%%ongpu 1 --back\nx = x + 1\nlog += [x * n for n in range(100)]")
    assert notebook.names["x"].tolist() == [1, 2, 3, 4, 5]
    log = notebook.names["log"]
    assert [made.tolist() for made in log[1:]] == [[n * m for m in range(1, 6)] for n in range(100)]


def test_home_names_what_is_still_there_in_containers_too(notebook):
    notebook.run("import jax, jax.numpy as jnp\nM = {'w': jnp.ones(4)}; X = jnp.ones(3)")
    notebook.run("%%ongpu 1\nM['w'] = M['w'] * 2\nmade = [X * 1]")
    shown = notebook.run("%ongpu home")
    assert "moved back M, X" in shown or "brought home X, M" in shown
    assert "still on a GPU: made" in shown
    assert not notebook.names["X"].committed
    assert not notebook.names["M"]["w"].committed
    assert "nothing to move back" in notebook.run("%ongpu home")


def test_virtual_gpus_after_jax_has_started_are_said_once(notebook):
    from gpumagic import virtual

    notebook.run("import jax.numpy as jnp\nx = jnp.ones(2)")
    virtual.disable()
    shown = notebook.run("%gpus --virtual 5")
    assert "restart the kernel" in shown
    assert notebook.run("print('well')") == "well\n"
    notebook.run("%gpus --virtual off")
    notebook.run("%gpus --virtual 2")


def test_what_was_donated_is_no_fault_of_ours(notebook):
    notebook.run(
        "import jax, jax.numpy as jnp, gpumagic\nd = jnp.ones(9)\n"
        "e = jax.jit(lambda a: a + 1, donate_argnums=0)(d)"
    )
    assert "gpumagic failed" not in notebook.run("%%ongpu 1\nwas, new = d.is_deleted(), e + 1")
    with pytest.raises(Exception, match="no array"):
        notebook.run("gpumagic.where(d)")


def test_what_a_framework_cannot_bring_is_left_with_its_reason(notebook, monkeypatch):
    import gpumagic
    from gpumagic.frameworks.jax_framework import Jax

    notebook.run("import jax, jax.numpy as jnp\nX = jnp.ones(3); Y = jnp.ones(4)")
    real = Jax.bring

    def full(self, array, device, **about):
        if array.size == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: no room\nmore")
        return real(self, array, device, **about)

    monkeypatch.setattr(Jax, "bring", full)
    notebook.run("%%ongpu 1\ns = X.sum() + 1; t = Y.sum()")
    (left,) = gpumagic.last_report().left
    assert (left.name, left.reason) == ("X", "RESOURCE_EXHAUSTED: no room")
    assert [moved.name for moved in gpumagic.last_report().moved] == ["Y"]


def test_what_is_said_in_place_of_several_gpus_runs(notebook):
    import gpumagic

    notebook.run("import jax, jax.numpy as jnp\nx = jnp.ones((4, 2))")
    shown = notebook.run("%%ongpu 0,1 --split x\nx + 1")
    code = shown[shown.index("from jax.sharding") :].strip()
    notebook.run(f"{code}\ny = x + 1")
    assert gpumagic.where(notebook.names["y"]) == "cuda:0 + cuda:1"
