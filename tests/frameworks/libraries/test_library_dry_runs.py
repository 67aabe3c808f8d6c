"""Hold dry runs and places of what Flax NNX, Optax and Equinox make; none is changed by them."""

import numpy as np
import pytest

import gpumagic
from gpumagic.dryrun.dry_arrays import DryCall, Follower


@pytest.fixture
def batch(framework):
    return np.ones((64, 512), np.float32)


def test_a_step_of_nnx_and_optax(batch):
    import jax
    import optax
    from flax import nnx

    model = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    before = jax.tree.map(np.array, nnx.state((model, optimizer)))
    run = gpumagic.dry_run(step, model, optimizer, batch, on=1)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(before))
    assert run.complete
    assert [(a.name, a.kind) for a in run.assigned] == [("return", "float32[]")]
    assert run.peak["cuda:1"].needed >= 2 * state + batch.nbytes  # as it was, and as it will be
    after = jax.tree.map(np.array, nnx.state((model, optimizer)))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    assert gpumagic.where((model, optimizer)) == "cpu"


def test_a_module_of_equinox(batch):
    import equinox as eqx
    import jax

    net = eqx.nn.MLP(512, 10, 512, 1, key=jax.random.key(0))
    forward = eqx.filter_jit(lambda net, x: jax.vmap(net)(x))
    run = gpumagic.dry_run(forward, net, batch, on=1)
    assert run.assigned[0].kind == "float32[64, 10]"
    assert "not jitted" not in repr(run)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(net, eqx.is_array)))
    assert run.peak["cuda:1"].needed >= weights + batch.nbytes
    assert gpumagic.where(net) == "cpu"


def test_a_step_that_gives_a_module_of_equinox_goes_on_from_it(batch):
    import equinox as eqx
    import jax
    import optax

    net = eqx.nn.MLP(512, 512, 512, 1, key=jax.random.key(0))  # it holds functions, too
    tx = optax.sgd(0.1)

    @eqx.filter_jit
    def step(net, state, x):
        loss, grads = eqx.filter_value_and_grad(lambda net: (jax.vmap(net)(x) ** 2).mean())(net)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(net, updates), state, loss

    follower = Follower(1)
    state = tx.init(eqx.filter(net, eqx.is_array))
    for _ in range(2):
        net, state, _ = follower.call(DryCall(step, (net, state, batch), {}))
        assert not follower.ended
    follower.assign("net", net)
    run = follower.result()
    assert run.error is None
    assert [(a.name, a.kind) for a in run.assigned] == [("net", "MLP, 4 arrays")]
    assert callable(net.activation)
