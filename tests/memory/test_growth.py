"""A cell that leaves more each time it runs is told, once, by name and with the remedy."""

import re

import pytest

from gpumagic.memory import memory_changes
from gpumagic.memory.memory_report import MemoryReport
from gpumagic.usercode.files import last_cell


def runs(ip, cell, times=6):
    """What each run of a cell says."""
    return [ip.run(cell).text for _ in range(times)]


def told(ip, cell, times=6):
    """What the only run says that says anything of growth."""
    (text,) = [text for text in runs(ip, cell, times) if "grows" in text]
    return text


@pytest.fixture
def net(ip):
    ip.run("net = nn.Linear(1000, 300).to('cuda:1')\nx = torch.ones(64, 1000, device='cuda:1')")
    return ip


def test_a_list_of_losses_with_their_graphs(net):
    net.run("losses = []")
    text = told(net, "hidden = net(x * 2)\nloss = hidden.square().mean()\nlosses.append(loss)")
    assert text.startswith("→ `losses` grows by ")
    assert re.search(r"a run with its graph, made in In \[\d+\], line 1; `\.detach\(\)` of", text)


def test_a_sum_of_losses_with_their_graphs(net):
    net.run("total = 0")
    text = told(net, "total += net(x * 2).square().mean()")
    assert "`total` grows by " in text
    assert re.search(r"a run with its graph, made in In \[\d+\], line 1", text)


def test_outputs_keep_graphs(net):
    text = told(net, "net(x * 2).square().mean()")
    assert "`Out` grows by" in text
    assert "end that line with a semicolon" in text
    assert not any("grows" in t for t in runs(net, "net(x * 3).square().mean();"))


def test_tensors_without_a_graph(ip):
    ip.run("kept = {}")
    text = told(ip, "y = zeros(2**20, device='cuda:1')\nkept[len(kept)] = y")
    made = re.sub(r"In \[\d+\]", "In [n]", text)
    assert made == (
        "→ `kept` grows by 4.0 MiB a run, made in In [n], line 1; `del kept` gives it back, "
        "`.cpu()` of a tensor keeps it elsewhere\n"
    )


def test_what_a_function_keeps_is_told_by_the_line_that_made_it(ip):
    ip.run("cache = []\ndef step():\n    cache.append(zeros(2**20, device='cuda:1'))")
    where = last_cell()
    assert f"`cache` grows by 4.0 MiB a run, made in {where}, line 3;" in told(ip, "step()")


def test_a_name_is_told_once(ip):
    ip.run("kept = []")
    told(ip, "kept.append(zeros(2**20, device='cuda:1'))")
    assert not any("grows" in t for t in runs(ip, "kept += [zeros(2**20, device='cuda:1')]"))


def test_what_is_made_anew_or_is_small_does_not_grow(ip):
    ip.run("kept, small = [], []")
    for cell in (
        "x = zeros(2**20, device='cuda:1')",
        "small.append(zeros(3, device='cuda:1'))",
        "kept = kept[-1:] + [zeros(2**20, device='cuda:1')]",
    ):
        assert not any("grows" in text for text in runs(ip, cell))


def test_a_cell_that_fails_is_not_looked_at(ip):
    ip.run("kept = []")
    cell = "kept.append(zeros(2**20, device='cuda:1'))\n1 / 0"
    assert not any("grows" in text for text in runs(ip, cell))


def test_nothing_is_looked_up_before_it_has_grown_twice(ip, monkeypatch):
    looked = []
    monkeypatch.setattr(memory_changes, "memory", lambda: looked.append(1) or MemoryReport(()))
    ip.run("x = zeros(2**20, device='cuda:1')\nkept = []")
    runs(ip, "y = x + 1")
    runs(ip, "kept.append(x + 1)", times=2)
    assert looked == []
    runs(ip, "kept.append(x + 1)", times=5)
    assert len(looked) == 2
