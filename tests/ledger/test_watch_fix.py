"""`--fix`: operands on several devices are brought together, and the ledger says so."""

import pytest
import torch
from torch import nn

from gpumagic import ImplicitCopyError, watch
from gpumagic.cell.autofix import AutoFix

pytestmark = pytest.mark.usefixtures("gpus")


@pytest.fixture
def fix():
    made = AutoFix(torch.device("cuda:1"))
    made.start()
    yield made
    made.stop()
    assert torch._C._len_torch_function_stack() == 0


def test_all_are_copied_to_the_device_of_the_cell_for_the_call(fix):
    big, small = torch.ones(100, 100), torch.ones(100, device="cuda:0")
    with watch(warn=False) as watched:
        for _ in range(3):
            result = big * small
    assert result.device.index == 1
    assert (big.device.type, small.device.index) == ("cpu", 0)
    found = {(e.source, e.destination, e.count, e.nbytes, e.implicit) for e in watched.ledger}
    assert found == {
        ("cpu", "cuda:1", 3, 120_000, True),
        ("cuda:0", "cuda:1", 3, 1200, True),
    }


def test_what_is_written_to_decides(fix):
    rows, x = torch.zeros(4, 2, device="cuda:0"), torch.ones(2, device="cuda:1")
    rows[1:2].add_(x)
    assert rows.device.index == 0
    assert rows.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


def test_a_call_that_writes_to_several_tensors(fix):
    kept, new = [torch.zeros(2), torch.zeros(3)], [torch.ones(n, device="cuda:0") for n in (2, 3)]
    torch._foreach_add_(kept, new)
    assert [x.tolist() for x in kept] == [[1, 1], [1, 1, 1]]
    apart = [torch.zeros(2), torch.zeros(2, device="cuda:0")]
    with pytest.raises(RuntimeError, match="same device"):
        torch._foreach_add_(apart, new[:1] * 2)
    assert [x.tolist() for x in apart] == [[0, 0], [0, 0]]


def test_what_autograd_tracks_is_copied_for_the_call(fix):
    w = torch.ones(3, requires_grad=True)
    x = torch.ones(3, 3, device="cuda:0")
    tracked = w * 2
    loss = (x @ tracked).sum()
    assert tracked.device.type == "cpu"
    loss.backward()
    assert torch.equal(w.grad, torch.full((3,), 6.0))


def test_a_module_on_the_other_side(fix):
    net, x = nn.Sequential(nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1)), torch.ones(2, 50)
    net.to("cuda:0")
    loss = nn.functional.mse_loss(net(x), torch.zeros(2, 1))
    loss.backward()
    assert loss.device.index == 1
    assert {p.grad.device.index for p in net.parameters()} == {0}


def test_indices_convolutions_and_in_place(fix):
    x, index = torch.arange(100.0), torch.tensor([1], device="cuda:0")
    assert x[index].item() == 1.0
    image, kernel = torch.ones(1, 1, 9, 9, device="cuda:1"), torch.ones(1, 1, 3, 3)
    assert nn.functional.conv2d(image, kernel).device.index == 1
    view = torch.zeros(4, device="cuda:0")[:2]
    view += torch.ones(2)
    assert view.tolist() == [1.0, 1.0]


def test_other_errors_are_left_alone(fix):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(2, device="cuda:1") + torch.ones(3)


def test_modes_entered_since_survive():
    fix = AutoFix(torch.device("cuda:1"))
    fix.start()
    with torch.device("cuda:1"):
        fix.stop()
        fix.stop()
        assert torch.zeros(1).device.index == 1
    assert torch._C._len_torch_function_stack() == 0


def test_an_out_that_cannot_move_decides_and_is_written(fix):
    rows, x, y = torch.zeros(2, 2), torch.ones(2), torch.ones(2, device="cuda:1")
    torch.add(x, y, out=rows[0])
    assert rows.tolist() == [[2, 2], [0, 0]]
    torch.index_put_(input=rows[1], indices=(torch.tensor([0]),), values=torch.ones(1).cuda(1))
    assert rows.tolist() == [[2, 2], [1, 0]]


def test_what_the_user_reads_meanwhile_is_the_users_own(fix):
    x = torch.ones(3, device="cuda:1")
    with watch(warn=False) as watched:
        x.sum().item()
        str(x)
        x + torch.ones(3, device="cuda:0")
    ways = {(e.operator, e.via, e.implicit) for e in watched.ledger}
    assert {("item", "", True), ("copy_", "", True)} <= ways
    assert {via for _, via, _ in ways} == {"", "print"}


def test_strict_holds_beside_it(fix):
    x = torch.ones(3, device="cuda:1")
    with pytest.raises(ImplicitCopyError), watch(strict=True):
        x.sum().item()


def test_what_a_layer_updates_is_updated(fix):
    torch.manual_seed(0)
    x, ids = torch.rand(8, 3), torch.tensor([1, 2], device="cuda:1")
    norm, table = nn.BatchNorm1d(3), nn.Embedding(5, 3, max_norm=0.1)
    expected = nn.BatchNorm1d(3)
    expected(x)
    norm, table = norm.to("cuda:0"), table.to("cuda:0")
    norm(x.cuda(1))
    table(ids)
    torch.testing.assert_close(norm.running_var.cpu(), expected.running_var)
    assert table.weight.norm(dim=1)[1:3].tolist() == pytest.approx([0.1, 0.1])


@torch.inference_mode()
def test_in_inference_mode_too(fix):
    result = torch.ones(2, device="cuda:0") + torch.ones(2)
    assert result.tolist() == [2, 2]
