"""Threads, tasks and forks: a placement holds in its own context only."""

import asyncio
import os
import threading

import pytest
import torch

import gpumagic
from gpumagic.placement import swap

pytestmark = pytest.mark.usefixtures("gpus")
GPU1 = torch.device("cuda:1")


def test_other_threads_do_not_see_it_and_may_have_their_own():
    seen = {}
    entered, leave = threading.Barrier(3), threading.Barrier(3)

    def work(where):
        if where is None:
            entered.wait()
            seen[where] = torch.zeros(1).device
            leave.wait()
            return
        with gpumagic.on(where):
            entered.wait()
            seen[where] = torch.zeros(1).device, torch.cuda.current_device()
            leave.wait()
            seen[where, "late"] = torch.zeros(1).device

    threads = [threading.Thread(target=work, args=(w,)) for w in (0, 1, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] == (torch.device("cuda:0"), 0)
    assert seen[1] == (GPU1, 1)
    assert seen[None].type == "cpu"
    assert seen[0, "late"].index == 0
    assert seen[1, "late"].index == 1
    assert not swap.installed()


def test_tasks_have_their_own_and_do_not_outlive_it():
    async def main():
        go = asyncio.Event()

        async def placed(where):
            with gpumagic.on(where):
                await asyncio.sleep(0)
                return torch.zeros(1).device.index

        async def straggler():
            await go.wait()
            return torch.zeros(1).device.type

        both = await asyncio.gather(placed(0), placed(1))
        with gpumagic.on(1):
            late = asyncio.create_task(straggler())
            await asyncio.sleep(0)
        with gpumagic.on(0):  # the names are swapped again, for another placement
            go.set()
            return both, await late

    assert asyncio.run(main()) == ([0, 1], "cpu")


def test_one_object_entered_by_several_threads():
    shared = gpumagic.on(1)
    first, second = threading.Event(), threading.Event()
    seen = []

    def work():
        with shared:
            first.set()
            second.wait()
            seen.append(torch.zeros(1).device)

    thread = threading.Thread(target=work)
    thread.start()
    first.wait()
    with shared, shared:
        seen.append(torch.zeros(1).device)
    assert torch.zeros(1).device.type == "cpu"
    second.set()
    thread.join()
    assert seen == [GPU1, GPU1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a property of fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_not_placed():
    with gpumagic.on(1):
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(write, torch.zeros(1).device.type.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        assert os.read(read, 10) == b"cpu"
        os.close(read)
