"""Hold who has the memory of JAX's arrays: each buffer once, by name, on each device."""

from types import SimpleNamespace

import pytest

from gpumagic.device import Device
from gpumagic.frameworks.framework import Pool
from gpumagic.memory import holders_by_name
from gpumagic.telemetry import collect
from gpumagic.telemetry.snapshot import GpuSample, Snapshot

GIB = 2**30
UNMET = "held by JAX itself, or by no Python object"


@pytest.fixture
def held(framework, monkeypatch):
    """A report of a notebook with these variables."""
    gpus = [
        GpuSample(f"GPU-{n}", "Virtual", ordinal=n, virtual=True, memory_total=GIB, memory_used=0)
        for n in range(2)
    ]
    snapshot = Snapshot(0.0, "host", None, "none", tuple(gpus), (), ())
    monkeypatch.setattr(collect, "snapshot", lambda: snapshot)

    def report(**variables):
        monkeypatch.setattr(holders_by_name, "user_namespace", lambda: variables)
        return holders_by_name.memory()

    return report


def rows(report, device):
    found = next(each for each in report.devices if each.device == device)
    return {row.path: row for row in found.holders}


class Net:
    def __init__(self, weight):
        self.layers = [{"weight": weight}]


def test_arrays_have_rows_by_the_names_that_reach_them(held, names):
    import jax

    # On the CPU an array may be NumPy's memory, and two be the same.
    a = jax.device_put(names["n"], names["gpu"][1]) + 1
    sharded = jax.device_put(names["n"], names["halves"]) + 1
    net = Net(jax.device_put(names["n"], names["gpu"][0]) + 1)
    report = held(a=a, again=[a], net=net, sharded=sharded)
    on_0, on_1 = (rows(report, f"cuda:{n}") for n in range(2))
    assert (on_0["net"].nbytes, on_0["net"].kind) == (32, "JAX array")
    assert on_0["sharded"].nbytes == on_1["sharded"].nbytes == 16
    assert (on_1["a"].nbytes, on_1["a"].aliases[0]) == (32, "again")
    assert "again" not in on_1


def test_rows_add_up_to_what_lives_also_what_nobody_names(held, names, framework):
    import jax

    kept = {"hidden": jax.device_put(names["n"], names["gpu"][0])}  # by this frame alone
    report = held(x=names["b"])
    for number, device in enumerate(report.devices):
        gpu = Device("cuda", number, virtual=True)
        assert sum(row.nbytes for row in device.holders) == framework.allocated(gpu)[0]
        assert device.allocated == framework.allocated(gpu)[0]
    assert "kept" not in repr(kept)
    assert "1.0 GiB allocated" in repr(report)


def test_a_buffer_counts_once_however_many_arrays_share_it(held, names, framework):
    before = framework.allocated(Device("cuda", 0, virtual=True))
    shards = [shard.data for shard in names["a"].addressable_shards]
    assert framework.allocated(Device("cuda", 0, virtual=True)) == before
    assert rows(held(a=names["a"], shards=shards), "cuda:0")["a"].nbytes == 32


def test_what_was_donated_holds_nothing(held, names, framework):
    import jax

    given = jax.device_put(names["n"], names["gpu"][1])
    jax.jit(lambda x: x + 1, donate_argnums=0)(given).block_until_ready()
    assert framework.places(given) == []
    assert "given" not in rows(held(given=given), "cuda:1")


def test_one_name_is_opened_item_by_item(held, names):
    from gpumagic.memory.memory_tree import tree

    held()
    text = repr(tree("params", {"params": {"w": [names["a"]], "b": names["b"]}}))
    assert "['w']" in text
    assert "JAX array" in text
    # A variable of Flax NNX has its array in a private attribute.
    net = SimpleNamespace(kernel=SimpleNamespace(_raw_value=names["a"]), bias=names["b"])
    branches = tree("net", {"net": net}).branches
    assert [branch.path for branch in branches] == [
        "net",
        "net.bias",
        "net.kernel",
        "net.kernel._raw_value",
    ]


def test_what_jax_has_taken_of_a_gpu_is_as_its_allocator_says(framework, monkeypatch):
    told = {"bytes_in_use": GIB, "peak_bytes_in_use": 2 * GIB, "pool_bytes": 60 * GIB}
    told |= {"bytes_limit": 60 * GIB}
    own = SimpleNamespace(memory_stats=lambda: told)
    monkeypatch.setattr(framework, "own", lambda device: own)
    gpu = Device("cuda", 0)
    assert framework.pool(gpu) == Pool("JAX", GIB, 2 * GIB, 60 * GIB, 60 * GIB)
    told.clear()
    assert framework.pool(gpu) is None
    assert framework.pool(Device("cuda", 0, virtual=True)) is None
