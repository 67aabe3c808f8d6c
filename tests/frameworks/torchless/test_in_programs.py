"""The library without torch: devices, placement and moves are JAX's."""

import pytest

import gpumagic

IMPORTS = (
    "import gpumagic, jax, jax.numpy as jnp\n"
    "cpu, gpus = jax.devices('cpu')[0], jax.devices('gpu')\n"
)


def test_the_textbooks_functions_give_jaxs_devices(notebook):
    notebook.run(
        IMPORTS + "assert gpumagic.num_gpus() == 2\n"
        "assert (gpumagic.cpu(), gpumagic.gpu(1)) == (cpu, gpus[1])\n"
        "assert (gpumagic.try_gpu(), gpumagic.try_gpu(10)) == (gpus[0], cpu)\n"
        "assert gpumagic.try_all_gpus() == gpus\n"
        "x = jnp.ones(2, device=gpumagic.try_gpu(1))"
    )
    assert gpumagic.where(notebook.names["x"]) == "cuda:1"
    with pytest.raises(gpumagic.GpuError, match="JAX"):
        notebook.run("gpumagic.gpu(7)")


def test_a_placement_holds_for_with_and_for_a_function(notebook):
    notebook.run(
        IMPORTS + "@gpumagic.on(0)\ndef make(): return jnp.ones(2)\n"
        "with gpumagic.on(1) as device:\n    a, b = jnp.ones(2), make()\n"
        "    with gpumagic.on('cpu'): c = jnp.ones(2)\n"
        "d = jnp.ones(2)"
    )
    names = notebook.names
    assert names["device"] == names["gpus"][1]
    found = [gpumagic.where(names[name]) for name in "abcd"]
    assert found == ["cuda:1", "cuda:0", "cpu", "cpu"]


def test_one_placement_entered_by_two_threads_ends_in_each(notebook):
    notebook.run(
        IMPORTS + "import threading\nshared, there = gpumagic.on(1), threading.Barrier(2)\n"
        "found = []\n"
        "def work():\n"
        "    with shared:\n"
        "        there.wait(); found.append(gpumagic.where(jnp.ones(2))); there.wait()\n"
        "    found.append(gpumagic.where(jnp.ones(2)))\n"
        "both = [threading.Thread(target=work) for _ in range(2)]\n"
        "for each in both: each.start()\n"
        "for each in both: each.join()"
    )
    assert notebook.names["found"] == ["cuda:1", "cuda:1", "cpu", "cpu"]


def test_a_move_changes_containers_and_gives_what_stands_for_the_rest(notebook):
    notebook.run(
        IMPORTS + "params, pair = {'w': jnp.ones(3), 'b': [jnp.ones(2)]}, (jnp.ones(4), 'x')\n"
        "kept, moves = params, gpumagic.move(params, 1)\nmade = gpumagic.move(pair, 0)"
    )
    names = notebook.names
    assert names["moves"].value is names["params"] is names["kept"]
    assert names["moves"].nbytes == 20
    assert gpumagic.where(names["params"]) == "cuda:1"
    assert gpumagic.where(names["made"].value) == "cuda:0"
    assert gpumagic.where(names["pair"]) == "cpu"
    assert names["made"].value[1] == "x"
    with pytest.raises(gpumagic.GpuError, match="no GPU 7"):
        notebook.run("gpumagic.move(pair, 7)")


def test_a_function_that_imports_jax_itself_is_served(notebook):
    for name in ("jax", "jnp", "x", "cpu", "gpus"):
        notebook.names.pop(name, None)
    notebook.run("import gpumagic\ndef ask():\n    import jax\n    return gpumagic.try_gpu(1)")
    notebook.run("found = ask()")
    assert notebook.names["found"].id == 2
