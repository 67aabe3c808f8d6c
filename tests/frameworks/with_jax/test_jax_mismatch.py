"""JAX's errors between devices, in the user's own names, and fixes that are pasted and run."""

import linecache

import pytest

import gpumagic
from gpumagic import faults

# Code whose last line fails, what its operands are and where, and what to write there instead.
# `a` is on GPU 0 and `b` on GPU 1; `big`, on GPU 1 too, has more bytes.
ON_0, ON_1 = 'jax.devices("gpu")[0]', 'jax.devices("gpu")[1]'
CASES = [
    ("a + b", {"a": "cuda:0", "b": "cuda:1"}, f"a + jax.device_put(b, {ON_0})"),
    ("c = b * a", {"a": "cuda:0", "b": "cuda:1"}, f"c = b * jax.device_put(a, {ON_1})"),
    ("a @ big", {"a": "cuda:0", "big": "cuda:1"}, f"jax.device_put(a, {ON_1}) @ big"),
    ("jnp.dot(a, b)", {"a": "cuda:0", "b": "cuda:1"}, f"jnp.dot(a, jax.device_put(b, {ON_0}))"),
    ("a < b", {"a": "cuda:0", "b": "cuda:1"}, f"a < jax.device_put(b, {ON_0})"),
    (
        "a + jnp.sin(b)",
        {"a": "cuda:0", "b": "cuda:1"},
        f"a + jnp.sin(jax.device_put(b, {ON_0}))",
    ),
    (
        "a += big[0]",
        {"a": "cuda:0", "big[0]": "cuda:1"},
        f"a += jax.device_put(big[0], {ON_0})",
    ),
    (
        "p = {'w': a}\nstep(p, b)",
        {"p": "cuda:0", "b": "cuda:1"},
        f"step(p, jax.device_put(b, {ON_0}))",
    ),
    (
        "step({'w': a}, b)",
        {"a": "cuda:0", "b": "cuda:1"},
        f"step({{'w': a}}, jax.device_put(b, {ON_0}))",
    ),
    (
        "p = {'w': a, 'v': [b, b, a]}\nboth(p)",
        {"p": "cuda:0, cuda:1"},
        f"both(jax.device_put(p, {ON_0}))",
    ),
    (
        "both({'w': a, 'v': [b, a]})",
        {"a": "cuda:0", "b": "cuda:1"},
        f"both({{'w': a, 'v': [jax.device_put(b, {ON_0}), a]}})",
    ),
    ("split + big[0]", {"split": "cuda:0 + cuda:1", "big[0]": "cuda:1"}, None),
    (
        "def f(x):\n    return x * b\nf(a)",
        {"x": "cuda:0", "b": "cuda:1"},
        f"    return x * jax.device_put(b, {ON_0})",
    ),
    (
        "jnp.stack([a, b])",
        {"a": "cuda:0", "b": "cuda:1"},
        f"jnp.stack([a, jax.device_put(b, {ON_0})])",
    ),
    (  # what is differentiated, and what is mapped over, is a tracer there
        "def loss(p):\n    return (a * p['w']).sum()\njax.grad(loss)({'w': b})",
        {"a": "cuda:0", "p['w']": "cuda:1"},
        f"    return (a * jax.device_put(p['w'], {ON_0})).sum()",
    ),
    (  # of scaled(p), nothing is known in the function
        "def scaled(p):\n    return p['w'] * 2\ndef loss(p, x):\n"
        "    return (scaled(p) * x).sum()\njax.grad(loss)({'w': big}, a)",
        {"big": "cuda:1", "a": "cuda:0"},
        f"jax.grad(loss)({{'w': big}}, jax.device_put(a, {ON_1}))",
    ),
    (
        "jax.vmap(lambda row: row * a[0])(big)",
        {"row": "cuda:1", "a[0]": "cuda:0"},
        f"jax.vmap(lambda row: row * jax.device_put(a[0], {ON_1}))(big)",
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
    assert getattr(explanation.fix, "code", None) == written
    if explanation.fix:
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
        f"import jax\na + jax.device_put(b, {ON_0})"
    )


@pytest.mark.parametrize("code", ["a + made()", "a + jax.device_put(a, gpu[1])"])
def test_an_operand_that_has_gone_is_not_guessed(names, code):
    names["made"] = lambda: names["b"] * 2
    assert gpumagic.explain(failure(code, names)) is None


def test_other_errors_are_not_explained(names):
    for error in (ValueError("x"), RuntimeError("Received incompatible devices"), KeyError(3)):
        assert gpumagic.explain(error) is None
