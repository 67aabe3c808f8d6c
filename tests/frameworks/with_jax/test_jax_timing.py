"""JAX's functions and arrays in a comparison: copied as they are, waited for, compiled apart."""

import pytest

from gpumagic.copies.trial import CopiedVariables
from gpumagic.device import CPU
from gpumagic.frameworks.framework import FrameworksOn
from gpumagic.timing import compare

SEEN = []


def noted(device):
    """A module's function: copies of what calls it call this one."""
    SEEN.append(device)


# Each of these reads `w`, so that its copy is to read the copy of it.
FUNCTIONS = {
    "jit": "f = jax.jit(lambda x: x * w)",
    "decorated": "@partial(jax.jit, static_argnums=1)\ndef g(x, k):\n    return x * w * k\n"
    "f = lambda x: g(x, 1)",
    "gradient": "f = jax.jit(jax.grad(lambda x: (x * x * w).sum() / 2))",
    "mapped": "f = jax.vmap(lambda x: x * w)",
    "custom": "@jax.custom_vjp\ndef h(x):\n    return x * w\n"
    "h.defvjp(lambda x: (h(x), None), lambda kept, g: (g * w,))\n"
    "f = jax.grad(lambda x: (h(x) * x).sum() / 2)",
    "pytree": "@jax.tree_util.register_dataclass\n@dataclass\nclass Scale:\n    by: jax.Array\n"
    "scale = Scale(w)\nf = lambda x: jax.jit(lambda s, x: x * s.by)(scale, x)",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_the_notebook_made_is_copied_and_computes_there(framework, function):
    space = {"__name__": "__main__"}
    exec(
        "import jax\nimport jax.numpy as jnp\nfrom functools import partial\n"
        f"from dataclasses import dataclass\nw = jnp.float32(3)\n{FUNCTIONS[function]}",
        space,
    )
    jax = space["jax"]
    gpu = framework.devices()[1]
    copies = CopiedVariables(space, ["f"], None, others=FrameworksOn(gpu, (framework,)))
    with framework.place(gpu):
        made = copies.globals["f"](jax.numpy.ones(2))
    assert framework.where(made) == "cuda:1"
    assert made.tolist() == [3.0, 3.0]
    assert copies.storages.nbytes == 4
    assert framework.where(space["w"]) == "cpu"
    copies.close()


def test_a_compiled_functions_copy_has_all_that_it_has(framework, names):
    names |= {"__name__": "__main__", "f": names["jax"].jit(lambda x: x + 1)}
    copies = CopiedVariables(names, ["f"], None, others=FrameworksOn(CPU, (framework,)))
    copied = copies.globals["f"]
    assert copied is not names["f"]
    assert copied.lower(names["n"]).compile()(names["n"]).tolist() == [2.0] * 8
    assert vars(copied).keys() == vars(names["f"]).keys()
    copies.close()


def test_each_device_has_the_inputs_and_the_same_numbers(framework, names):
    names["p"] = {"w": names["a"]}
    code = "y = (p['w'] + n).sum()\nnote(y.device)"
    SEEN.clear()
    names["note"] = noted
    made = compare(code, ["cpu", "0", "1"], namespace=names, max_time=0.02)
    assert [t.error for t in made.timings] == [None] * 3
    assert [t.virtual for t in made.timings] == [False, True, True]
    assert len({str(device) for device in SEEN}) == 3
    assert [a.same for a in made.agreements] == [True] * 2
    assert framework.where(names["p"]["w"]) == "cuda:0"
    assert all(timing.first > timing.median for timing in made.timings)


def test_what_code_gives_away_is_not_the_users(framework, names):
    names["step"] = names["jax"].jit(lambda x: x + 1, donate_argnums=0)
    compare("loose_a = step(loose_a)", ["0", "cpu"], namespace=names, max_time=0.02)
    assert names["loose_a"].tolist() == list(range(8))


def test_what_every_device_was_given_is_done_after_the_wait(framework, names):
    jax, jnp = names["jax"], names["jnp"]
    step = jax.jit(lambda x: jax.lax.scan(lambda c, _: (c @ c * 1e-3, None), x, None, 20)[0])
    inputs = [jax.device_put(jnp.ones((256, 256)), gpu) for gpu in names["gpu"]]
    jax.block_until_ready([step(x) for x in inputs])
    framework.wait()
    given = [step(x) for x in inputs]
    framework.wait()
    # An array learns of it microseconds later, and the work is of many milliseconds.
    assert all(any(made.is_ready() for _ in range(1000)) for made in given)


def test_a_silent_copy_in_a_run_is_told(framework, names):
    made = compare("a + n", ["1"], namespace=names, max_time=0.02)
    assert "in each run on cuda:1: 1 transfer: 32 B to cuda:1" in "\n".join(made.remarks)
    assert compare("a + a", ["1"], namespace=names, max_time=0.02).timings[0].transfers == ""


def test_settings_are_put_back(framework, names):
    compare("jax.config.update('jax_enable_x64', True)", ["cpu"], namespace=names, max_time=0.02)
    assert not names["jax"].config.jax_enable_x64
