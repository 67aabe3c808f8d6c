"""The ledger: what is counted, and what is not."""

import copy

import pytest
import torch
from torch import nn
from watched import direction, matrix, seen

pytestmark = pytest.mark.usefixtures("gpus")


COPIES = [
    (lambda x: x.cpu(), ("device_to_host", 48, False)),
    (lambda x: x.to("cpu", torch.float64), ("device_to_host", 48, False)),
    (lambda x: x[:, ::2].cpu(), ("device_to_host", 24, False)),
    (lambda x: x.T.to("cpu", torch.float64), ("device_to_host", 48, False)),
    (lambda x: torch.ones(4, 3).T.cuda(), ("host_to_device", 48, False)),
    (lambda x: torch.ones(3).to("cuda:1", torch.float64), ("host_to_device", 24, False)),
    (lambda x: x.to("cuda:0", torch.float16), ("device_to_device", 24, False)),
    (lambda x: x.to("cuda:0"), ("device_to_device", 48, False)),
    (lambda x: torch.ones(3).cuda(), ("host_to_device", 12, False)),
    (lambda x: torch.ones(4).to(x.device, non_blocking=True), ("host_to_device", 16, False)),
    (lambda x: torch.tensor([1.0, 2.0], device="cuda"), ("host_to_device", 8, False)),
    (lambda x: x.copy_(torch.ones(3, 4)), ("host_to_device", 48, False)),
    (lambda x: x.numpy(force=True), ("device_to_host", 48, False)),
    (lambda x: x.tolist(), ("device_to_host", 48, True)),
    (lambda x: x[torch.tensor([0, 1])], ("host_to_device", 16, True)),
    (lambda x: x[:, torch.tensor([2])], ("host_to_device", 8, True)),
    (lambda x: x.__setitem__(0, torch.ones(4)), ("host_to_device", 16, True)),
    (lambda x: nn.Linear(2, 1).cuda().weight, ("host_to_device", 12, False)),
    (lambda x: copy.deepcopy(x.cpu()), ("device_to_host", 48, False)),
    (lambda x: x.type(torch.FloatTensor), ("device_to_host", 48, False)),
]


@pytest.mark.parametrize(("do", "expected"), COPIES)
def test_copies(do, expected):
    x = matrix()
    ledger = seen(lambda: do(x))
    directions = {direction(e) for e in ledger}
    assert (directions, ledger.nbytes, any(e.implicit for e in ledger)) == (
        {expected[0]},
        *expected[1:],
    )
    assert ledger.waits == 0
    assert {e.code for e in ledger} != {""}
    assert not any("_ops" in e.within for e in ledger)


def test_a_copy_of_nothing_is_none():
    assert len(seen(lambda: torch.zeros(0).to("cuda"))) == 0


WAITS = [
    (lambda x: x.sum().item(), "item", 1),
    (lambda x: float(x[0, 0]), "item", 1),
    (lambda x: bool(x[0, 0] > 1), "item", 1),
    (lambda x: int(x[0, 0]), "item", 1),
    (lambda x: range(x[0, 1].long()), "item", 1),
    (lambda x: f"{x[0, 0]:.2f}", "item", 1),
    (lambda x: 1 if x[0, 0] else 2, "item", 1),
    (lambda x: torch.allclose(x, x), "item", 1),
    (lambda x: torch.equal(x, x.clone()), "equal", 1),
    (lambda x: 1.0 in x, "item", 1),
    (lambda x: x.nonzero(), "nonzero", 1),
    (lambda x: torch.where(x > 1), "nonzero", 1),
    (lambda x: x[x > 1], "nonzero", 1),
    (lambda x: x.index_put_((x > 1,), x.new_ones(10)), "nonzero", 1),
    (lambda x: x.index_put((x > 1,), x.new_ones(10)), "nonzero", 1),
    (lambda x: torch.masked_select(x, x > 1), "masked_select", 1),
    (lambda x: x.unique(), "_unique2", 1),
    (lambda x: x.long().flatten().bincount(), "bincount", 2),
    (lambda x: torch.repeat_interleave(x.long().flatten()), "repeat_interleave", 2),
    (lambda x: torch.histc(x), "histc", 2),
    (lambda x: torch.zeros(2).fill_(x[0, 0]), "item", 1),
    (lambda x: [v.item() for v in x.flatten()], "item", 12),
]


@pytest.mark.parametrize(("do", "operator", "count"), WAITS)
def test_waits(do, operator, count):
    x = matrix()
    ledger = seen(lambda: do(x))
    (entry,) = ledger.entries
    assert (entry.operator, entry.count, entry.implicit) == (operator, count, True)
    assert (ledger.waits, ledger.transfers) == (count, 0)


def test_printing_is_one_thing_however_many_waits_it_makes(capsys):
    x = matrix()

    def show():
        print(x)
        print(f"{x} and {x!r}")

    ledger = seen(show)
    assert {e.via for e in ledger} == {"print"}
    assert sum(e.calls for e in ledger if e.code == "print(x)") == 1
    assert ledger.waits > 20


def test_every_printing_in_a_loop_is_counted_once(capsys):
    x = matrix()
    # More than the interpreter needs to take another instruction for the same call.
    ledger = seen(lambda: [print(x) for _ in range(40)])
    assert sum(e.calls for e in ledger) == 40


def test_what_is_no_transfer_is_not_counted():
    x, one = matrix(), torch.tensor(2.0)

    def compute():
        y = (x * one + 3) @ x.T  # a zero-dimensional CPU tensor may mix
        y = y.half().float().clone().contiguous()[1:, ::2]
        y[0] = 0
        y = torch.where(y > 1, y, 0).to("cuda:1")
        y.repeat_interleave(y.new_ones(2).long(), dim=0, output_size=2)
        y[y > 1] = 0.5  # one number by a mask is `masked_fill_`
        torch.equal(y, y), torch.equal(y, x), torch.histc(y, 5, 0, 1)
        return y.sum(), y.shape, torch.zeros(2, device="cuda"), torch.ones(3).double().clone()

    assert len(seen(compute)) == 0


def test_pinned_and_blocking():
    x = torch.ones(8).pin_memory()

    def bring():
        x.to("cuda:0", non_blocking=True)
        x.to("cuda:0")
        torch.ones(2).to("cuda:0")

    entries = sorted(seen(bring), key=lambda e: e.line)
    assert [(e.pinned, e.blocking) for e in entries] == [(True, 0), (True, 1), (False, 1)]


def test_the_same_tensor_again():
    x = torch.ones(8)

    def bring():
        for _ in range(200):
            x.to("cuda:0")
        for _ in range(5):
            x.add_(1).to("cuda:0")

    again, changed = sorted(seen(bring), key=lambda e: e.line)
    assert (again.count, changed.repeats) == (200, 0)
    assert again.repeats == 199
