"""Bytes on a virtual GPU: counted, limited, published."""

import os
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.device.caching_allocator import BLOCK
from gpumagic.telemetry import state_files as published
from gpumagic.virtual import memory_account
from gpumagic.virtual.memory_account import MemoryAccount

CAPACITY = 2 * 2**30
MIB = 2**20


class Owner:
    """What holds bytes until it dies."""


def test_allocated_and_peak(gpus):
    x = torch.empty(1000, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == 4096  # 4000 bytes in blocks of 512
    assert torch.cuda.memory_allocated(0) == 0
    view = x.view(10, 100)[1:]
    assert torch.cuda.memory_allocated(1) == 4096
    del x
    assert torch.cuda.memory_allocated(1) == 4096
    del view
    assert torch.cuda.memory_allocated(1) == 0
    assert torch.cuda.max_memory_allocated(1) == 4096
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 0


def test_reserved_and_free(gpus):
    x = torch.ones(2**20, device="cuda:1")
    y = x + x
    assert torch.cuda.memory_allocated(1) == 8 * MIB
    assert torch.cuda.memory_reserved(1) == 20 * MIB  # one segment for both
    assert torch.cuda.mem_get_info(1) == (CAPACITY - 20 * MIB, CAPACITY)
    z = torch.ones(3, device="cuda:1")
    del y
    assert torch.cuda.memory_reserved(1) == 22 * MIB
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(1) == 2 * MIB
    assert torch.cuda.max_memory_reserved(1) == 22 * MIB
    assert "2048 KiB" in torch.cuda.memory_summary(1)
    stats = torch.cuda.memory_stats(1)
    assert stats["requested_bytes.all.current"] == z.nbytes == 12
    assert stats["requested_bytes.all.peak"] == 8 * MIB + 12
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (2, 1)


def test_statistics_count_allocations(gpus):
    def count(name):
        return torch.cuda.memory_stats(1)[f"allocation.all.{name}"]

    x = [torch.ones(3, device="cuda:1") for _ in range(4)]
    del x[:3]
    assert [count(name) for name in ("allocated", "freed", "current", "peak")] == [4, 3, 1, 4]
    x[0] + 1
    assert count("allocated") == 5
    torch.cuda.reset_accumulated_memory_stats(1)
    assert count("allocated") == 0
    assert count("current") == 1
    assert torch.accelerator.memory.memory_allocated(1) == BLOCK


def test_out_of_memory_in_cudas_words(gpus):
    half = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    text = (
        r"^CUDA out of memory\. Tried to allocate 1\.50 GiB\. GPU 0 has a total capacity of "
        r"2\.00 GiB of which 1024\.00 MiB is free\..* this process has 1024\.00 MiB memory in "
        r"use\. Of the allocated memory 1024\.00 MiB is allocated by PyTorch, and 0 bytes is "
    )
    with pytest.raises(torch.OutOfMemoryError, match=text):
        torch.empty(3 * 2**29, dtype=torch.uint8, device="cuda:0")
    torch.empty(3 * 2**29, dtype=torch.uint8, device="cuda:1")
    del half
    torch.empty(3 * 2**29, dtype=torch.uint8, device="cuda:0")
    stats = torch.cuda.memory_stats(0)
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 2)  # the last tensor retried, too


