"""What torch tells of the allocator's history on a virtual GPU, read by torch's own readers."""

import gc
import pickle
import sys
from inspect import signature

import pytest
import torch
from torch.cuda import _memory_viz, memory

from gpumagic import virtual
from gpumagic.device.caching_allocator import in_blocks


def blocks(device=1):
    """The blocks in use, by their addresses."""
    return {
        block["address"]: block
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if segment["device"] == device and block["state"] == "active_allocated"
    }


def block_of(tensor):
    return blocks(tensor.get_device())[tensor.untyped_storage().data_ptr()]


def line_of(tensor):
    (frame,) = block_of(tensor)["frames"]
    return frame["name"], frame["line"]


def here():
    return sys._getframe(1).f_lineno


def trace(device=1):
    return memory._snapshot()["device_traces"][device]


@pytest.fixture
def recorded(gpus):
    memory._record_memory_history(max_entries=1000)
    yield
    memory._record_memory_history(None)


def test_each_storage_is_a_block_at_its_own_address(gpus):
    kept = [torch.ones(n, device="cuda:1") for n in (1, 100, 2**20)]
    kept += [kept[1].view(10, 10)[2:], torch.eye(3, device="cuda:1").to_sparse()]
    kept[-1] = kept[-1]._values()
    found = blocks()
    assert {t.untyped_storage().data_ptr() for t in kept} <= set(found)
    assert block_of(kept[1])["requested_size"] == 400
    assert block_of(kept[1])["size"] == 512
    assert blocks(0) == {}


def test_segments_add_up_to_what_torch_counts(gpus):
    kept = [torch.ones(n, device="cuda:1") for n in (1, 5000, 2**20)]
    del kept[1]
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == 1]
    assert sum(s["allocated_size"] for s in segments) == torch.cuda.memory_allocated(1)
    assert sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved(1)
    for segment in segments:
        assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
    if "include_traces" in signature(torch.cuda.memory_snapshot).parameters:  # newer than 2.10
        assert torch.cuda.memory_snapshot(include_traces=False) == torch.cuda.memory_snapshot()


def test_the_line_of_every_allocation_is_known_unasked(gpus):
    def doubled(x):
        return x + x

    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()).to("cuda:1")
    out, at = net(torch.ones(2, 3, device="cuda:1")), here()
    assert line_of(out) == ("test_the_line_of_every_allocation_is_known_unasked", at)
    assert line_of(net[0].weight)[1] == at - 1
    out.sum().backward()
    assert line_of(net[0].weight.grad)[1] == here() - 1
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.step()
    assert line_of(optimizer.state[net[0].weight]["exp_avg"])[1] == here() - 1
    assert line_of(doubled(out))[0] == "doubled"
    parts = torch.ones(4, 2, device="cuda:1").topk(2)
    assert [line_of(part)[1] for part in parts] == [here() - 1] * 2


def test_a_line_keeps_no_frame_alive(gpus):
    def make():
        big = torch.ones(2**20, device="cuda:1")
        return big[:1] + 1

    kept = make()
    gc.disable()
    try:
        assert torch.cuda.memory_allocated(1) == 512
    finally:
        gc.enable()
    assert line_of(kept)[0] == "make"


def test_torchs_own_readers_understand_it(recorded, tmp_path):
    kept = torch.ones(2**20, device="cuda:1")
    for _ in range(3):
        kept * 2
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, device="cuda:1")
    memory._dump_snapshot(tmp_path / "peak.pickle")
    saved = pickle.loads((tmp_path / "peak.pickle").read_bytes())
    assert saved.keys() == memory._snapshot().keys()

    told = _memory_viz.trace(saved)
    assert told.count("# free completed for") == 3
    assert "raise OutOfMemoryError # 4.0TiB requested, 2.0GiB free in CUDA" in told
    assert "total_reserved: 20.0MiB\ntotal_allocated: 4.0MiB" in _memory_viz.segsum(saved)
    flame = _memory_viz.memory(saved, format_flamegraph=lambda lines: lines)
    assert "test_memory_history.py" in flame.splitlines()[0]
    assert flame.splitlines()[0].endswith(f" {kept.nbytes}")
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(saved)
    left = _memory_viz.filter_alloc_free_pairs(saved)["device_traces"][1]
    assert [e["size"] for e in left if e["action"] == "alloc"] == [kept.nbytes]


