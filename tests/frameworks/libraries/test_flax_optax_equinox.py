"""Flax, Optax and Equinox on virtual GPUs: brought whole, nothing invented, silent copies found."""

import linecache

import pytest

import gpumagic

flax = pytest.importorskip("flax")
import equinox  # noqa: E402
import optax  # noqa: E402
from flax import linen, nnx, struct  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

from gpumagic.ledger.ledger_view import advise  # noqa: E402

# Each cell runs on GPU 0, and what it makes and reads is there.
CLEAN = [
    "m = nnx.Linear(8, 4, rngs=nnx.Rngs(0))\ny = m(a)",
    "m = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu, "
    "nnx.Dropout(0.5, rngs=nnx.Rngs(1)))\ny = m(a)",
    "m = nnx.BatchNorm(8, rngs=nnx.Rngs(0))\ny = m(a[None])",
    "m = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))\ny = m(a[None])",
    "m = nnx.Linear(8, 1, rngs=nnx.Rngs(0))\n"
    "opt = nnx.Optimizer(m, optax.adam(1e-3), wrt=nnx.Param)\n"
    "@nnx.jit\ndef step(m, opt, x):\n"
    "    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(m)\n"
    "    opt.update(m, grads)\n    return loss\n"
    "for _ in range(3):\n    loss = step(m, opt, a)",
    "m = nnx.Linear(8, 4, rngs=nnx.Rngs(0))\ngraph, state = nnx.split(m)\n"
    "y = jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, a)",
    "m = linen.Dense(4)\np = m.init(jax.random.key(0), a)\ny = m.apply(p, a)",
    "m = linen.Sequential([linen.Dense(4), linen.relu, linen.LayerNorm()])\n"
    "p = m.init(jax.random.key(0), a)\ny = jax.jit(m.apply)(p, a)",
    "m = linen.Conv(2, (3,))\np = m.init(jax.random.key(0), a[None, :, None])",
    "m = linen.Dense(1)\n"
    "p = m.init(jax.random.key(0), a)\n"
    "s = TrainState.create(apply_fn=m.apply, params=p, tx=optax.sgd(0.1))\n"
    "@jax.jit\ndef step(s, x):\n"
    "    grads = jax.grad(lambda p: (s.apply_fn(p, x) ** 2).mean())(s.params)\n"
    "    return s.apply_gradients(grads=grads)\n"
    "for _ in range(3):\n    s = step(s, a)",
    "tx = optax.adamw(1e-3)\ns = tx.init({'w': a})\nu, s = tx.update({'w': a}, s, {'w': a})\n"
    "p = optax.apply_updates({'w': a}, u)",
    "rate = optax.cosine_decay_schedule(0.1, 10)\n"
    "tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))\n"
    "s = tx.init(a)\nu, s = jax.jit(tx.update)(a, s, a)",
    "loss = optax.softmax_cross_entropy_with_integer_labels(a[None], jnp.array([1])).mean()",
    "m = equinox.nn.MLP(8, 1, 16, 2, key=jax.random.key(0))\ny = m(a)",
    "m = equinox.nn.Linear(8, 4, key=jax.random.key(0))\n"
    "@equinox.filter_jit\n@equinox.filter_value_and_grad\ndef step(m, x):\n"
    "    return (jax.vmap(m)(x) ** 2).mean()\n"
    "for _ in range(3):\n    loss, grads = step(m, a[None])",
    "m = equinox.nn.GRUCell(8, 4, key=jax.random.key(0))\n"
    "h, _ = jax.lax.scan(lambda h, x: (m(x, h), None), jnp.zeros(4), jnp.stack([a, a]))",
]
# The same with a batch of NumPy's, or on the other GPU: the last line copies in silence.
SILENT = [
    ("m = nnx.Linear(8, 4, rngs=nnx.Rngs(0))\nm(n)", ("cpu", "cuda:0")),
    ("m = linen.Dense(4)\np = m.init(jax.random.key(0), a)\nm.apply(p, n)", ("cpu", "cuda:0")),
    (
        "m = equinox.nn.Linear(8, 4, key=jax.random.key(0))\nequinox.filter_jit(m)(loose_b)",
        ("cuda:1", "cuda:0"),
    ),
    ("optax.apply_updates({'w': a}, {'w': loose_b})", ("cuda:1", "cuda:0")),
]


@pytest.fixture(autouse=True)
def _libraries(names):
    names |= {"linen": linen, "nnx": nnx, "optax": optax, "equinox": equinox}
    names["TrainState"] = TrainState


