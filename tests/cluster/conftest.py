"""Two engines of ipyparallel, started once for all tests of a process, whose end is theirs."""

import pytest


@pytest.fixture
def no_ranks():
    """For a test that starts its own cluster: the one that other tests left is stopped."""
    from gpumagic.cluster import gpu_cluster

    if gpu_cluster.is_running():
        gpu_cluster.current().stop()


@pytest.fixture
def ranks(shell):
    """The cluster, for the cells of a new notebook; every rank is there and in the group."""
    import gpumagic
    from gpumagic.cluster import gpu_cluster

    started = gpu_cluster.current() if gpu_cluster.is_running() else gpumagic.cluster(2)
    lost = [row["rank"] for row in started.status().rows if row["state"] != "idle"]
    if lost:
        started.restart(*lost)
    started.run("import os, time, torch, torch.distributed as dist")
    return started
