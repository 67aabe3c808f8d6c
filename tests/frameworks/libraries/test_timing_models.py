"""Models of Flax, Optax and Equinox are copied to a device, train there, and stay as they are."""

import gc

import pytest

from gpumagic.copies.trial import CopiedVariables
from gpumagic.frameworks.framework import FrameworksOn

IMPORTS = (
    "import equinox as eqx\nimport jax, jax.numpy as jnp, optax\nfrom flax import linen, nnx\n"
)
# What makes a model, and a step that sets `loss`.
MODELS = {
    "nnx": (
        "class Net(nnx.Module):\n"
        "    def __init__(self, rngs):\n"
        "        self.a, self.drop = nnx.Linear(3, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)\n"
        "    def __call__(self, x):\n        return self.drop(nnx.relu(self.a(x)))\n"
        "net = Net(nnx.Rngs(0))\nopt = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)\n"
        "@nnx.jit\ndef step(net, opt, x):\n"
        "    loss, slopes = nnx.value_and_grad(lambda net: (net(x) ** 2).mean())(net)\n"
        "    opt.update(net, slopes)\n    return loss\n",
        "loss = step(net, opt, x)",
    ),
    "linen": (
        "class Net(linen.Module):\n    @linen.compact\n"
        "    def __call__(self, x):\n        return linen.Dense(2)(x)\n"
        "net = Net()\np = net.init(jax.random.key(0), x)\ntx = optax.adamw(1e-3)\ns = tx.init(p)\n"
        "@jax.jit\ndef step(p, s, x):\n"
        "    loss, g = jax.value_and_grad(lambda p: (net.apply(p, x) ** 2).mean())(p)\n"
        "    u, s = tx.update(g, s, p)\n    return optax.apply_updates(p, u), s, loss\n",
        "p, s, loss = step(p, s, x)",
    ),
    "equinox": (
        "class Net(eqx.Module):\n    w: jax.Array\n"
        "    def __call__(self, x):\n        return x @ self.w\n"
        "net = Net(jnp.ones((3, 2)))\n"
        "@eqx.filter_jit\ndef step(net, x):\n    return (net(x) ** 2).mean()\n",
        "loss = step(net, x)",
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_on_copies(framework, model):
    made, step = MODELS[model]
    space = {"__name__": "__main__"}
    exec(f"{IMPORTS}x = jnp.ones((8, 3))\n{made}", space)
    jax, gpu = space["jax"], framework.devices()[1]
    others = {id(array) for array in framework.live()}  # of tests before
    held = [space[name] for name in ("net", "p", "s") if name in space]
    before = [leaf.tolist() for leaf in jax.tree.leaves(held) if hasattr(leaf, "tolist")]
    names = [name for name in ("net", "opt", "p", "s", "tx", "step", "x") if name in space]
    copies = CopiedVariables(space, names, None, others=FrameworksOn(gpu, (framework,)))
    with framework.place(gpu):
        exec(step, copies.globals)
    assert framework.where(copies.globals["loss"]) == "cuda:1"
    assert [leaf.tolist() for leaf in jax.tree.leaves(held) if hasattr(leaf, "tolist")] == before
    assert "loss" not in space
    copies.close()
    del copies
    gc.collect()
    new = [array for array in framework.live() if id(array) not in others]
    assert not [array.shape for array in new if framework.where(array) == str(gpu)]
