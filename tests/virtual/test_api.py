"""The rest of torch.cuda: devices, properties, streams, events, random numbers, types."""

import copy
import itertools
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from gpumagic import device

pytestmark = pytest.mark.usefixtures("gpus")


def test_properties():
    properties = torch.cuda.get_device_properties("cuda:1")
    assert properties.total_memory == 2 * 2**30
    assert "Virtual" in torch.cuda.get_device_name(1)
    assert "Virtual" in repr(properties)
    assert torch.cuda.get_device_capability() == (9, 0)
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(2)
    asked = {name for name in dir(properties) if not name.startswith("_")}
    cuda = {"L2_cache_size", "clock_rate", "is_integrated", "pci_bus_id", "memory_bus_width"}
    assert asked >= cuda  # timm's layers, and Triton, ask for the size of the cache


def test_gpumagic_names_the_same_devices():
    found = device.here()
    assert [str(d) for d in found] == ["cuda:0", "cuda:1"]
    assert all(d.virtual and d.memory_free == d.memory_total == 2 * 2**30 for d in found)
    assert [d.uuid for d in found] == [
        f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(2)
    ]
    held = torch.ones(2**20, device="cuda:1")
    assert device.here()[1].memory_free == 2 * 2**30 - 20 * 2**20  # a segment
    assert held.is_cuda


def test_current_device():
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        there = (
            torch.zeros(1, device="cuda"),
            torch.ones(2).cuda(),
            torch.ones(2).to("cuda"),
            torch.Generator("cuda"),
            torch.cuda.Stream(),
        )
        assert {str(x.device) for x in there} == {"cuda:1"}
    assert torch.cuda.current_device() == 0
    assert torch.zeros(1, device="cuda").device.index == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(7)


def test_default_device():
    torch.set_default_device("cuda:1")
    assert torch.zeros(2).device == nn.Linear(2, 2).weight.device == torch.device("cuda:1")
    torch.set_default_device(None)
    with torch.device("cuda:1"):
        assert nn.Linear(3, 3)(torch.tensor([[1.0, 2, 3]])).device == torch.device("cuda:1")


def test_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == 2
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream().device.type == "cuda"


def test_streams_and_events():
    stream = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="must be recorded"):
        begin.elapsed_time(end)
    begin.record()
    with torch.cuda.stream(stream):
        x = torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
        x.record_stream(stream)
    torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    assert end.query()
    assert 0 < begin.elapsed_time(end) < 10_000
    with pytest.raises(ValueError, match="enable_timing"):
        begin.elapsed_time(torch.cuda.Event())


def test_a_stream_is_one_of_its_own_and_its_device_is_current_within():
    one, two = torch.cuda.Stream(), torch.cuda.Stream(device=1)
    assert one == one
    assert one != torch.cuda.Stream()
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != one
    with torch.cuda.stream(two):
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream() == two != torch.cuda.default_stream()
        assert torch.ones(1, device="cuda").device.index == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)


def test_the_debug_mode_is_refused_with_what_to_type():
    with pytest.raises(NotImplementedError, match="no set_sync_debug_mode; type %gpuwatch on"):
        torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == 0


def test_torchs_own_stream_and_event():
    stream = torch.Stream("cuda:1")
    assert stream.device == torch.device("cuda:1")
    assert isinstance(stream, torch.Stream)
    assert isinstance(torch.accelerator.current_stream(), torch.Stream)
    event = torch.Event("cuda")
    event.record()
    event.synchronize()
    assert isinstance(event, torch.Event)
    assert isinstance(torch.Stream("cpu"), torch.Stream)


def test_marks_for_a_profiler_do_nothing():
    with torch.cuda.nvtx.range("step"):
        assert torch.ones(2, device="cuda").sum().item() == 2


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # PyTorch 2.10, of each
def test_a_profile_has_the_cpus_times_and_says_so(capfd):
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiled = profile(activities=both)
    with pytest.warns(UserWarning, match="virtual GPUs: the profile has only the CPU's times"):
        profiled.start()
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    profiled.stop()
    assert "aten::mm" in profiled.key_averages().table(sort_by="cuda_time_total")
    assert "Failed to record" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_is_refused_in_cudas_words():
    x = torch.ones(2, device="cuda")
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        for use in (torch.cuda.init, lambda: torch.ones(1, device="cuda"), lambda: x + 1):
            try:
                use()
            except RuntimeError as error:
                os.write(write, f"{error}\n".encode())
        torch.manual_seed(1)  # as each worker of a DataLoader does
        os.write(write, str(torch.ones(2).sum().item()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        *refused, works = told.read().splitlines()
    os.waitpid(pid, 0)
    assert len(refused) == 3
    assert all(line.startswith("Cannot re-initialize CUDA in forked sub") for line in refused)
    assert works == "2.0"
    assert (x + 1).sum().item() == 4


def test_seeds_give_the_cpus_numbers(same):
    drawn = []
    for place in ("cpu", "cuda:0", "cuda:1"):
        torch.manual_seed(3)
        drawn.append(torch.randn(4, device=place))
    assert all(same(a, b) for a, b in itertools.pairwise(drawn))
    generator = torch.Generator("cuda:1").manual_seed(3)
    assert generator.device == torch.device("cuda:1")
    assert same(torch.randn(4, device="cuda:1", generator=generator), drawn[0])
    copied = copy.deepcopy(generator)
    assert copied.device == generator.device
    assert torch.equal(copied.get_state(), generator.get_state())


def test_drawing_leaves_the_cpus_stream_alone():
    before = torch.get_rng_state()
    torch.rand(3, device="cuda")
    dropped = F.dropout(torch.ones(10_000, device="cuda"), 0.3)
    assert abs((dropped == 0).float().mean().item() - 0.3) < 0.03
    assert torch.equal(before, torch.get_rng_state())


def test_random_state_is_kept_and_put_back(same):
    state = torch.cuda.get_rng_state(1)
    first = torch.rand(3, device="cuda:1")
    with torch.random.fork_rng(devices=[0, 1]):
        torch.rand(3, device="cuda:1")
    torch.cuda.set_rng_state(state, 1)
    assert same(first, torch.rand(3, device="cuda:1"))
    assert sorted(torch.randperm(10, device="cuda").tolist()) == list(range(10))


def test_pinned_memory():
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not torch.ones(4).is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(4, device="cuda").pin_memory()
    made = torch.zeros(3, pin_memory=True)
    assert made.is_pinned()
    assert torch.empty_like(made, pin_memory=True)[1:].is_pinned()
    assert not made.clone().is_pinned()
    assert made.cuda().tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_is_not_there_says_so():
    with pytest.raises(NotImplementedError, match=r"have no torch\.qint8 tensors"):
        torch.quantize_per_tensor(torch.ones(3, device="cuda"), 0.1, 0, torch.qint8)
    for kind in (torch.cuda.CUDAGraph, torch.cuda.MemPool):
        with pytest.raises(NotImplementedError, match=f"virtual GPUs have no {kind.__name__}$"):
            kind()
    with pytest.raises(NotImplementedError, match=r"virtual GPUs have no caching_allocator_alloc$"):
        torch.cuda.caching_allocator_alloc(512, stream=0)
    assert not torch.cuda.is_current_stream_capturing()
    assert not torch.cuda.graphs.is_current_stream_capturing()
    assert torch.backends.cudnn.version() is None


def test_each_has_a_context_as_a_used_gpu_has():
    # A CUDA build's own answer is an error where there is no driver.
    assert [torch._C._cuda_hasPrimaryContext(index) for index in range(2)] == [True, True]
