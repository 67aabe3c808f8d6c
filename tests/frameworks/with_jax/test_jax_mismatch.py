"""JAX's errors between devices, in the user's own names, and fixes that are pasted and run."""

import linecache

import pytest

import gpumagic
from gpumagic import faults

# Code whose last line fails, what its operands are and where, and what to write there instead.
# `a` is on GPU 0 and `b` on GPU 1; `big`, on GPU 1 too, has more bytes.
CASES = [
    ("a + b", {"a": "cuda:0", "b": "cuda:1"}, "a + jax.device_put(b, a.device)"),
    ("c = b * a", {"a": "cuda:0", "b": "cuda:1"}, "c = b * jax.device_put(a, b.device)"),
    ("a @ big", {"a": "cuda:0", "big": "cuda:1"}, "jax.device_put(a, big.device) @ big"),
    ("jnp.dot(a, b)", {"a": "cuda:0", "b": "cuda:1"}, "jnp.dot(a, jax.device_put(b, a.device))"),
    ("a < b", {"a": "cuda:0", "b": "cuda:1"}, "a < jax.device_put(b, a.device)"),
    (
        "a + jnp.sin(b)",
        {"a": "cuda:0", "b": "cuda:1"},
        "a + jnp.sin(jax.device_put(b, a.device))",
    ),
    (
        "a += big[0]",
        {"a": "cuda:0", "big[0]": "cuda:1"},
        "a += jax.device_put(big[0], a.device)",
    ),
    (
        "def made():\n    return b * 2\nc = a + made()",
        {"a": "cuda:0", "made()": "cuda:1"},
        "c = a + jax.device_put(made(), a.device)",
    ),
    (
        "p = {'w': a}\nstep(p, b)",
        {"p": "cuda:0", "b": "cuda:1"},
        'step(p, jax.device_put(b, jax.devices("gpu")[0]))',
    ),
    (
        "step({'w': a}, b)",
        {"a": "cuda:0", "b": "cuda:1"},
        "step({'w': a}, jax.device_put(b, a.device))",
    ),
    (
        "p = {'w': a, 'v': [b, b, a]}\nboth(p)",
        {"p['v'][2] and 1 more": "cuda:0", "p['v'][0] and 1 more": "cuda:1"},
        'both(jax.device_put(p, jax.devices("gpu")[1]))',
    ),
    (
        "both({'w': a, 'v': [b, a]})",
        {"a": "cuda:0", "b": "cuda:1"},
        "both({'w': a, 'v': [jax.device_put(b, a.device), a]})",
    ),
    (
        "jax.lax.scan(lambda c, x: (c + x * big[0], None), jnp.zeros(8), a)",
        {"big": "cuda:1", "a": "cuda:0"},
        "jax.lax.scan(lambda c, x: (c + x * big[0], None), jnp.zeros(8), "
        "jax.device_put(a, big.device))",
    ),
    (
        "split + big[0]",
        {"split": "cuda:0 + cuda:1", "big[0]": "cuda:1"},
        "split + jax.device_put(big[0], jax.sharding.NamedSharding(split.sharding.mesh, "
        "jax.sharding.PartitionSpec()))",
    ),
    (
        "a + jax.device_put(a, gpu[1])",
        {"a": "cuda:0", "jax.device_put(a, gpu[1])": "cuda:1"},
        "a + jax.device_put(jax.device_put(a, gpu[1]), a.device)",
    ),
    (
        "def f(x):\n    return x * b\nf(a)",
        {"x": "cuda:0", "b": "cuda:1"},
        "    return x * jax.device_put(b, x.device)",
    ),
    (
        "jnp.stack([a, b])",
        {"a": "cuda:0", "b": "cuda:1"},
        "jnp.stack([a, jax.device_put(b, a.device)])",
    ),
    (  # what is differentiated, and what is mapped over, is a tracer there
        "def loss(p):\n    return (a * p['w']).sum()\njax.grad(loss)({'w': b})",
        {"a": "cuda:0", "p['w']": "cuda:1"},
        "    return (a * jax.device_put(p['w'], a.device)).sum()",
    ),
    (
        "jax.vmap(lambda row: row * a[0])(big)",
        {"row": "cuda:1", "a[0]": "cuda:0"},
        'jax.vmap(lambda row: row * jax.device_put(a[0], jax.devices("gpu")[1]))(big)',
    ),
]


@pytest.mark.parametrize(("code", "operands", "written"), CASES)
def test_operands_are_named_and_the_fix_runs(names, code, operands, written):
    jax, jnp = names["jax"], names["jnp"]
    names["big"] = jax.device_put(jnp.ones((8, 8)), names["gpu"][1])
    names["both"] = jax.jit(lambda p: p["w"] * p["v"][0])
    mesh = jax.sharding.Mesh(names["gpu"], ("i",))
    halves = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    names["split"] = jax.device_put(jnp.ones(8), halves)
    names["step"] = jax.jit(lambda p, x: p["w"] * x)
    explanation = gpumagic.explain(failure(code, names))
    found = {o.name: ", ".join(o.devices) for o in explanation.operands}
    assert found == operands
    assert sum(operand.odd for operand in explanation.operands) == 1
    assert "committed" in str(explanation)
    if written is not None:
        assert explanation.fix.code == written
        exec(explanation.fix.apply(code), names)
    assert faults.all_kept() == []


def failure(code, names):
    file = "<ipython-input-1-0>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    with pytest.raises(ValueError, match="incompatible devices") as raised:
        exec(compile(code, file, "exec"), names)
    return raised.value


def test_jax_is_imported_where_it_has_no_name(names):
    code = "a + b"
    seen = {"a": names["a"], "b": names["b"]}
    assert gpumagic.explain(failure(code, seen)).fix.code == (
        "import jax\na + jax.device_put(b, a.device)"
    )


def test_other_errors_are_not_explained(names):
    for error in (ValueError("x"), RuntimeError("Received incompatible devices"), KeyError(3)):
        assert gpumagic.explain(error) is None
