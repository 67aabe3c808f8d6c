"""`%%gputime` without torch: JAX on each device, a sweep, an earlier run; bad input is one line."""

import sys

import pytest

IMPORTS = "import jax, jax.numpy as jnp\nx = jnp.ones((8, 8))\nf = jax.jit(lambda a: a @ a)"


def test_a_cell_on_each_device(notebook):
    notebook.run(IMPORTS)
    shown = notebook.run("%%gputime cpu 0 1 --items len(x) --max-time 0.05 -o made\ny = f(x)")
    rows = [line.split() for line in shown.splitlines() if line.endswith(("reference", "same"))]
    assert [row[0] for row in rows] == ["cpu", "cuda:0", "cuda:1"]
    made = notebook.names["made"]
    assert all(timing.first > timing.median for timing in made.timings)
    assert all(timing.copied == 256 for timing in made.timings)
    assert [timing.virtual for timing in made.timings] == [False, True, True]
    assert "y" not in notebook.names
    assert sys.modules["torch"] is None


def test_a_sweep_and_what_changed_since(notebook):
    notebook.run(IMPORTS)
    sweep = "--sweep n=2,4 --setup 'A = jnp.ones((n, n))' --max-time 0.02"
    shown = notebook.run(f"%%gputime cpu 0 {sweep} -o made\nA + 1")
    assert "cuda:0 (virtual)" in shown
    assert "numbers: cuda:0 same" in notebook.names["made"].remarks
    shown = notebook.run(f"%%gputime cpu 0 {sweep} --against made\nA + 1")
    assert "change" in shown
    assert "differs from the earlier run" not in shown


def test_what_a_run_gives_away_the_next_one_is_to_have_again(notebook):
    notebook.run(IMPORTS + "\ng = jax.jit(lambda p: {'w': p['w'] + 1}, donate_argnums=0)")
    notebook.run("p = {'w': x}")
    shown = notebook.run("%%gputime cpu 1 --max-time 0.02\np = g(p)")
    assert "cuda:1 (virtual)" in shown
    assert not notebook.names["x"].is_deleted()
    with pytest.raises(Exception, match=r"deleted|donated") as raised:
        notebook.run("%gputime cpu --max-time 0.02 -- g(p)")
    told = getattr(raised.value, "__notes__", ["timed on cpu"])  # Python 3.10 prints them
    assert "timed on cpu" in told[-1]
    assert not notebook.names["x"].is_deleted()


def test_a_cell_of_no_framework_is_timed(notebook):
    assert notebook.run("%gputime cpu --max-time 0.02 -- sum(range(9))").startswith("cpu takes")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("cpu cpu", "cpu is named twice; type it once"),
        ("7", "no GPU 7: there are cuda:0 and cuda:1 (virtual); type 0, 1, cpu, or 7? to fall"),
        ("0+", "a device is missing in 0+; type two or more, such as 0+1"),
    ],
)
def test_bad_input_is_one_line(notebook, line, said):
    notebook.run(IMPORTS)
    shown = notebook.run(f"%gputime {line} -- f(x)").strip()
    assert said in shown
    assert "\n" not in shown
