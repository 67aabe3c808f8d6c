"""The model of CUDA's caching allocator, refereed by torch's own on the stand-in CUDA runtime."""

import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import memory_networks as networks
import pytest
import torch
from torch.nn import functional as F

from gpumagic.device.caching_allocator import CachingAllocator
from gpumagic.virtual.scratch import RULES

MIB = 2**20
KINDS = ("allocated_bytes", "requested_bytes", "reserved_bytes", "allocation", "segment")


@pytest.fixture(autouse=True)
def _emptied():
    if not torch.cuda.is_available():
        pytest.fail("these tests need the stand-in CUDA runtime: make test-cuda")
    torch.cuda.init()
    torch.autograd.set_multithreading_enabled(False)
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.autograd.set_multithreading_enabled(True)


def real():
    stats = torch.cuda.memory_stats(0)
    return [stats[f"{kind}.all.{which}"] for kind in KINDS for which in ("current", "peak")]


def modelled(model):
    stats = (model.bytes, model.requested, model.reserved, model.blocks, model.segments)
    return [number for stat in stats for number in (stat.current, stat.peak)]


def some_size(draw):
    """Bytes: mostly small, and the limits of each pool."""
    edges = (1, 512, 513, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 10 * MIB + 1, 12 * MIB - 5)
    most = draw.choice((4096, 4096, MIB, MIB, 9 * MIB, 9 * MIB, 24 * MIB, 0))
    return draw.randint(1, most) if most else draw.choice(edges)


@pytest.mark.parametrize("seed", range(20))
def test_every_figure_after_each_allocation_and_free(seed):
    draw, model, live = random.Random(seed), CachingAllocator(), []
    gc.collect()  # what an earlier test left in a reference cycle
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    before = real()
    assert not any(before), "something lives on cuda:0 that this test did not make"
    for step in range(300):
        kind = draw.random()
        if kind < 0.6 and len(live) < 40:
            size = some_size(draw)
            live.append(
                (torch.empty(size, dtype=torch.uint8, device="cuda:0"), size, model.allocate(size))
            )
        elif kind < 0.98 and live:
            tensor, size, place = live.pop(draw.randrange(len(live)))
            del tensor
            model.free(*place, size)
        else:
            torch.cuda.empty_cache()
            model.empty_cache()
        assert modelled(model) == real(), step


def x(*shape, dtype=torch.float32, transposed=False):
    made = torch.rand(shape, device="cuda:0").to(dtype)
    return made.transpose(0, -1).contiguous().transpose(0, -1) if transposed else made


SHAPES = [
    ((2048, 512), 0), ((2048, 4096), 0), ((65536, 64), 0), ((4096, 784), 0), ((512, 4096), 1),
    ((3, 400000), 1), ((1000, 1001), 0), ((16, 32, 56, 56), (0, 2, 3)), ((2000000,), 0),
    ((7, 333, 1111), (0, 1)), ((33, 70000), 1), ((4096, 6), 0), ((40000, 1), 0), ((5, 5), 0),
]  # fmt: skip
REDUCTIONS = {
    "sum": lambda x, dim: torch.ops.aten.sum.dim_IntList(x, dim),
    "mean": lambda x, dim: torch.ops.aten.mean.dim(x, dim),
}


def taken_beside(function, *args):
    """What an operator took at most beside what it gave, by torch's allocator: as asked for."""
    torch.cuda.reset_peak_memory_stats(0)
    result = function(*args)
    stats = torch.cuda.memory_stats(0)
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"], result


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, dtype, transposed):
    card = torch.cuda.get_device_properties(0)
    for shape, dim in SHAPES:
        dims = [dim] if isinstance(dim, int) else list(dim)
        given = x(*shape, dtype=dtype, transposed=transposed)
        took, result = taken_beside(REDUCTIONS[name], given, dims)
        predicted = RULES[name](card, (given, dims), result)
        assert sum(predicted) == took, (shape, dim)
        result = None


def integers(most, *shape):
    return torch.randint(most, shape, device="cuda:0")


# The operator's name, its arguments, and what is called with them: by the number of rows.
OPERATORS = {
    "sort": ("sort", lambda n: (x(n), -1), torch.sort),
    "sort of rows": ("sort", lambda n: (x(3, n), 1), torch.sort),
    "sort of short rows": ("sort", lambda n: (x(n, 16), 1), torch.sort),
    "sort of integers": ("sort", lambda n: (integers(9, n), -1), torch.sort),
    "argsort": ("argsort", lambda n: (x(n), -1), torch.argsort),
    "softmax": (
        "_softmax_backward_data",
        lambda n: (x(n, 9), x(n, 9), 1, torch.float32),
        torch.ops.aten._softmax_backward_data,
    ),
    "index_put": (
        "index_put",
        lambda n: (x(n), [integers(4, n)], x(n), True),
        torch.ops.aten.index_put,
    ),
    "mse_loss": ("mse_loss", lambda n: (x(n), x(n)), F.mse_loss),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    rule, arguments, function = OPERATORS[name]
    for n in (64, 1000, 5000, 20000, 70000):
        args = arguments(n)
        function(*args)  # a first call may load more
        took, result = taken_beside(function, *args)
        predicted = RULES[rule](torch.cuda.get_device_properties(0), args, result)
        assert took == pytest.approx(sum(predicted), abs=16), n
        result = None


@pytest.fixture(scope="module")
def on_virtual_gpus():
    """Peaks of the networks on virtual GPUs, from a process whose torch sees no GPU."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("STANDIN_CUDA_DEVICES")}
    program = Path(networks.__file__)
    done = subprocess.run(
        [sys.executable, program, "virtual"], env=env | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_training_steps(name, on_virtual_gpus):
    networks.prepare()
    allocated, reserved, requested, left = networks.peaks(name)
    found = on_virtual_gpus[name]
    assert found[:1] + found[2:] == [allocated, requested, left]
    if name != "batch norm":  # CUDA's backward pass allocates in another order: 2 MiB
        assert found[1] == reserved
