"""Collectives and DistributedDataParallel between processes that have virtual GPUs."""

import gc
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gpumagic

OTHER = """
import sys; sys.path[:0] = {path!r}
import gpumagic, test_collectives
gpumagic.virtual.enable(2)
test_collectives.work(1, {store!r})
gpumagic.virtual.disable()
"""


def work(rank, store):
    """What each of two processes does; the values are the same in both."""
    here = torch.device("cuda", rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        summed = torch.full((3,), rank + 1.0, device=here)
        waiting = dist.all_reduce(summed, async_op=True)
        (known,) = waiting.get_future().wait()
        waiting.wait()
        assert waiting.is_completed()
        assert known.device == here
        _let_go_without_a_collection(here)
        gathered = [torch.zeros(1, device=here) for _ in range(2)]
        dist.all_gather(gathered, torch.full((1,), float(rank), device=here))
        passed = torch.full((2,), float(rank), device=here)
        if rank == 0:
            dist.send(passed, 1)
        else:
            dist.recv(passed, 0)
        dist.barrier()
        return summed, gathered, passed, _gradients(rank, here)
    finally:
        dist.destroy_process_group()


def _let_go_without_a_collection(here):
    gc.disable()
    try:
        before = torch.cuda.memory_allocated(here)
        dist.broadcast(torch.zeros(1000, device=here), 0)
        end = time.monotonic() + 5
        # gloo's own thread lets go of it a moment after it has said that it is done.
        while torch.cuda.memory_allocated(here) > before and time.monotonic() < end:
            pass
        assert torch.cuda.memory_allocated(here) == before
    finally:
        gc.enable()


def _gradients(rank, here):
    torch.manual_seed(rank)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[rank : rank + 1]
    net = nn.Linear(2, 1).to(here)
    if torch.version.cuda is not None:
        with pytest.raises(
            NotImplementedError, match="virtual GPUs have no DistributedDataParallel"
        ):
            DistributedDataParallel(net, device_ids=[rank])
        return torch.tensor([[2.0, 3.0]]), True
    net = DistributedDataParallel(net, device_ids=[rank])
    with gpumagic.watch(warn=False) as watched:
        net(x.to(here)).sum().backward()
    net.zero_grad()
    net(x.to(here)).sum().backward()  # where torch would ask the first step's times
    return net.module.weight.grad, watched.ledger.transfers == 1  # that of x


def test_two_processes(gpus, tmp_path):
    code = OTHER.format(
        path=[*sys.path, __file__.rpartition("/")[0]], store=str(tmp_path / "store")
    )
    other = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stderr=subprocess.PIPE)
    try:
        summed, gathered, passed, (gradient, no_copies) = work(0, tmp_path / "store")
        _, said = other.communicate(timeout=60)
    finally:
        other.kill()
        other.communicate()
    assert other.returncode == 0, said.decode()
    assert summed.tolist() == [3, 3, 3]
    assert [g.item() for g in gathered] == [0, 1]
    assert passed.tolist() == [0, 0]
    assert gradient.tolist() == [[2, 3]]
    assert no_copies


def test_what_only_a_real_gpu_has_is_refused_in_one_line(gpus):
    from multiprocessing.reduction import ForkingPickler

    x = torch.ones(3, device="cuda")
    with pytest.raises(NotImplementedError, match="virtual GPUs cannot resize a storage, as FSDP"):
        x.untyped_storage().resize_(0)
    with pytest.raises(NotImplementedError, match="virtual GPUs share no memory with other"):
        ForkingPickler.dumps(x)
    assert ForkingPickler.dumps(x.cpu())
    assert x.cpu().untyped_storage().resize_(0).nbytes() == 0
