"""Traces as a GPU's: the first cause is the planted one, and sums are those of the events."""

import json
from pathlib import Path

import pytest
from recorded import RecordedCell

from gpumagic.ledger.entry import Ledger
from gpumagic.profiling.read_trace import read_trace

RECORDED = Path(__file__).parents[1] / "data" / "kineto_item.json"


def item(steps=40):
    """Without the wait, the host would launch the small kernels while the large one runs."""
    cell = RecordedCell()
    for _ in range(steps):
        cell.at(2, "for x in batches:").python(2)
        cell.at(3, "loss = net(x)")
        for _ in range(9):
            cell.operator("aten::relu", kernel=4.0, host=14.0)
        cell.operator("aten::mm", kernel=90.0, host=14.0)
        cell.at(4, "total += loss.item()").item()
    return cell


def loader():
    cell = RecordedCell()
    for _ in range(20):
        cell.at(2, "for x in loader:").load(900)
        cell.at(3, "net(x)").operator("aten::mm", kernel=300.0)
    return cell


def tiny_kernels():
    cell = RecordedCell()
    for _ in range(400):
        cell.at(2, "for n in range(400):").python(1)
        cell.at(3, "x = x * 1.01").operator("aten::mul", kernel=2.0)
    return cell


def copies():
    cell = RecordedCell()
    for _ in range(20):
        cell.at(2, "for x in batches:").python(3)
        cell.at(3, "x = x.to('cuda')").copy(800)
        cell.at(4, "net(x)").operator("aten::mm", kernel=200.0)
    return cell


def python_loop():
    cell = RecordedCell()
    for _ in range(20):
        cell.at(2, "words = [f(w) for w in text]").python(1500)
        cell.at(3, "net(x)").operator("aten::mm", kernel=300.0)
        cell.at(4, "losses.append(loss.item())").item()
    return cell


def full_queue():
    cell = RecordedCell()
    for _ in range(100):
        cell.at(3, "x = net(x)").operator("aten::mm", kernel=500.0)
    return cell


PLANTED = [
    (
        item,
        "wait",
        4,
        "the host waits at line 4 (`total += loss.item()`), which leaves the GPU idle for 3.2 ms",
    ),
    (loader, "loader", 2, "the loader leaves the GPU idle for 12 ms at line 2 (`for x in loader"),
    (tiny_kernels, "launch", 3, "launching operators leaves the GPU idle for "),
    (copies, "copy", 3, "copies leave the GPU idle for 16 ms, most at line 3"),
    (python_loop, "python", 2, "Python leaves the GPU idle for 30 ms, most at line 2"),
]


@pytest.fixture(autouse=True)
def _lines_of_this_cell(monkeypatch):
    monkeypatch.setattr("gpumagic.usercode.files.last_cell", lambda: "cell.py")


@pytest.mark.parametrize(("cell", "kind", "line", "words"), PLANTED, ids=lambda v: str(v)[:20])
def test_a_planted_bottleneck_is_the_first_cause(cell, kind, line, words):
    profile = read_trace(cell().trace(), Ledger())
    assert (profile.causes[0].kind, profile.causes[0].where.line) == (kind, line)
    assert words in " ".join(repr(profile).split())
    assert sum(c.seconds for c in profile.causes) + profile.busy == pytest.approx(
        profile.seconds, rel=0.02
    )


def test_a_busy_device_is_named_with_its_line():
    profile = read_trace(full_queue().trace(), Ledger())
    assert profile.busy == pytest.approx(0.05)
    assert profile.seconds == pytest.approx(0.05, rel=0.01)  # until the queue was empty
    words = " ".join(repr(profile).split())
    assert words.startswith("GPU busy 100 % of 50 ms: line 3 (`x = net(x)`) takes 50 ms of GPU")


def test_a_recorded_trace():
    """A step of `.item()`, as a file of torch's."""
    profile = read_trace(json.loads(RECORDED.read_text()), Ledger())
    by_line = {line.where.line: line for line in profile.lines}
    assert {n: line.launches for n, line in by_line.items()} == {2: 0, 3: 20, 4: 0}
    by_name = {o.name: (o.calls, o.host, o.device) for o in by_line[3].operators}
    assert by_name == {
        "aten::mm": (2, pytest.approx(2 * 8e-6), pytest.approx(2 * 90e-6)),
        "aten::relu": (18, pytest.approx(18 * 8e-6), pytest.approx(18 * 4e-6)),
        "cudaLaunchKernel": (20, pytest.approx(20 * 6e-6), 0.0),
    }
    assert by_line[3].device == pytest.approx(2 * 90e-6 + 18 * 4e-6)
    assert by_line[3].host == pytest.approx(20 * 14e-6)
    assert profile.causes[0].kind == "wait"


def test_work_of_autograds_thread_belongs_to_the_line_that_waits_for_it():
    cell = RecordedCell()
    cell.at(5, "loss.backward()").python(10)
    start, cell.now = cell.now, cell.now + 5
    cell.operator("aten::mm", kernel=50.0)
    for event in cell.events[-3:-1]:
        event["tid"] = 200
    cell.python(100)
    profile = read_trace(cell.trace(), Ledger())
    (line,) = profile.lines
    assert start
    assert (line.where.line, line.launches, line.device) == (5, 1, pytest.approx(50e-6))


def test_another_device_of_the_trace_is_not_this_ones_work():
    cell = loader()
    for event in cell.events:
        if "device" in event["args"]:
            event["args"]["device"] = 1
    profile = read_trace(cell.trace(), Ledger())
    assert profile.busy == 0
    assert sum(line.device for line in profile.lines) == pytest.approx(20 * 300e-6)


def test_a_gpu_that_had_nothing_to_do_was_not_busy():
    profile = read_trace(RecordedCell().at(2, "x = 1").python(1000).trace(), Ledger())
    assert profile.busy == 0
    assert "GPU busy 0 % of 1.0 ms: Python leaves the GPU idle for 1.0 ms" in repr(profile)


def test_without_events_of_the_device_its_time_is_unknown():
    events = loader().trace()["traceEvents"]
    events = [e for e in events if e["cat"] not in ("cuda_runtime", "kernel")]
    profile = read_trace({"traceEvents": events}, Ledger())
    assert profile.busy is None
    assert {(line.device, line.launches) for line in profile.lines} == {(None, None)}
    assert "torch's profiler reports no events of cuda:0" in repr(profile)
    assert "GPU busy N/A of 18 ms: the loader takes 18 ms" in repr(profile)


def test_html_has_the_sentence_and_the_operators_of_a_line():
    html = read_trace(python_loop().trace(), Ledger())._repr_html_()
    assert "<details><summary>net(x)</summary>" in html
    assert "<code>words = [f(w) for w in text]</code>" in html


def test_a_cell_that_no_sample_hits_has_its_line():
    cell = RecordedCell().at(2, "y = 1").python(0.5).trace()
    (whole,) = (event for event in cell["traceEvents"] if event["cat"] == "user_cell")
    whole["ts"] -= 9_000
    whole["dur"] += 20_000
    found = read_trace(cell, Ledger())
    assert (found.causes, found.seconds) == ((), pytest.approx(0.5e-6, abs=1e-9))
    assert "y = 1" in found._repr_html_()
