"""Dry runs of one rank of many. That DistributedDataParallel's peak is the real one is held where
two real ranks run: tests/virtual/test_collectives.py."""

import gc
import os

import pytest
import torch
import torch.distributed as dist
from dry_runs import ended, of_cell
from torch import nn
from torch.distributed import get_rank, init_process_group, is_initialized
from torch.distributed.device_mesh import init_device_mesh

import gpumagic

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def _fully_shard():
    """Import it for these tests alone: else each process that collects them takes a second more."""
    global fully_shard
    from torch.distributed.fsdp import fully_shard


def sharded(steps):
    """Two layers of 10 MiB, of which a rank of eight holds two rows of ten, one or none."""
    init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    net = nn.Sequential(*(nn.Linear(10, 2**18, bias=False) for _ in range(2))).cuda()
    net[1] = nn.Linear(2**18, 10, bias=False, device="cuda")
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(1, 10, device="cuda")).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    print(get_rank(), dist.get_world_size())
    return net


def test_a_sharded_step_of_the_first_rank_and_of_the_last():
    result = gpumagic.dry_run(sharded, 2, on="8 x 24GiB, 0.6GiB")
    assert result.complete, result
    assert not is_initialized()
    assert "RANK" not in os.environ
    assert (result.world, [on.rank for on in result.ranks]) == (8, [0, 7])
    assert result.printed == "0 8\n"
    first, last = result.ranks
    # Of the second layer a rank has two rows of ten at most, so all are sent as if of sixteen.
    whole, padded = 10 * MIB, 16 * MIB
    assert {c.name: (c.ranks, c.calls, c.nbytes) for c in first.collectives} == {
        "all_gather": (8, 8, 4 * (whole + padded)),
        "reduce_scatter": (8, 4, 2 * (whole + padded)),
    }
    assert [c.sent for c in first.collectives] == [c.nbytes * 7 // 8 for c in first.collectives]
    assert first.collectives == last.collectives
    # The last has no row of it, and so nothing of Adam's two moments of two rows.
    assert first.peak.needed - last.peak.needed == 4 * MIB
    assert first.peak.device == "cuda:0"
    assert last.peak.device == "cuda:7"
    assert all(on.needed == first.peak.needed and on.fits for on in result.cards)
    said = str(result)
    assert "dry run of one rank of 8 on 24GiB (not here)" in said
    assert "rank 0 needs" in said
    assert "each rank sends 136 MiB" in said
    assert result._repr_html_().count("reduce_scatter") == 1


def test_what_a_cell_does_with_other_ranks(gpus):
    cell = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(256)\n"
        "work = dist.all_reduce(x, async_op=True)\n"
        "parts = [torch.empty(256) for _ in range(2)]\n"
        "dist.all_gather(parts, x); dist.barrier()\n"
        "half = dist.new_group([dist.get_rank()], backend='gloo')\n"
        "dist.reduce(x, dist.get_rank(), group=half)\n"
        "told = [None] * 2; dist.all_gather_object(told, dist.get_rank())\n"
        "dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)\n"
        "if dist.get_rank() and x.sum() > 0: pass"
    )
    result = of_cell(cell, {"torch": torch}, on="@all")
    assert result.device == "cuda:1"  # the last rank does not come to the end: it is shown
    assert ended(result)[1] == "a condition on a tensor depends on data"
    assert [a.device for a in result.assigned if a.name == "x"] == ["cuda:1"]
    first, last = (
        {c.name: (c.ranks, c.calls, c.nbytes, c.sent) for c in on.collectives}
        for on in result.ranks
    )
    assert first["all_reduce"] == (2, 1, 1024, 1024)
    assert first["all_gather"] == (2, 1, 2048, 1024)
    assert first["reduce"] == (1, 1, 1024, 0)
    assert first["send"] == (2, 1, 1024, 1024)
    assert last["recv"] == (2, 1, 1024, 0)
    assert "rank 1 sends" in str(result)
    assert not dist.is_initialized()


@pytest.mark.parametrize("as_views", [False, True])
def test_the_buckets_of_data_parallel_count_as_one_copy_of_the_gradients(as_views):
    def train():
        init_process_group("nccl")
        net = nn.Linear(1024, 1024, bias=False, device="cuda")
        net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=as_views)
        x = torch.randn(1, 1024, device="cuda")
        with net.no_sync():
            net(x).sum().backward()
        for _ in range(2):
            net(x).sum().backward()

    result = gpumagic.dry_run(train, on="2 x 24GiB")
    assert result.complete, result
    for on in result.ranks:
        sent = {c.name: (c.calls, c.nbytes) for c in on.collectives}
        assert sent == {"broadcast": (1, 4 * MIB), "all_reduce": (2, 8 * MIB)}
        # The weights, the bucket, and the gradient that the last pass adds to the first ones.
        assert on.peak.needed // MIB == (12 if as_views else 16)
    assert "DistributedDataParallel's buckets count as one copy of the gradients" in str(result)


def test_of_how_many_is_read_or_refused(ip):
    for line, said in {
        "@all --dry-run --on 4090": "@all of how many? type --dry-run --on '8 x 4090'",
        "--dry-run --on '0 x 4090'": "0 x 4090: 0 is no number of GPUs; type 8 x 4090",
        "@0 --dry-run": "a dry run is of one of all ranks; type %%ongpu @all --dry-run",
    }.items():
        assert f"UsageError: %%ongpu: {said}" in ip.run(f"%%ongpu {line}\na").text
    with pytest.raises(gpumagic.GpuError, match="4 x cuda:1: each rank sees its GPU as cuda:0"):
        gpumagic.dry_run(print, on="4 x cuda:1")


def test_nothing_is_sent_in_a_group_that_there_was_before():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x, net = torch.ones(4), nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    try:
        alone = gpumagic.dry_run(lambda: dist.all_reduce(x))
        (end,) = alone.unknown
        assert end.reason.startswith("all_reduce in a process group that there was before")
        of_two = gpumagic.dry_run(lambda: dist.all_reduce(x), on="2 x rtx 4090")
        assert "rank 0 and rank 1 need as much" in str(of_two)
        assert [c.sent for on in of_two.ranks for c in on.collectives] == [16, 16]
        with pytest.raises(gpumagic.GpuError, match="net was wrapped for another group"):
            gpumagic.dry_run(lambda: net(x), on="2 x 24GiB")
        dist.all_reduce(x)
    finally:
        # If net were the last to have the group, torch would end that with Python's lock held, and
        # wait for a thread of gloo's that needs it to let go of x (pytorch#56297).
        net = None
        gc.collect()
        dist.destroy_process_group()
