"""Hold `gpumagic.where` of what JAX has: arrays, shards, keys, pytrees; and of what has no data."""

from dataclasses import dataclass

import pytest

import gpumagic
from gpumagic.errors import GpuError


def test_arrays_are_where_gpumagic_says_they_are(names):
    import jax

    assert gpumagic.where(names["a"]) == "cuda:0"
    assert gpumagic.where(names["loose_b"]) == "cuda:1"
    assert gpumagic.where(jax.device_put(names["n"], names["halves"])) == "cuda:0 + cuda:1"
    assert gpumagic.where(jax.device_put(jax.random.key(0), names["gpu"][1])) == "cuda:1"


def test_what_holds_arrays_is_on_all_their_devices(names):
    import jax

    @jax.tree_util.register_dataclass
    @dataclass
    class State:
        params: object
        batch: object

    state = State({"w": names["b"]}, [names["n"]])
    assert gpumagic.where(state) == "cuda:1 and cpu"
    spread = jax.device_put(names["n"], names["halves"])
    assert gpumagic.where([spread, names["n"]]) == "cuda:0, cuda:1 and cpu"


def test_shapes_and_what_is_traced_have_no_data(names):
    import jax

    with pytest.raises(GpuError, match="this ShapeDtypeStruct contains no array"):
        gpumagic.where(jax.ShapeDtypeStruct((2,), "float32"))

    def traced(x):
        with pytest.raises(GpuError, match="contains no array"):
            gpumagic.where(x)
        return x

    jax.jit(traced)(names["a"])


def test_to_ask_computes_and_copies_nothing(counted):
    ran = counted("import gpumagic\nplace = gpumagic.where([a, b, n])")
    assert ran.names["place"] == "cuda:0, cuda:1 and cpu"
    assert not ran.ledger
