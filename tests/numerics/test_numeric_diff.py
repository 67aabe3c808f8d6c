"""`gpumagic.diff` as a library: what it takes, what it keeps, and its bounds."""

import json
import warnings

import pytest
import torch
from torch import nn

import gpumagic
from gpumagic import faults
from gpumagic.display.table import JSON
from gpumagic.numerics import numeric_diff, recorded_run

pytestmark = pytest.mark.usefixtures("gpus")
x = torch.arange(12.0).reshape(3, 4) + 1
net = nn.Linear(4, 2)


def wrong():
    h = x * 2
    return h.log() if h.is_cuda else h.log1p()


def right():
    return net(x).tanh()


def test_a_function_and_its_globals():
    found = gpumagic.diff(wrong, "cpu", 1)
    assert "`h.log()` (aten.log)" in found.first.where
    assert found.sides == ("cpu", "cuda:1")
    assert found.first.inputs == 0
    assert gpumagic.diff(right).sides == ("cpu", "cuda:0")
    assert gpumagic.diff(right, torch.float32, "float64").agree
    assert gpumagic.diff("torch.ones(3) * 2", "cpu", 1, namespace={"torch": torch}).agree
    with pytest.raises(gpumagic.GpuError, match="code or a function is needed, not int"):
        gpumagic.diff(3)


def test_the_display_is_text_html_and_json():
    found = gpumagic.diff(wrong, "cpu", 1)
    told = found._repr_mimebundle_()[JSON]
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["found"][0]["line"] == found.first.line
    assert repr(found).splitlines()[0] == f"cpu and cuda:1 differ at {found.first.where}"
    assert '"gm-answer gm-bad"' in found._repr_html_()
    assert '"gm-answer"' in gpumagic.diff(right)._repr_html_()


def test_without_room_it_says_how_much_was_not_compared(monkeypatch):
    monkeypatch.setattr(recorded_run, "_MOST", 30)
    found = gpumagic.diff(right, "cpu", 1)
    assert "results beyond 512 MiB are not compared" in found.notes
    assert "1 of 2 operations compared, on copies" in found.notes
    assert not faults.unreported


def test_variables_are_compared_however_many_operations_follow_a_mismatch(monkeypatch):
    monkeypatch.setattr(numeric_diff, "_ALIGNED", 3)

    def parted():
        h = x.half() if x.is_cuda else x
        for _ in range(5):
            h = h * 2
        return h.float() + x.is_cuda

    found = gpumagic.diff(parted, "cpu", 1)
    assert not found.agree
    assert found.first.largest == 1


@pytest.fixture
def replaced():
    """A function that replaces a kernel of GPUs."""
    library = torch.library.Library("aten", "IMPL")

    def replace(name, kernel):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(name, kernel, "CUDA", allow_override=True)

    yield replace
    library._destroy()


def test_an_operator_that_is_wrong_on_one_device(replaced):
    replaced("tanh", lambda tensor: (tensor.cpu().tanh() * 1.5).to(tensor.device))
    found = gpumagic.diff(right, "cpu", 1)
    assert "`net(x).tanh()` (aten.tanh)" in found.first.where
    assert not found.first.why


def test_the_order_of_equal_numbers_is_a_choice(replaced):
    def backward_sort(tensor, *options):
        values, places = tensor.cpu().flip(0).sort(stable=True)
        return values.to(tensor.device), (len(places) - 1 - places).to(tensor.device)

    replaced("sort", backward_sort)
    found = gpumagic.diff("torch.ones(4).sort()", "cpu", 1, namespace={"torch": torch})
    assert found.agree
    assert found.first.choice
    assert found.first.values == (0, 3)


def train(scale=1):
    net(x).sum().backward()
    if x.is_cuda:
        net.weight.grad.mul_(scale)


@pytest.fixture
def ungraded():
    """Gives `net` a gradient, which it has no more after the test."""
    net.weight.grad = torch.ones(2, 4)
    yield
    net.zero_grad()


def test_what_functions_change_in_place_is_compared(ungraded):
    found = gpumagic.diff("train(2)", "cpu", 1, namespace=globals())
    assert "`net.weight.grad.mul_(scale)` (aten.mul_.Tensor)" in found.first.where
    assert found.first.variable == "net.weight.grad"
    assert "different operations, not compared: nothing on cpu, aten.mul_" in found.first.why
    assert gpumagic.diff("train()", "cpu", 1, namespace=globals()).agree


def test_the_notes_say_what_ran_on_one_side_only():
    notes = gpumagic.diff(train, "cpu", 1).notes
    assert "some operations ran on one side only, the first at" in notes[-1]
    assert "`net.weight.grad.mul_(scale)` (aten.mul_.Tensor)" in notes[-1]
    assert "one side" not in gpumagic.diff(right, "cpu", 1).notes[-1]


def test_a_tensor_that_only_one_side_has_or_changes_is_named(ungraded):
    found = gpumagic.diff("if x.is_cuda: net.zero_grad()\ny = x + 1", namespace=globals())
    assert found.first.variable == "net.weight.grad"
    assert "net.weight.grad, shapes: (2, 4) on cpu, None on cuda:0" in repr(found)
    found = gpumagic.diff("if x.is_cuda: x.add_(1)\ny = 1", namespace=globals())
    assert found.first.variable == "x"
    assert "1 on cpu, 2 on cuda:0" in repr(found)


def test_another_alias_on_each_side_is_no_difference():
    code = "both = {'a': x, 'b': x.clone() if x.is_cuda else x}\nby = {each: each for each in [x]}"
    assert gpumagic.diff(code, namespace=globals()).agree


def test_torch_and_memory_are_as_before():
    allocated = torch.cuda.memory_allocated(1)
    net.weight.grad = torch.ones(2, 4)
    gpumagic.diff("net(x).sum().backward()", "cpu", 1, namespace=globals())
    assert torch.equal(net.weight.grad, torch.ones(2, 4))
    assert torch.cuda.memory_allocated(1) == allocated
    net.weight.grad = None


def test_an_overflow_has_no_difference_and_rounding_of_a_zero_gradient_is_not_shown():
    v = torch.tensor([1.0, 12.0, 20.0])
    found = gpumagic.diff(lambda: v.exp(), torch.float32, torch.float16)
    assert "a value that is not finite: 162755 on float32, inf on float16 at [1]" in repr(found)
    layers = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    rows = torch.randn(64, 20)
    found = gpumagic.diff(lambda: layers(rows).square().mean().backward(), torch.float32, "float64")
    assert found.agree
    assert 0 < found.largest < 1e-4


def test_small_numbers_that_cancel_have_a_note_and_are_blamed_for_what_follows():
    small = torch.linspace(1, 2, 9) * 1e-4
    found = gpumagic.diff(lambda: 1 - small.cos(), torch.float32, torch.float64)
    assert found.agree
    assert any("counts as a rounding error of small numbers" in note for note in found.notes)
    found = gpumagic.diff(lambda: (1 - small.cos()).sqrt(), torch.float32, torch.float64)
    assert "aten.rsub" in found.first.where
    assert found.first.why == "cancellation: only rounding errors are left"
