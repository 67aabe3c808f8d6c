"""The figures of each GPU: torch's, those of the rest of this process, and of others."""

from types import SimpleNamespace

import pytest
import torch

from gpumagic.memory import holders_by_name
from gpumagic.placement import torch_devices
from gpumagic.telemetry.snapshot import GpuSample, ProcessSample, Snapshot

GIB = 2**30
GPU = GpuSample(
    "GPU-0",
    "H100",
    ordinal=0,
    memory_total=80 * GIB,
    memory_used=30 * GIB,
    memory_reserved=GIB,
)
MINE = ProcessSample("GPU-0", 1, 12 * GIB, mine=True)
OTHER = ProcessSample("GPU-0", 2, 18 * GIB, name="python3", user="ada", notebook="b.ipynb")


@pytest.fixture
def machine(monkeypatch):
    """One real GPU of which torch has reserved 10 GiB; the test says who holds what."""

    def play(*processes, stats=None, gpu=GPU, backend="native"):
        told = {"allocated_bytes.all.current": 8 * GIB, "reserved_bytes.all.current": 10 * GIB}
        told |= {"inactive_split_bytes.all.current": GIB} if stats is None else stats
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: told)
        monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: backend, raising=False)
        monkeypatch.setattr(torch_devices, "tell_cuda_order", lambda: None)
        snapshot = Snapshot(0.0, gpus=(gpu,) if gpu else (), processes=processes)
        monkeypatch.setattr(holders_by_name.collect, "snapshot", lambda: snapshot)
        (found,) = holders_by_name.figures()
        return found

    return play


def test_torch_the_rest_of_the_process_and_others_are_told_apart(machine):
    found = machine(MINE, OTHER)
    assert (found.device, found.name, found.virtual) == ("cuda:0", "H100", False)
    assert (found.allocated, found.reserved, found.fragmented) == (8 * GIB, 10 * GIB, GIB)
    assert found.other_in_process == 2 * GIB
    assert found.others == 18 * GIB
    assert found.others_by_name == (("b.ipynb", 18 * GIB),)
    assert (found.total, found.free) == (80 * GIB, 49 * GIB)


def test_where_the_driver_does_not_know_our_pid_nothing_is_guessed(machine):
    """In a container our pid is another one: what is reserved here is not others'."""
    found = machine()
    assert found.other_in_process is None
    assert found.others_by_name == (("system", 20 * GIB),)
    found = machine(ProcessSample("GPU-0", 2, None, user="ada"))
    assert found.others is None


def test_what_is_not_known_is_none(machine):
    assert machine(MINE, backend="cudaMallocAsync").fragmented is None
    without = machine(MINE, gpu=None)
    assert (without.total, without.free, without.others) == (None, None, None)
    assert without.allocated == 8 * GIB
    quiet = machine(MINE, gpu=GpuSample("GPU-0", ordinal=0), stats={})
    assert (quiet.free, quiet.fragmented) == (None, None)


def test_nothing_starts_cuda(machine, monkeypatch):
    machine(MINE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_stats", None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    (found,) = holders_by_name.figures()
    assert (found.allocated, found.reserved, found.fragmented) == (0, 0, 0)


def test_virtual_gpus(gpus):
    kept = torch.zeros(1000, device="cuda:1")
    one, other = holders_by_name.figures()
    assert one.allocated == 0
    assert (kept.nbytes, other.allocated) == (4000, 4096)  # in blocks of 512
    assert other.virtual
    assert other.other_in_process == other.others == 0
    assert other.free == GIB - other.reserved


def test_apples_gpu(monkeypatch):
    """Its memory is the host's: nobody says what others hold of it."""
    mps = SimpleNamespace(
        recommended_max_memory=lambda: 16 * GIB,
        current_allocated_memory=lambda: GIB,
        driver_allocated_memory=lambda: 2 * GIB,
    )
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "mps", mps)
    *_, found = holders_by_name.figures()
    assert (found.device, found.allocated, found.reserved) == ("mps:0", GIB, 2 * GIB)
    assert (found.free, found.others) == (None, None)