def test_the_trace_gives_the_same_peak_as_the_counter(recorded):
    net = torch.nn.Linear(1000, 1000).to("cuda:1")
    x = torch.ones(8, 1000, device="cuda:1")
    torch.cuda.reset_peak_memory_stats(1)
    memory._record_memory_history(max_entries=1000, clear_history=True)
    now = peak = torch.cuda.memory_allocated(1)
    net(x).relu().sum().backward()
    for entry in trace():
        step = {"alloc": 1, "free_completed": -1}.get(entry["action"], 0)
        now += step * in_blocks(entry["size"])
        peak = max(peak, now)
    assert peak == torch.cuda.max_memory_allocated(1)
    assert now == torch.cuda.memory_allocated(1)


def test_the_ring_is_bounded(gpus):
    memory._record_memory_history(max_entries=7)
    for _ in range(20):
        kept = torch.ones(3, device="cuda:1")
    assert len(trace()) == 7
    taken = [event for event in trace() if event["action"] == "alloc"]
    assert taken[-1]["frames"] == block_of(kept)["frames"] != []
    memory._record_memory_history("state")
    assert torch._C._cuda_isHistoryEnabled()
    assert len(trace()) == 1
    memory._record_memory_history(None)
    assert not torch._C._cuda_isHistoryEnabled()
    assert trace() == []


def test_metadata_is_kept_with_each_allocation(recorded):
    memory._set_memory_metadata("In [3]")
    kept = torch.ones(5, device="cuda:1")
    memory._set_memory_metadata("In [4]")
    other = torch.ones(3, device="cuda:1")
    assert memory._get_memory_metadata() == "In [4]"
    assert block_of(kept)["user_metadata"] == "In [3]"
    texts = {e["size"]: e["user_metadata"] for e in trace() if e["action"] == "alloc"}
    assert texts == {kept.nbytes: "In [3]", other.nbytes: "In [4]"}


def test_observers_are_called_when_memory_runs_out(gpus):
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *told: seen.append(told))
    kept = torch.empty(2**20, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**31, dtype=torch.uint8, device="cuda:1")
    assert seen == [(1, 2**31, 2**31, 2**31 - 2 * len(kept))]


def test_nothing_of_it_stays(runtime):
    names = [name for name in dir(torch._C) if "emory" in name]
    before = {name: getattr(torch._C, name) for name in names}
    virtual.enable(2, 2**31)
    memory._record_memory_history()
    memory._set_memory_metadata("In [3]")
    torch._C._cuda_attach_out_of_memory_observer(print)
    virtual.disable()
    assert {name: getattr(torch._C, name) for name in dir(torch._C) if "emory" in name} == before
    virtual.enable(2, 2**31)
    try:
        assert memory._get_memory_metadata() == ""
        assert not torch._C._cuda_isHistoryEnabled()
        assert "large_pool" not in torch.cuda.memory_summary(1, abbreviated=True)
    finally:
        virtual.disable()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2**40, dtype=torch.uint8, device="cuda:0"),
        lambda: torch.zeros(2**20, 2**18, device="cuda:0"),
        lambda: torch.ones(2**18, 1, device="cuda:0") @ torch.ones(1, 2**19, device="cuda:0"),
    ],
)
def test_more_than_the_host_has_is_out_of_memory_in_cudas_words(runtime, make):
    virtual.enable(1, 2**40)
    try:
        with pytest.raises(
            torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried.* Virtual GPUs use host"
        ):
            make()
    finally:
        virtual.disable()


def test_a_limit_is_checked_before_memory_is_taken(gpus, monkeypatch):
    made = []
    monkeypatch.setattr(torch.Tensor, "untyped_storage", lambda self: made.append(self))
    for make in (torch.empty, torch.zeros, torch.randn):
        with pytest.raises(torch.OutOfMemoryError):
            make(2**30, device="cuda:1")
    assert made == []


def test_a_containers_limit_is_the_hosts(gpus, monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("100000000\n")
    (tmp_path / "memory.current").write_text("90000000\n")
    monkeypatch.setenv("GPUMAGIC_CGROUP", str(tmp_path))
    torch.ones(3, device="cuda:1")
    with pytest.raises(torch.OutOfMemoryError, match="Virtual GPUs use host memory: "):
        torch.empty(2**27, dtype=torch.uint8, device="cuda:1")
