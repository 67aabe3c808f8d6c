"""JAX's devices, arrays and pytrees: placed, named and brought; what a fresh process is told."""

import functools
import gc
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from gpumagic.device import CPU, Device
from gpumagic.errors import GpuError


def test_what_names_no_device_is_made_where_it_is_placed(framework, names):
    jax, jnp = names["jax"], names["jnp"]
    gpu = framework.devices()[1]
    with framework.place(gpu):
        made = [jnp.ones(3), jnp.asarray([1, 2]), jax.random.key(0), jnp.sin(1.0)]
        named = jax.device_put(made[0], names["gpu"][0])
    assert {framework.where(array) for array in made} == {"cuda:1"}
    assert framework.where(named) == "cuda:0"
    assert framework.where(jnp.ones(3)) == "cpu"


def test_arrays_are_told_from_what_only_looks_like_one(framework, names):
    jax, a = names["jax"], names["a"]
    assert framework.is_array(a)
    assert framework.is_array(jax.random.key(0))
    assert not framework.is_array(names["n"])
    assert not framework.is_array([a])
    traced = []
    jax.make_jaxpr(lambda x: traced.append(framework.is_array(x)) or x)(a)
    assert traced == [False]
    a.delete()
    assert not framework.is_array(a)


def test_where_and_bytes(framework, names):
    jax, n = names["jax"], names["n"]
    halves = jax.device_put(n, names["halves"])
    assert framework.where(halves) == "cuda:0 + cuda:1"
    assert (framework.nbytes(halves), framework.nbytes(names["a"])) == (32, 32)
    assert framework.nbytes(jax.random.key(0)) == 8


def test_arrays_are_brought_and_committed(framework, names):
    gpu = framework.devices()[1]
    for array in (names["a"], names["loose_a"], names["jax"].random.key(3)):
        brought = framework.bring(array, gpu)
        assert (framework.where(brought), brought.committed) == ("cuda:1", True)
        assert str(brought) == str(array)
        assert framework.bring(brought, gpu) is brought
        assert framework.where(framework.bring(array, CPU)) == "cpu"
    with pytest.raises(GpuError, match="sharded over cuda:0 \\+ cuda:1, and was not moved"):
        framework.bring(names["jax"].device_put(names["n"], names["halves"]), gpu)


def test_a_gpu_that_is_not_there_is_told_from_one_that_jax_cannot_have(framework):
    with pytest.raises(GpuError, match=r"^JAX has no cuda:7: there are cuda:0 and cuda:1 "):
        framework.own(Device("cuda", 7))


class Layer(NamedTuple):
    weights: Any
    bias: Any


def test_pytrees_are_brought_and_what_they_share_they_share(framework, names):
    jax, a, n = names["jax"], names["a"], names["n"]

    jax.tree_util.register_pytree_node(
        Net := type("Net", (), {}),
        lambda net: ((net.held,), net.name),
        lambda name, parts: _made(Net, name, parts),
    )
    net = _made(Net, "mine", ([Layer(a, n), {"w": a, "none": None}],))
    partial = jax.tree_util.Partial(max, a)
    held = {"net": net, "alias": a, "partial": partial, "done": jax.random.key(0)}
    before = held["net"].held
    moves = framework.move(held.items(), framework.devices()[1], held, [])
    assert [moved.name for moved in moves.moved] == ["net", "done"]  # each array once
    brought = held["net"].held
    assert (held["net"].name, held["partial"].func) == ("mine", max)
    assert brought is before  # a list is changed where it is
    assert brought[0].weights is brought[1]["w"] is held["alias"] is held["partial"].args[0]
    assert framework.where(held["alias"]) == "cuda:1"
    assert brought[0].bias is n
    assert framework.where(a) == "cuda:0"


def test_what_partials_and_namespaces_hold_is_brought(framework, names):
    a = names["a"]
    call = functools.partial(max, a, key=[a])
    held = {"call": call, "space": SimpleNamespace(w=a, call=call)}
    moves = framework.move(held.items(), framework.devices()[1], held, [])
    assert [moved.name for moved in moves.moved] == ["call"]
    call = held["call"]
    assert call is held["space"].call
    assert held["space"].w is call.args[0] is call.keywords["key"][0]
    assert framework.where(call.args[0]) == "cuda:1"
    assert call.func is max


def _made(kind, name, parts):
    made = kind()
    made.name, (made.held,) = name, parts
    return made


def test_waiting_and_memory(framework, names):
    gpu = framework.devices()[0]
    gc.collect()  # what other tests have left goes now
    before, peak = framework.allocated(gpu)
    held = names["jax"].device_put(names["np"].zeros(1024, "float32"), names["gpu"][0])
    framework.wait()
    assert peak is None
    assert framework.allocated(gpu) == (before + 4096, None)
    shared = names["jax"].device_put(held, names["halves"])
    assert framework.allocated(gpu)[0] - before == 4096 + 2048
    del held, shared


def test_the_textbooks_functions_run_as_printed(framework, names):
    jax = names["jax"]

    def num_gpus():
        try:
            return jax.device_count("gpu")
        except RuntimeError:
            return 0

    def try_gpu(i=0):
        return jax.devices("gpu")[i] if num_gpus() >= i + 1 else jax.devices("cpu")[0]

    assert num_gpus() == 2
    assert jax.local_devices(backend="cuda") == jax.devices("gpu")
    x = names["jnp"].ones((2, 3), device=try_gpu(1))
    assert framework.where(x) == "cuda:1"
    assert framework.where(names["jnp"].ones(3, device=try_gpu(10))) == "cpu"


FRESH = """
import jax
from gpumagic import device
from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.frameworks.jax_framework import Jax

own = jax.devices
framework = Jax()
jax.numpy.ones(3)
for count in (1, 0):
    try:
        framework.make_virtual(count)
    except GpuError as error:
        print(error)
device.set_virtual(lambda: [Device("cuda", 0, "GPU-0", virtual=True)])
print(framework.devices(), jax.devices("gpu"))
try:
    framework.place(device.here()[0])
except GpuError as error:
    print(error)
device.set_virtual(None)
print(jax.devices is own)
try:
    framework.place(Device("cuda", 0, "GPU-0"))
except GpuError as error:
    print(error)
"""


def test_where_jax_has_started_it_is_too_late_for_virtual_gpus():
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FRESH)], capture_output=True, text=True, check=True
    )
    late = (
        "JAX has started in this kernel with 1 CPU device: restart the kernel, and type "
        "in a notebook, %load_ext gpumagic, then %gpus --virtual 1 before anything uses JAX"
    )
    assert ran.stdout.splitlines() == [
        late,
        "[] []",
        late,
        "True",
        "JAX has no cuda:0; for GPU support: pip install 'jax[cuda13]'",
    ]