@pytest.mark.parametrize("code", CLEAN)
def test_nothing_is_invented_in_clean_code(counted, framework, code):
    ran = counted(code, where=framework.devices()[0])
    assert (ran.error, ran.implicit) == (None, [])


@pytest.mark.parametrize(("code", "ends"), SILENT)
def test_planted_copies_are_found(counted, framework, code, ends):
    ran = counted(code, where=framework.devices()[0])
    assert ran.error is None
    last = len(code.splitlines())
    assert {(e.line, e.source, e.destination) for e in ran.implicit} == {(last, *ends)}


def where(framework, tree):
    import jax

    leaves = jax.tree.leaves(tree)
    return {framework.where(leaf) for leaf in leaves if framework.is_array(leaf)}


def test_nnxs_objects_stay_the_objects_that_they_are(framework):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Linear(8, 8, rngs=rngs)
            self.layers = nnx.List([self.embed, nnx.Dropout(0.5, rngs=rngs)])
            self.head = self.embed.kernel
            self.root = self

    net = Tied(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
    embed, kernel, before = net.embed, net.head, str(nnx.state(net))
    held = {"optimizer": optimizer, "net": net, "loose": kernel}
    moves = framework.move(held.items(), framework.devices()[1], held, [])
    assert moves.left == ()
    assert held == {"optimizer": optimizer, "net": net, "loose": kernel}
    assert net.embed is net.layers[0] is embed
    assert net.head is embed.kernel is kernel
    assert where(framework, nnx.state(net)) == where(framework, nnx.state(optimizer)) == {"cuda:1"}
    assert str(nnx.state(net)) == before
    assert framework.where(embed(kernel[...])) == "cuda:1"


def test_trees_of_flax_optax_and_equinox_are_rebuilt(framework, names):
    a = names["a"]

    @struct.dataclass
    class Both:
        net: object
        state: object
        name: str = struct.field(pytree_node=False, default="both")

    linear = equinox.nn.Linear(8, 4, key=names["jax"].random.key(0))
    tied = equinox.nn.Shared((linear, linear), lambda m: m[0].weight, lambda m: m[1].weight)
    state = optax.adam(1e-3).init({"w": a})
    train = TrainState.create(apply_fn=linear, params={"w": a}, tx=optax.sgd(0.1))
    held = {"both": Both(linear, state), "linear": linear, "tied": tied, "train": train}
    framework.move(held.items(), framework.devices()[1], held, [])
    assert where(framework, held) == {"cuda:1"}
    both = held["both"]
    assert (both.name, type(both.state[0])) == ("both", type(state[0]))
    assert both.net.weight is held["linear"].weight
    assert held["train"].tx is train.tx
    assert where(framework, linear) == {"cpu"}  # only lists and dicts change where they are


def test_a_model_that_device_put_refuses_is_not_advised_to_it(counted, names):
    names["model"] = equinox.nn.MLP(8, 4, 8, 1, key=names["jax"].random.key(0))
    ran = counted("for _ in range(3): model(a)")
    (entry,) = ran.ledger.copies
    assert entry.names == ()
    assert "jax.device_put(…, " in advise(entry).text


def test_what_a_library_waits_for_is_its_own(counted):
    ran = counted(
        "f = equinox.filter_jit(lambda x: x + 1)\nfor _ in range(20): y = f(a)", strict=True
    )
    assert ran.error is None  # it names what it waits for
    (entry,) = ran.ledger
    assert (entry.operator, entry.count, entry.within) == ("block_until_ready", 20, "equinox._jit")
    assert advise(entry) is None


@pytest.mark.parametrize("kind", ["nnx", "equinox"])
def test_a_model_that_device_put_cannot_copy_stays_and_its_batch_comes(framework, names, kind):
    jax, on = names["jax"], names["gpu"][1]
    if kind == "nnx":
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        model.kernel[...] = jax.device_put(model.kernel[...], on)
    else:  # it holds functions
        model = equinox.filter_shard(equinox.nn.MLP(8, 4, 8, 1, key=jax.random.key(0)), on)
    names["model"] = model if kind == "nnx" else equinox.filter_vmap(model)
    names["batch"] = jax.device_put(names["jnp"].ones((99, 8)), names["gpu"][0])
    file, code = f"<ipython-input-{kind}>", "y = model(batch)"
    linecache.cache[file] = (len(code), None, [code], file)
    with pytest.raises(ValueError, match="incompatible devices") as raised:
        exec(compile(code, file, "exec"), names)
    fix = gpumagic.explain(raised.value).fix.code
    assert fix == 'y = model(jax.device_put(batch, jax.devices("gpu")[1]))'
    exec(fix, names)
    assert framework.where(names["y"]) == "cuda:1"
