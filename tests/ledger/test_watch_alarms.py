"""When a watch warns or refuses, and when it does not."""

import warnings

import pytest
import torch
from torch import nn
from watched import seen

import gpumagic
from gpumagic import CrossDeviceWarning, ImplicitCopyError, watch

pytestmark = pytest.mark.usefixtures("gpus")


def given(do, times=1, **options):
    """The warnings of one watch."""
    x = torch.arange(12.0, device="cuda:1").view(3, 4)
    with warnings.catch_warnings(record=True) as caught, watch(**options):
        warnings.simplefilter("always")
        for _ in range(times):
            do(x)
    assert all(w.category is CrossDeviceWarning for w in caught)
    return [str(w.message) for w in caught]


LEGAL = [
    lambda x: x * torch.tensor(2.0),
    lambda x: x + 1,
    lambda x: x.__setitem__((0, 0), 3.0),
    lambda x: x[0:2, 1],
    lambda x: x[torch.tensor(1)],
    lambda x: x.cpu().to("cuda:0"),
    lambda x: torch.ones(3).to(x.device),
    lambda x: torch.tensor([1.0], device="cuda"),
    lambda x: nn.Linear(3, 3).to("cuda:0"),
    lambda x: (x.detach().requires_grad_().to("cuda:0") * 2).sum().backward(),
]


@pytest.mark.parametrize("do", LEGAL)
@pytest.mark.parametrize("options", [{}, {"strict": True}])
def test_legal_mixing_gives_no_alarm(do, options):
    assert given(do, times=3, **options) == []


@pytest.mark.parametrize("do", [lambda x: x.sum().item(), lambda x: x.tolist(), repr, print])
def test_a_value_read_once_gives_none(do):
    assert given(do) == []


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda x: x.sum().item(), "read it once after the loop"),
        (lambda x: float(x[0, 0]), "read it once after the loop"),
        (lambda x: print(x), "print after the loop"),
        (lambda x: f"{x}", "print after the loop"),
        (lambda x: (x + 1).tolist(), "read it once after the loop"),
    ],
)
def test_a_value_read_in_a_loop_warns_once(do, says):
    (message,) = given(do, times=30)
    assert "again and again" in message
    assert says in message


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda x: x[torch.tensor([0])], "copies its index from cpu to cuda:1 again and again"),
        (lambda x: x[x > 1], "makes the host wait for cuda:1 again and again; the result's size"),
        (lambda x: x.nonzero(), "torch.where"),
        (lambda x: torch.tensor([x[0, 0], x[0, 1]]), "torch.stack([...])"),
    ],
)
def test_what_is_hidden_warns_once(do, says):
    (message,) = given(do, times=20)
    assert says in message
    assert given(do) == []


@pytest.mark.parametrize("do", [lambda x: x.sum().item(), print, lambda x: x[x > 1]])
def test_what_happens_once_an_epoch_does_not_warn(do):
    assert given(do, times=10) == []


def test_what_a_library_does_by_itself_is_counted_and_not_scolded():
    def train(x):
        w = torch.ones(3, device="cuda:1", requires_grad=True)
        optimizer, scaler = torch.optim.SGD([w]), torch.amp.GradScaler("cuda")
        for _ in range(20):
            scaler.scale((w * 2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            torch.distributions.Normal(w.detach(), 1.0, validate_args=True)

    assert given(train) == []
    entries = {e.within: e for e in seen(lambda: train(None)) if e.kind == "wait"}
    assert set(entries) == {"torch.amp.grad_scaler", "torch.distributions.distribution"}
    assert {e.implicit for e in entries.values()} == {True}
    with watch(strict=True), pytest.raises(ImplicitCopyError):
        train(None)


def test_a_log_that_is_copied_value_by_value_warns_in_the_end():
    assert given(lambda x: x.sum().cpu(), times=98) == []
    (message,) = given(lambda x: x.sum().cpu(), times=200)
    assert "copies data from cuda:1 to cpu again and again" in message


def test_batches_that_are_brought_explicitly_do_not():
    assert given(lambda x: torch.ones(3).to("cuda:1"), times=300) == []


def test_the_warning_is_at_the_users_line_and_can_be_filtered():
    x = torch.ones(3, device="cuda:1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch():
            for _ in range(20):
                x.sum().item()
        with watch():  # another cell, the same line
            for _ in range(20):
                x.sum().item()
    assert [w.filename for w in caught] == [__file__] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CrossDeviceWarning)
        assert seen(lambda: [x.sum().item() for _ in range(20)], warn=True).waits == 20
    with warnings.catch_warnings():
        warnings.simplefilter("error", gpumagic.CrossDeviceWarning)
        with watch() as w, pytest.raises(CrossDeviceWarning):
            [x.sum().item() for _ in range(20)]
    assert w.ledger.waits == 15


def test_nested_watches_warn_once():
    with watch():
        assert len(given(lambda x: x.sum().item(), times=20)) == 1


def test_a_warning_of_ours_that_fails_is_not_the_users(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the front end is gone")

    monkeypatch.setattr(warnings, "showwarning", fail)
    x = torch.ones(3, device="cuda:1")
    with warnings.catch_warnings(), watch() as w:
        warnings.simplefilter("always")
        assert [x.sum().item() for _ in range(20)] == [3.0] * 20
    assert w.ledger.waits in (19, 20)


IMPLICIT = [
    lambda x: x.sum().item(),
    lambda x: bool(x[0, 0]),
    lambda x: x.tolist(),
    lambda x: f"{x[0, 0]}",
    lambda x: repr(x),
    lambda x: x[x > 1],
    lambda x: x.nonzero(),
    lambda x: x[torch.tensor([0])],
    lambda x: x.__setitem__(0, torch.ones(4)),
]


@pytest.mark.parametrize("do", IMPLICIT)
def test_strict_refuses_what_is_implicit(do):
    x = torch.arange(12.0, device="cuda:1").view(3, 4)
    before = x.clone()
    with watch(strict=True) as w, pytest.raises(ImplicitCopyError, match="strict mode forbids"):
        do(x)
    assert torch.equal(x, before)
    assert len(w.ledger) == 0


def test_strict_holds_in_backward_and_in_threads():
    import concurrent.futures

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    x = torch.ones(3, device="cuda:0", requires_grad=True)
    with watch(strict=True), concurrent.futures.ThreadPoolExecutor(1) as pool:
        loss = Reads.apply(x).sum()
        with pytest.raises(ImplicitCopyError):
            loss.backward()
        with pytest.raises(ImplicitCopyError):
            pool.submit(x.sum().item).result()