def test_a_block_that_is_larger_than_its_tensor_must_fit_too(gpus):
    make = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")  # noqa: E731
    held = make(CAPACITY - 20 * MIB), make(MIB // 2)
    with pytest.raises(torch.OutOfMemoryError, match="is reserved") as refused:
        make(20_000_000)  # in a block of 20 MiB
    assert " -" not in str(refused.value)
    assert torch.cuda.memory_allocated(0) == sum(x.nbytes for x in held)


def test_a_stable_sort_has_the_peak_of_any_sort(gpus):
    x, peaks = torch.randn(5000, 20, device="cuda:1"), []
    for stable in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(1)
        x.sort(dim=0, stable=stable)
        peaks.append(torch.cuda.max_memory_allocated(1))
    assert peaks[0] == peaks[1]


def test_a_result_counts_too(gpus):
    big = torch.empty(5 * 2**28, dtype=torch.uint8, device="cuda:0")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty_like(big)
    assert torch.cuda.memory_allocated(0) == 5 * 2**28


@pytest.mark.parametrize(
    "outer",
    [
        lambda x: x + x.T,
        lambda x: x == x.T,
        lambda x: x.half() * x.T.double(),
        lambda x: x @ x.T,
        lambda x: torch.outer(x[:, 0], x[:, 0]),
        lambda x: torch.cdist(x, x),
        lambda x: torch.addmm(x[0], x, x.T),
        lambda x: x[None] @ x.T[None],
    ],
)
def test_a_result_without_room_is_refused_before_it_is_computed(gpus, outer):
    """Its last sentence would say that the host has no room, had it been computed there."""
    x = torch.ones(20_000_000, 1, device="cuda:0")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        outer(x)
    assert "Virtual GPUs use host memory" not in str(raised.value)
    assert outer(x[:9]).shape[-1] == 9


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.cat([x.expand(-1, 10**7)] * 2),
        lambda x: torch.stack([x.expand(-1, 10**7)] * 2),
        lambda x: x.repeat(1, 10**7),
        lambda x: x.expand(-1, 10**7).contiguous(),
        lambda x: x.expand(-1, 10**7) + 1,
        lambda x: x.expand(-1, 10**7).softmax(0),
        lambda x: x[:, 0].unfold(0, 10**7, 1).contiguous(),
        lambda x: F.embedding(x[:, 0].long(), x[:1].expand(1, 10**7)),
        lambda x: x[x[:, 0].long() - 1].expand(-1, 10**7)[x[:, 0].long()],
        lambda x: x.expand(-1, 10**7).sort(),
        lambda x: F.conv1d(x.T[None], x[: 10**7, :, None]),
        lambda x: F.unfold(x.T[None, None], (1, 1000), padding=1000),
        lambda x: F.pad(x, (0, 10**7)),
        lambda x: F.interpolate(x.T[None], scale_factor=1e7),
        lambda x: torch.arange(10**14, device=x.device),
        lambda x: torch.eye(10**7, device=x.device),
    ],
)
def test_any_operator_is_refused_before_it_computes_what_has_no_room(gpus, make):
    x = torch.ones(20_000_000, 1, device="cuda:0")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        make(x)
    assert "Virtual GPUs use host memory" not in str(raised.value)


def test_bounds_of_results_break_no_operator(gpus):
    """Tensors without elements or dims; operators that refuse their arguments in torch's words."""
    x = torch.ones(0, 3, 4, 4, device="cuda:1", requires_grad=True)
    F.avg_pool2d(x, 2).sum().backward()
    assert torch.embedding(torch.ones(2, 3, device="cuda:1"), torch.tensor(1).cuda(1)).shape == (3,)
    one = torch.ones((), device="cuda:1")
    for refused in (lambda: one @ one, lambda: torch.conv1d(one, one), lambda: one.repeat(-1)):
        with pytest.raises(RuntimeError, match=r"1D|2D|dim|negative"):
            refused()


def test_a_fraction_of_the_memory(gpus):
    torch.cuda.set_per_process_memory_fraction(0.25, 1)
    with pytest.raises(torch.OutOfMemoryError, match=r"512\.00 MiB allowed; Of"):
        torch.empty(2**30, dtype=torch.uint8, device="cuda:1")


def test_the_state_file_follows(gpus, runtime):
    x = torch.ones(2**20, device="cuda:1")
    (state,) = [s for s in published.read(runtime) if s.sample.virtual_ordinal == 1]
    assert state.pid == os.getpid()
    assert state.sample.memory_used == 20 * MIB
    assert state.sample.uuid == f"GPU-{torch.cuda.get_device_properties(1).uuid}"
    del x
    (state,) = [s for s in published.read(runtime) if s.sample.virtual_ordinal == 1]
    assert state.sample.memory_used == 20 * MIB


