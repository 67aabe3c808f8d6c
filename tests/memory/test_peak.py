"""What the peak of a cell's memory was made of: `%%ongpu 1 --memory`."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz

import gpumagic
from gpumagic.memory import allocator
from gpumagic.memory.allocator import replay

TRAIN = """%%ongpu 1 --memory
for _ in range(2):
    optimizer.zero_grad()
    out = net(x)
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
"""


def block(nbytes):
    return -(-nbytes // 512) * 512


def peak(shell, cell):
    result = shell.run(cell)
    assert result.error is None, result.text
    return gpumagic.last_report().peak


@pytest.fixture
def net(ip):
    ip.run("net = nn.Sequential(nn.Linear(500, 400), nn.ReLU(), nn.Linear(400, 1))")
    ip.run("optimizer = torch.optim.Adam(net.parameters(), foreach=False)")
    ip.run("x = torch.ones(64, 500)")
    return ip


def test_a_training_loop_by_line(net):
    found = peak(net, TRAIN)
    weights = sum(block(p.nbytes) for p in net.ns["net"].parameters())
    lines = dict(found.lines)
    assert found.line.startswith("line 7: optimizer.step()")
    assert lines["before the cell"] == weights + block(net.ns["x"].nbytes)
    assert lines["line 6: loss.backward()"] == weights
    assert lines["line 7: optimizer.step()"] >= 2 * weights
    (memory,) = gpumagic.last_report().memory
    assert found.nbytes == memory.peak == sum(lines.values())
    assert found.complete


def test_the_peak_is_that_of_the_report_also_where_blocks_are_larger_than_their_tensors(ip):
    ip.run("W = torch.ones(2000, 2000)")
    found = peak(ip, "%%ongpu 1 --memory\nz = torch.zeros(1000, 1000)\nz = (W @ W).relu().sum()")
    (memory,) = gpumagic.last_report().memory
    assert found.nbytes == memory.peak == sum(dict(found.lines).values())
    assert found.lines[-1][0] == "rounding up by the allocator"


def test_an_operators_temporary_memory_is_its_lines(ip):
    ip.run("x = torch.randn(1024, 784)")
    for line in ("y = x.sum(0)", "y = x.sort(0).values", "y = x[x > 0]"):
        found = peak(ip, f"%%ongpu 1 --memory\n{line}")
        (memory,) = gpumagic.last_report().memory
        assert found.nbytes == memory.peak == sum(dict(found.lines).values())
        assert found.line == f"line 2: {line}"
        assert found.complete


def test_blocks_much_larger_than_their_tensors_are_no_missing_events(ip):
    ip.run("def fill(n): return [torch.zeros(n, device='cuda:1') for _ in range(20)]")
    ip.run("odd = fill(2**19)\ndel odd[::2]")
    found = peak(ip, "%%ongpu 1 --memory\neven = fill(300_000)")
    (memory,) = gpumagic.last_report().memory
    assert found.nbytes == memory.peak == sum(dict(found.lines).values())
    assert dict(found.lines)["rounding up by the allocator"] > 0.05 * memory.peak
    assert found.complete


def test_a_cell_that_runs_again_is_named_itself(net):
    net.run(TRAIN)
    assert peak(net, TRAIN).line.startswith("line 7: optimizer.step()")


def test_it_is_shown_below_the_report(net):
    text = net.run(TRAIN).text
    assert "the peak of cuda:1, " in text
    assert "at line 7: `optimizer.step()`" in text
    assert "before the cell" in text
    html = gpumagic.last_report()._repr_html_()
    assert "by line" in html
    assert "line 6: loss.backward()" in html


def test_it_says_what_recording_cost(net):
    net.run(TRAIN)
    report = gpumagic.last_report()
    assert "Reading the record added " in repr(report.peak)
    assert 0 < report.peak.added_seconds < report.seconds


def test_a_peak_before_the_cell_is_said(ip):
    ip.run("x = torch.ones(2**20, device='cuda:1')")
    said = "the peak of cuda:1, 4.0 MiB, was before the cell"
    for cell in ("n = 1", "del x\ny = torch.ones(3)"):
        assert said in repr(peak(ip, f"%%ongpu 1 --memory\n{cell}"))


def test_the_snapshot_is_for_torchs_viewer(net, tmp_path):
    file = tmp_path / "peak.pickle"
    net.run(TRAIN.replace("--memory", f"--memory --save {file}"))
    saved = pickle.loads(file.read_bytes())
    told = _memory_viz.trace(saved)
    assert f"{len(saved['device_traces'][1])} entries" in told
    assert "snapshot.pickle" in _memory_viz.trace_plot(saved)
    assert saved["device_traces"][1][-1]["user_metadata"].startswith("In [")


def test_all_is_put_back_also_where_the_cell_fails(net):
    run = torch.autograd.graph._engine_run_backward
    for cell in (TRAIN, "%%ongpu 1 --memory\nnet(x).sum().backward()\n1 / 0"):
        net.run(cell)
        assert torch.autograd.graph._engine_run_backward is run
        assert torch.autograd._engine_run_backward is run
        assert not torch._C._cuda_isHistoryEnabled()
    assert gpumagic.last_report().peak.nbytes


def test_an_error_within_a_backward_pass_has_no_frame_of_ours(net):
    result = net.run("%%ongpu 1 --memory\nnet(x).backward()")
    assert "grad can be implicitly created only for scalar outputs" in result.text
    assert "memory/allocator" not in result.text
    result = net.run("%%ongpu 1 --memory\ny = net(x).sum()\ny.backward()\ny.backward()")
    assert "Trying to backward through the graph a second time" in result.text
    assert "memory/allocator" not in result.text


def test_what_the_user_records_is_read_and_left(net):
    torch.cuda.memory._record_memory_history(max_entries=50_000)
    net.run("kept = zeros(100, device='cuda:1')")
    found = peak(net, TRAIN)
    assert found.nbytes == gpumagic.last_report().memory[0].peak
    assert torch._C._cuda_isHistoryEnabled()
    trace = torch.cuda.memory._snapshot()["device_traces"][1]
    assert any(e["addr"] == net.ns["kept"].data_ptr() for e in trace if e["action"] == "alloc")


def test_a_record_that_the_user_began_long_before_is_complete(ip, monkeypatch):
    monkeypatch.setattr(allocator, "PEAK_RING", 100)
    torch.cuda.memory._record_memory_history()
    ip.run("for _ in range(99):\n    x = zeros(3, device='cuda:1')")
    assert peak(ip, "%%ongpu 1 --memory\ny = zeros(3)").complete


def test_a_ring_that_is_too_short_is_said(net):
    torch.cuda.memory._record_memory_history(max_entries=20)
    found = peak(net, TRAIN)
    assert not found.complete
    assert "lacks some events" in repr(found)
    (memory,) = gpumagic.last_report().memory
    assert found.nbytes == memory.peak == sum(nbytes for _, nbytes in found.lines)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%%ongpu cpu --memory", "--memory needs a CUDA GPU, and cpu is not one"),
        ("%%ongpu 1 --memory --save /no/such/folder/x", "there is no folder /no/such/folder"),
        ("%%ongpu 1 --save x", "--save needs --memory; type --memory --save"),
        (
            "%%ongpu 1 --dry-run --memory",
            "--dry-run and --memory do not combine; leave out one of them",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(ip, line, said):
    ip.run("x = torch.ones(3)")
    result = ip.run(f"{line}\nran = x + 1")
    assert said in result.text
    assert result.text.count("\n") == 1
    assert "ran" not in ip.ns
    assert ip.ns["x"].device.type == "cpu"


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5000)), max_size=60)


@given(STEPS, st.integers(0, 4))
def test_a_replay_against_a_table(steps, held):
    """Each address is taken if it is free, and given back if it is not."""
    before = [{"address": n, "size": 512 * (n + 1)} for n in range(held)]
    live = {b["address"]: b["size"] for b in before}
    most, trace = dict(live), []
    for time, (address, size) in enumerate(steps):
        if address in live:
            action, size = "free_completed", live.pop(address)
        else:
            action, live[address] = "alloc", block(size)
        trace.append({"action": action, "addr": address, "size": size, "time_us": time})
        if sum(live.values()) > sum(most.values()):
            most = dict(live)
    found, left = replay(before, trace, lambda entry: f"line {entry['addr']}", "cuda:0")
    assert found.nbytes == sum(most.values()) == sum(nbytes for _, nbytes in found.lines)
    made = {f"line {address}": n for address, n in most.items()}
    assert all(nbytes <= made.get(line, 0) for line, nbytes in found.lines if "line" in line)
    assert live == {address: nbytes for address, (nbytes, _) in left.items()}
