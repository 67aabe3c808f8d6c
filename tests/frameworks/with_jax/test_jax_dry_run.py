"""Hold dry runs of what JAX compiles: what they say, and that nothing is computed or changed."""

import ast
import linecache

import pytest

import gpumagic
from gpumagic.dryrun.dry_arrays import NotFollowed, dry_run_array_cell
from gpumagic.errors import GpuError

MIB = 2**20


@pytest.fixture
def space(framework, names):
    """A step of training with 1 MiB of weights on GPU 0, and a batch of NumPy's of 128 KiB."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    ran = []

    @jax.jit
    def step(params, x, rate):
        jax.debug.callback(lambda: ran.append(1))
        loss, grads = jax.value_and_grad(lambda p: ((x @ p["w"]) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

    weights = jax.device_put(np.ones((512, 512), np.float32), names["gpu"][0])
    found = {"jax": jax, "jnp": jnp, "step": step, "params": {"w": weights}, "ran": ran}
    return found | {"x": np.ones((64, 512), np.float32), "rate": 0.1}


def follow(space, code, on=1):
    file = f"<dry {len(linecache.cache)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    return dry_run_array_cell(ast.parse(code), space, file, on)


def test_the_compiler_says_what_a_call_needs(space):
    told = space["step"].lower(space["params"], space["x"], 0.1).compile().memory_analysis()
    run = gpumagic.dry_run(space["step"], space["params"], space["x"], 0.1, on=1)
    peak = run.peak["cuda:1"]
    given = space["params"]["w"].nbytes + space["x"].nbytes
    made = told.output_size_in_bytes + told.temp_size_in_bytes - told.alias_size_in_bytes
    assert peak.needed == given + made
    assert [(a.name, a.kind, a.device) for a in run.assigned] == [
        ("return", "tuple of 2, 2 arrays", "cuda:1")
    ]
    assert run.complete
    assert "compiled it for the CPU" in repr(run)


def test_what_is_there_already_is_not_needed_again(space):
    there = gpumagic.dry_run(space["step"], space["params"], space["x"], 0.1, on=0)
    away = gpumagic.dry_run(space["step"], space["params"], space["x"], 0.1, on=1)
    assert away.peak["cuda:1"].needed - there.peak["cuda:0"].needed == MIB
    assert there.peak["cuda:0"].peak >= there.peak["cuda:0"].needed + MIB


def test_where_no_device_is_named_it_is_that_of_the_arrays(space):
    assert gpumagic.dry_run(space["step"], space["params"], space["x"], 0.1).device == "cuda:0"


def test_nothing_is_computed_and_nothing_changes(space):
    before = dict(space)
    gpumagic.dry_run(space["step"], space["params"], space["x"], 0.1, on=1)
    follow(space, "params, loss = step(params, x, rate)")
    assert space["ran"] == []
    assert space == before
    assert gpumagic.where(space["params"]) == "cuda:0"


def test_what_is_given_away_is_not_needed_twice(space):
    jax = space["jax"]
    w = space["params"]["w"]
    kept, given = (
        gpumagic.dry_run(jax.jit(lambda w: w + 1, donate_argnums=donated), w, on=1)
        for donated in ((), 0)
    )
    assert kept.peak["cuda:1"].needed - given.peak["cuda:1"].needed == MIB
    assert not w.is_deleted()


def test_shapes_without_data_are_followed_to_a_card_that_is_not_here(space):
    jax = space["jax"]
    huge = jax.ShapeDtypeStruct((8_000_000, 512), "float32")
    run = gpumagic.dry_run(space["step"], space["params"], huge, 0.1, on="H100 80GB, 16GiB")
    assert [each.fits for each in run.cards] == [True, False]
    assert run.cards[0].needed > huge.size * 4
    assert "on H100 80GB" in repr(run)


def test_more_than_jax_takes_by_itself_is_told(space):
    jax = space["jax"]
    most = jax.ShapeDtypeStruct((20 * 2**30 // 4,), "float32")
    run = gpumagic.dry_run(jax.jit(lambda x: x.sum()), most, on="24GiB")
    assert run.cards[0].fits
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=.95 before JAX starts" in repr(run)


def test_a_plain_function_is_followed_as_if_it_were_jitted(space):
    run = gpumagic.dry_run(lambda w: space["jnp"].tanh(w @ w), space["params"]["w"], on=1)
    assert run.assigned[0].kind == "float32[512, 512]"
    assert "it is not jitted: these figures are as if it were" in repr(run)


def test_what_depends_on_values_ends_it_at_its_line(space):
    def decide(x):
        return x if x.sum() > 0 else -x

    run = gpumagic.dry_run(decide, space["params"]["w"])
    assert not run.complete
    assert run.unknown[-1].ended
    assert "depends on values" in run.unknown[-1].reason


def test_an_error_is_told_with_its_line(space):
    run = gpumagic.dry_run(space["step"], space["params"], space["jnp"].ones(3), 0.1)
    assert run.error.startswith("TypeError: dot_general")
    assert "would fail at" in repr(run)


def test_a_cell_is_followed_call_by_call(space):
    code = """import jax
new, loss = step(params, x, rate)
again = step(new, jnp.sin(x), rate=rate)[0]
loss
"""
    run = follow(space, code)
    assert [a.name for a in run.assigned] == ["new", "loss", "again", "Out"]
    one = follow(space, "new, loss = step(params, x, rate)")
    assert run.peak["cuda:1"].needed >= one.peak["cuda:1"].needed + MIB  # `new` lives on
    assert run.peak["cuda:1"].at.line == 3


@pytest.mark.parametrize(
    "code",
    [
        "for n in range(3):\n    params, loss = step(params, x, rate)",
        "y = open('x')",
        "params['w'] = step(params, x, rate)",
        "step(*[params, x, rate])",
        "y = missing(x)",
        "x",
    ],
)
def test_what_would_have_to_be_run_is_refused_in_a_line(space, code):
    with pytest.raises(
        NotFollowed, match=r"line 1.*; type gpumagic.dry_run\(step, params, batch\)"
    ):
        follow(space, code)


def test_a_device_or_card_that_is_not_there_is_refused(space):
    for on in (7, "H1OO"):
        with pytest.raises(GpuError):
            gpumagic.dry_run(space["step"], space["params"], space["x"], 0.1, on=on)