def test_busy_time_is_published(monkeypatch):
    now = [0]
    monkeypatch.setattr(memory_account, "perf_counter_ns", lambda: now[0])
    row = [0] * published.COUNTERS
    account = MemoryAccount(0, CAPACITY, row)
    now[0] += published.WINDOW_NS
    account.worked(since=published.WINDOW_NS // 2)
    assert 0.4 * published.WINDOW_NS < row[published.BUSY_NS] <= published.WINDOW_NS
    assert row[published.WINDOW_END_NS] > 0


def test_an_interrupt_while_memory_is_freed_reaches_the_code(gpus):
    """What Python calls for a dying tensor runs no Python, where an interrupt would be dropped."""
    kept = [torch.ones(100, device="cuda:1") for _ in range(20)]
    calls = []
    sys.setprofile(lambda frame, event, called: calls.append(event))
    try:
        kept.clear()
    finally:
        sys.setprofile(None)
    assert "call" not in calls
    assert torch.cuda.memory_allocated(1) == 0
    assert torch.cuda.memory_stats(1)["allocation.all.freed"] == 20


def test_an_interrupt_anywhere_leaves_the_numbers_right():
    """After each call within an allocation or a count, one run each: Python looks there."""
    account = MemoryAccount(0, CAPACITY, [0] * published.COUNTERS)
    interrupted, n = True, 0

    def interrupt(frame, event, called):
        nonlocal left
        if frame.f_code.co_filename == memory_account.__file__ and event in ("call", "c_return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    while interrupted:
        n += 1
        left = n
        owners = [Owner() for _ in range(3)]
        try:
            sys.setprofile(interrupt)
            for owner in owners:
                account.charge(owner, 1000)
            del owners[0], owner
            account.refresh()
            interrupted = False
        except KeyboardInterrupt:
            owners.clear()
        finally:
            sys.setprofile(None)
        owner = None
        owners.clear()
        account.refresh()
        assert (account.allocator.bytes.current, account.allocator.blocks.current) == (0, 0), n
        assert account.allocator.bytes.allocated == account.allocator.bytes.freed
    assert n > 20


def test_threads_lose_no_byte():
    account = MemoryAccount(0, CAPACITY, [0] * published.COUNTERS)

    def work():
        for _ in range(2000):
            account.charge(Owner(), 1000)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    account.refresh()
    assert (account.allocator.bytes.current, account.allocator.blocks.current) == (0, 0)
    assert (account.allocator.bytes.freed, account.allocator.blocks.freed) == (8000 * 1024, 8000)


def test_freeing_in_the_midst_of_an_allocation_waits():
    dying = []

    class Counters(list):
        """Frees a block while it is written, as a garbage collection may."""

        def __setitem__(self, place, value):
            super().__setitem__(place, value)
            dying.clear()

    account = MemoryAccount(0, CAPACITY, Counters([0] * published.COUNTERS))
    dying.append(Owner())
    account.charge(dying[0], 1)
    owner = Owner()
    account.charge(owner, 1)
    account.refresh()
    assert account.allocator.blocks.current == 1


def test_what_did_not_fit_is_never_counted_as_freed():
    account, owner = MemoryAccount(0, 2 * MIB, [0] * published.COUNTERS), Owner()
    with pytest.raises(torch.OutOfMemoryError) as raised:
        account.charge(owner, 4 * MIB)
    raised.traceback[-1].frame.raw.clear()  # as whoever frees what an error holds does
    del owner
    account.refresh()
    assert account.allocator.bytes.current == 0


@given(st.lists(st.integers(1, 6 * MIB), max_size=30), st.randoms(use_true_random=False))
def test_an_account_against_a_list(sizes, random):
    row = [0] * published.COUNTERS
    account = MemoryAccount(0, 44 * MIB, row)
    allocator = account.allocator
    live, peak = {}, 0
    for size in sizes:
        try:
            owner = Owner()
            account.charge(owner, size)
            live[owner] = size
        except torch.OutOfMemoryError:
            assert allocator.bytes.current + size > account.capacity - BLOCK
        peak = max(peak, sum(live.values()))
        if live and random.random() < 0.4:
            del owner, live[random.choice(list(live))]
        if random.random() < 0.1:
            account.empty_cache()
        account.refresh()
        assert allocator.requested.current == sum(live.values())
        least, slack = sum(-(-size // BLOCK) * BLOCK for size in live.values()), MIB * len(live)
        assert least <= allocator.bytes.current <= least + slack
        reserved = allocator.reserved.current
        assert allocator.bytes.current <= reserved == row[published.RESERVED]
        assert reserved % (2 * MIB) == 0
    assert (allocator.requested.peak, allocator.blocks.current) == (peak, len(live))
