"""`%%ongpu 1 --profile`: planted bottlenecks, torch's own sums, files, interrupts and errors."""

import json
import sys
from collections import Counter

import pytest
import torch
from torch.autograd import profiler

import gpumagic
from gpumagic import faults
from gpumagic.ledger.entry import Ledger
from gpumagic.profiling.read_trace import read_trace

LOADER = """%%ongpu 1 --profile
for batch in torch.utils.data.DataLoader(Slow(), batch_size=4):
    out = net(batch)
"""
LOOP = """%%ongpu 1 --profile
total = 0
for n in range(200_000):
    total += n * n
out = net(x)
"""
ITEM = """%%ongpu 1 --profile
total = 0.0
for n in range(60):
    total += net(x).sum().item()
"""
COPIES = """%%ongpu 1 --profile --no-move
for n in range(60):
    there = x.to("cuda:1")
    there = there + 1
"""
TINY = """%%ongpu 1 --profile
y = torch.zeros(4)
for n in range(2000):
    y = y + 1
"""
PLANTED = [
    (LOADER, "loader", 2, "the loader takes "),
    (LOOP, "python", 4, "Python takes "),
    (ITEM, "wait", 4, ": 60 waits at line 4"),
    (COPIES, "copy", 3, ": 60 copies at line 3"),
    (TINY, "launch", 4, "launching operators takes "),
]


@pytest.fixture
def cells(ip):
    ip.run(
        "import torch, time\nfrom torch import nn\nnet = nn.Linear(50, 5)\nx = torch.ones(8, 50)"
    )
    ip.run(
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 12\n"
        "    def __getitem__(self, n):\n"
        "        sum(range(400_000))\n"
        "        return torch.ones(50)"
    )
    ip.run("warm = net(x)")
    yield ip
    assert sys.gettrace() is None
    assert not torch._C._autograd._profiler_enabled()


def profiled(shell, cell):
    result = shell.run(cell)
    assert result.error is None, result.text
    return gpumagic.last_report().profile


def test_a_cell_without_code_has_a_profile_without_lines(cells):
    assert not profiled(cells, "%%ongpu 1 --profile\n# nothing").lines
    assert "asked" not in repr(gpumagic.last_report())


@pytest.mark.parametrize(("cell", "kind", "line", "words"), PLANTED, ids=[p[1] for p in PLANTED])
def test_a_planted_bottleneck_is_the_first_cause(cells, cell, kind, line, words):
    found = profiled(cells, cell)
    assert (found.causes[0].kind, found.causes[0].where.line) in (
        *((kind, line),),
        *((kind, line - 1),) * (kind == "python"),  # both lines of a loop are the loop
    )
    shown = " ".join(repr(gpumagic.last_report()).split())
    assert words in shown
    assert shown.count("GPU busy N/A of") == 1
    assert found.virtual == ("virtual GPUs have no time of their own" in shown)
    assert found.virtual != ("torch's profiler reports no events of cuda:1" in shown)
    assert (found.busy, {each.device for each in found.lines}) == (None, {None})


@pytest.mark.parametrize("device", ["cpu", "1"])
def test_sums_are_those_of_torchs_own_table(cells, monkeypatch, device):
    made = []

    class Kept(profiler.profile):
        def __init__(self, *args, **options):
            made.append(self)
            super().__init__(*args, **options)

    monkeypatch.setattr(profiler, "profile", Kept)
    found = profiled(
        cells,
        f"%%ongpu {device} --profile\nfor n in range(3):\n    loss = net(x).square().sum()\n"
        "    loss.backward()\n",
    )
    calls, seconds = Counter(), Counter()
    for operator in (o for line in found.lines for o in line.operators):
        calls[operator.name] += operator.calls
        seconds[operator.name] += operator.host
    theirs, expected = Counter(), Counter()
    for row in made[0].key_averages():  # one for each overload
        if "gpumagic" not in row.key:
            theirs[row.key] += row.count
            expected[row.key] += row.self_cpu_time_total / 1e6
    assert calls == theirs
    assert dict(seconds) == pytest.approx(expected, abs=2e-6)
    by_line = {line.where.line: {o.name for o in line.operators} for line in found.lines}
    assert "aten::addmm" in by_line[3]
    assert "AddmmBackward0" not in by_line[3]
    assert "autograd::engine::evaluate_function: AddmmBackward0" in by_line[4]


