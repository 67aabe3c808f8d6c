"""Two engines of ipyparallel, started once for all tests of a process."""

import pytest


@pytest.fixture(scope="session")
def started():
    import gpumagic

    with gpumagic.cluster(2) as ranks:
        yield ranks


@pytest.fixture
def ranks(started, shell):
    """The cluster, for the cells of a new notebook; every rank is there and in the group."""
    lost = [row["rank"] for row in started.status().rows if row["state"] != "idle"]
    if lost:
        started.restart(*lost)
    started.run("import os, time, torch, torch.distributed as dist")
    return started
