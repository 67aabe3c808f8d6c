"""What one name holds, opened: a module by layer, anything else by item."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gpumagic
from gpumagic.device.caching_allocator import BLOCK
from gpumagic.errors import GpuError
from gpumagic.memory.memory_tree import tree

COLUMNS = ["parameter", "gradient", "optimizer state"]


@pytest.fixture
def trained(gpus):
    """A net of two layers that are alike and one that is not, after a step of Adam."""
    net = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
    net.to("cuda:1")
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(4, 128, device="cuda:1")).sum().backward()
    optimizer.step()
    return {"net": net, "optimizer": optimizer}


def rows(found):
    return {branch.path: branch for branch in found.branches}


def test_a_module_is_opened_layer_by_layer(trained):
    found = rows(tree("net", trained))
    weights = 128 * 128 * 4 + BLOCK
    one, last = found["net[0]"], found["net[3]"]
    assert (one.depth, one.alike, last.alike) == (1, 2, 1)
    assert [one.nbytes[kind] for kind in COLUMNS] == [2 * weights, 2 * weights, 4 * weights]
    assert [last.nbytes[kind] for kind in COLUMNS] == [4608, 4608, 9216]
    whole = found["net"].nbytes
    assert list(found) == ["net", "net[0]", "net[3]"]
    assert sum(whole.values()) == torch.cuda.memory_allocated(1) == found["net"].total


def test_in_an_object_that_has_both_gradients_and_state_stand_with_the_layer(trained):
    net, optimizer = trained["net"], trained["optimizer"]
    found = rows(
        tree(
            "t",
            {
                "t": SimpleNamespace(
                    opt=optimizer, net=net, last=net(torch.ones(4, 128, device="cuda:1")).sum()
                )
            },
        )
    )
    weights = 128 * 128 * 4 + BLOCK
    one = found["t.net[0]"]
    assert [one.nbytes[kind] for kind in COLUMNS] == [2 * weights, 2 * weights, 4 * weights]
    assert [path for path in found if path.startswith("t.opt")] == []
    assert found["t.net"].total == rows(tree("net", trained))["net"].total


def test_a_modules_buffers_are_told_apart(gpus):
    found = tree("norm", {"norm": nn.BatchNorm1d(1000).cuda()})
    assert found.branches[0].nbytes == {"parameter": 2 * 4096, "buffer": 2 * 4096 + BLOCK}
    assert len(found.branches) == 1


def test_as_text_and_html(trained):
    found = tree("net", trained)
    head, others, columns, whole, *below = str(found).splitlines()
    assert others.strip() == "· also held by optimizer"
    assert (
        head.partition(" · made in")[0]
        == "net: 267 KiB on cuda:1 · optimizers hold 267 KiB more for it"
    )
    assert columns.split() == ["parameters", "gradients", "optimizer", "together"]
    assert whole.split()[0] == "net"
    assert [line.split("  ")[2].strip() for line in below] == ["[0] and 1 alike", "[3]"]
    html = found._repr_html_()
    assert "[0] and 1 alike" in html


def test_what_is_no_module_is_opened_item_by_item(gpus):
    held = {"data": {"x": torch.zeros(1000, device="cuda"), "more": []}}
    held["data"]["more"] = [torch.zeros(2000, device="cuda") for _ in range(30)]
    found = tree("data", held)
    paths = [(b.path, b.depth, b.alike) for b in found.branches]
    assert paths[0] == ("data", 0, 1)
    assert ("data['x']", 1, 1) in paths
    assert any(depth == 2 and alike == 30 for _, depth, alike in paths)
    within = tree("data['x']", held)
    assert [(b.path, b.nbytes) for b in within.branches] == [("data['x']", {"tensor": 4096})]


@pytest.mark.parametrize("name", ["x[0]", "data['x'][0]", 'data["x"]', "saved", "_5"])
def test_what_is_made_anew_or_lies_in_an_error_is_found_by_its_memory(ip, name):
    ip.run("data = {'x': torch.zeros(4, 1000, device='cuda')}; x = data['x']; saved = ValueError()")
    ip.run("def f(own=x): raise KeyError\ntry: f()\nexcept KeyError as e: saved.__cause__ = e")
    ip.run("_5 = [x]")
    found = tree(name, ip.ns)
    assert found.branches[0].total == 16384  # 4 rows of 4,000 B, in blocks of 512


def test_what_is_long_is_folded(gpus):
    held = {"many": [torch.zeros(200 * n, device="cuda") for n in range(1, 60)]}
    found = tree("many", held)
    assert len(found.branches) == 60
    assert "and 20 more" in str(found)
    assert "all 60 rows" in found._repr_html_()
    assert "[0]" in found._repr_html_().partition("all 60 rows")[2]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "nothing holds nothing on a GPU"),
        ("x.y", "x.y raises AttributeError"),
        ("print(x)", "is neither a variable nor a part of one"),
        ("x[", "is neither a variable nor a part of one"),
    ],
)
def test_what_cannot_be_opened_is_one_line(gpus, name, said):
    with pytest.raises(GpuError, match=said) as raised:
        tree(name, {"nothing": [1], "x": torch.zeros(3, device="cuda")})
    assert "\n" not in str(raised.value)


def test_of_a_loss_each_operation_has_what_it_saved(gpus):
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    names = {"net": net, "loss": net(torch.ones(512, 64, device="cuda")).sum()}
    of_loss, of_net = tree("loss", names), tree("net", names)
    saved = of_loss.branches[0].nbytes["saved for backward"]
    assert saved >= 512 * 64 * 4
    assert any("AddmmBackward0" in branch.path for branch in of_loss.branches)
    assert of_net.held_for_it == {"saved for backward": saved}
    assert "autograd holds" in str(of_net)


def test_what_the_graph_of_an_output_saved_stands_with_its_layer(ip):
    ip.run("import torch; from torch import nn")
    ip.run("net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()")
    ip.run("Out[2] = net(torch.ones(512, 64, device='cuda'))")
    found = tree("net", ip.ns)
    assert found.held_for_it == {"saved for backward": 2 * 512 * 64 * 4}
    assert [(b.path, b.alike) for b in found.branches] == [("net", 1), ("net[0]", 2)]
    assert {kind for b in found.branches for kind in b.nbytes} == {"parameter", *found.held_for_it}


def test_outputs_that_are_variables_too_are_found(ip):
    ip.run("x = torch.ones(2**20, device='cuda')")
    ip.run("x")
    assert "[3]" in str(tree("Out", ip.ns))
    for name in ("Out", "_3"):
        (row,) = gpumagic.memory(name, 0).holders
        assert (row.path, row.nbytes) == (name, 2**22)
        assert "x" in row.aliases


def test_two_levels_are_shown_and_a_name_opens_more(gpus):
    def block():
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU()))

    names = {"net": nn.Sequential(block(), nn.Linear(8, 2)).cuda()}
    found = tree("net", names)
    assert max(branch.depth for branch in found.branches) == 3
    *_, below, last = str(found).splitlines()
    assert below.split()[0] == "[1]"
    assert last == "  %gpumem net[0][1] shows more"
    assert "all 6 rows" in found._repr_html_()
    assert "shows more" not in str(tree("net[0]", names))