def test_a_line_of_a_function_has_what_it_calls(cells):
    cells.run("def step(x):\n    y = x @ x.T\n    return y.relu()")
    found = profiled(cells, "%%ongpu 1 --profile\nfor n in range(5): step(x)")
    at = {(e.where.function, e.where.line): e for e in found.lines}
    assert "aten::relu" in {o.name for o in at["step", 3].operators}
    assert {o.name: o.calls for o in at["step", 2].operators}["aten::matmul"] == 5
    assert sum(e.host for e in found.lines) <= found.seconds * 1.2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")
def test_a_comprehension_is_of_its_function(cells):
    cells.run(
        "def mean(rows):\n    return sum([r.sum() for r in rows]) / sum(len(r) for r in rows)"
    )
    found = profiled(cells, "%%ongpu 1 --profile\nmean(x)")
    inside = [each for each in found.lines if each.where.line == 2 and each.where.label != "In [7]"]
    assert [each.where.function for each in inside if each.where.function] == ["mean"]
    assert len({(e.where.label, e.where.line) for e in found.lines}) == len(found.lines)


@pytest.mark.parametrize("code", ["y = 1", "\n# nothing here\ny = sum(range(9_000))"])
def test_no_time_is_of_the_line_of_ongpu(cells, code):
    line = 1 + len(code.splitlines())
    found = profiled(cells, f"%%ongpu cpu --profile\n{code}")
    assert [each.where.line for each in found.lines] == [line]
    assert {cause.where.line for cause in found.causes} <= {line}
    assert 0 <= found.lines[0].host <= found.seconds


def test_the_trace_is_kept_with_the_lines_and_can_be_read_again(cells, tmp_path):
    path = tmp_path / "trace.json"
    found = profiled(cells, ITEM.replace("--profile", f"--profile {path}"))
    assert found.saved == str(path)
    assert f"the trace is in {path}" in " ".join(repr(found).split())
    trace = json.loads(path.read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"line 4: total += net(x).sum().item()", "aten::addmm"} <= names
    again = read_trace(trace, Ledger())
    assert [line._replace(copies=0, waits=0) for line in found.lines] == list(again.lines)


def test_a_trace_that_cannot_be_saved_does_not_cost_the_profile(cells, tmp_path):
    found = profiled(cells, f"%%ongpu 1 --profile {tmp_path}/{'x' * 300}.json\ny = net(x)")
    assert found.lines
    assert found.saved == ""
    assert "saving the trace of a profile: OSError" in str(*faults.all_kept())


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
def test_a_cell_that_does_not_end_well_keeps_its_traceback_and_gets_its_table(cells, error):
    result = cells.run(f"%%ongpu 1 --profile\ny = net(x)\nraise {error}('stop')\n")
    assert error in result.text
    assert "profiling" not in result.text
    report = gpumagic.last_report()
    assert report.error == error
    assert "aten::addmm" in repr(report.profile)
    assert profiled(cells, "%%ongpu 1 --profile\ny = net(x)").lines  # and the next one works


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1 --profile none/t.json", "--profile: there is no folder "),
        ("1 --profile --memory", "--memory and --profile do not combine; leave out one"),
        ("1 --profile --dry-run", "--dry-run and --profile do not combine; leave out one"),
        ("0,1 --split x --profile", "--profile is for one device"),
    ],
)
def test_what_cannot_be_profiled_is_said_in_one_line(cells, line, words):
    result = cells.run(f"%%ongpu {line}\nran = net(x)")
    assert words in result.text
    assert "ran" not in cells.ns


def test_another_profiler_or_a_debugger_goes_first(cells):
    with profiler.profile(use_kineto=True):
        assert "a profiler of torch is already" in cells.run("%%ongpu 1 --profile\nx + 1").text
    sys.settrace(lambda *_: None)
    try:
        assert "a debugger or coverage" in cells.run("%%ongpu 1 --profile\nx + 1").text
    finally:
        sys.settrace(None)


def test_the_value_of_a_cell_and_its_output_are_as_without(cells):
    code = "import asyncio\nawait asyncio.sleep(0)\nprint('seen')\nnet(x).shape[0]"
    result = cells.run(f"%%ongpu 1 --profile\n{code}")
    assert "seen" in result.text
    assert result.result == 8
    found = gpumagic.last_report().profile
    assert {3, 4, 5} <= {line.where.line for line in found.lines}


def test_a_cell_that_awaits_is_at_that_line_meanwhile(cells):
    cells.run("import asyncio")
    found = profiled(cells, "%%ongpu 1 --profile\nawait asyncio.sleep(0.1)\nnet(x)")
    (waited,) = (line for line in found.lines if line.where.line == 2)
    assert waited.host >= 0.1
    assert found.added < 0.1
