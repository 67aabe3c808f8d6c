"""What stands in front of a real GPU's kernels, tried on the CPU's: there is no real GPU here."""

import time
from contextlib import ExitStack

import pytest
import torch

from gpumagic import faults
from gpumagic.ledger import attribute, copy_kernels, dispatch
from gpumagic.ledger.copy_kernels import crossing
from gpumagic.ledger.entry import Tally


@pytest.fixture
def counting():
    target = attribute.ActiveWatch(Tally())
    token = attribute.current.set(target)
    attribute.running = (target,)
    yield target.tally
    attribute.running = ()
    attribute.current.reset(token)


@pytest.mark.parametrize("replaced", [True, False])  # torch before 2.9 cannot call those
def test_operators_at_a_device_s_own_key_give_the_same(counting, monkeypatch, replaced):
    if not replaced:
        monkeypatch.setattr(dispatch, "_CAN_CALL_REPLACED", False)

    def compute():
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        y = (x.double() * 2.0).clone().t().contiguous().float()
        y = torch.where(y == float("inf"), 1.0, y)
        y.square().mean().backward()
        z = x.detach().clone()
        z[z > 0] = 3.0
        z[0, 0] = 5
        values = [z.sum().item(), z.nonzero(), z[z > 1], torch.equal(z, z), z.unique(), repr(z)]
        return [x.grad, y.detach(), z, *values]

    bare = compute()
    before = torch._C._dispatch_dump("aten::copy_"), set(torch.library._impls)
    placed = dispatch.Hooks("CPU")
    try:
        found = compute()
    finally:
        placed.remove()
    assert (torch._C._dispatch_dump("aten::copy_"), set(torch.library._impls)) == before
    for a, b in zip(bare, found, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    entries = counting.ledger().entries
    assert all(e.kind == "wait" for e in entries)
    assert {"item", "nonzero"} <= {e.operator for e in entries}


class Side:
    """A tensor as `copy_`'s kernel sees it."""

    is_pinned = staticmethod(lambda: False)
    is_inference = staticmethod(lambda: False)
    _version = 0
    dtype = torch.float32

    def __init__(self, device, nbytes=8):
        self.device, self.nbytes = torch.device(device), nbytes

    def get_device(self):
        return -1 if self.device.type == "cpu" else self.device.index

    def numel(self):
        return self.nbytes


def test_a_copy_by_way_of_a_temporary_counts_once(counting, monkeypatch):
    monkeypatch.setattr(copy_kernels, "as_tensor", lambda value: value)
    monkeypatch.setattr(copy_kernels.TIMER, "begin", lambda count, index: None)
    sides = Side("cuda:0", 32), Side("cpu", 16)

    def base(target, source):
        return copy(Side("cuda:0", 32), Side("cpu", 32)) if source is sides[1] else target

    copy = copy_kernels.copying(base, virtual=False)
    copy(*sides)
    copy(Side("cuda:0", 0), Side("cpu", 0))
    (entry,) = counting.ledger().entries
    assert (entry.count, entry.nbytes, entry.blocking, entry.pinned) == (1, 32, 1, False)


def test_copies_on_a_mac_take_the_time_of_their_calls(counting, monkeypatch):
    monkeypatch.setattr(copy_kernels, "as_tensor", lambda value: value)
    monkeypatch.setattr(attribute, "gpu", "mps")
    copy = copy_kernels.copying(lambda target, source: time.sleep(0.01), virtual=False)
    copy(Side("mps:0"), Side("cpu"))
    (entry,) = counting.ledger().entries
    assert (entry.destination, entry.seconds >= 0.01) == ("mps:0", True)
    assert faults.all_kept() == []


def test_no_copy_is_timed_while_its_stream_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert copy_kernels.TIMER.begin(0, torch.device("cuda:0")) is None


def test_what_an_operator_s_own_code_reads_is_counted_under_its_name(counting):
    read = copy_kernels.counted(lambda x: 3, copy_kernels.reading)
    twice = copy_kernels.naming(lambda x: [*map(read, (x, x))], "bincount")
    known = copy_kernels.naming(lambda x: True, "equal")
    by_item = copy_kernels.sizing(read, "_unique2")
    itself = copy_kernels.sizing(lambda x: x, "nonzero")
    x = torch.ones(1)
    for operator in (twice, known, by_item, itself, read):
        operator(x)
    assert [(e.operator, e.count, e.calls, e.nbytes) for e in counting.ledger()] == [
        ("bincount", 2, 1, 8),
        ("_unique2", 1, 1, 4),
        ("nonzero", 1, 1, 4),
        ("item", 1, 1, 4),
    ]


def test_a_number_is_read_as_torch_reads_it():
    copies = []

    def copy(host, element):
        copies.append(host)
        return host.copy_(element)

    for value in (True, 7, 2.5, 1 + 2j):
        assert copy_kernels.read_by(copy, torch.tensor([[value]])) == value
    assert len(copies) == 4


@pytest.mark.usefixtures("gpus")
def test_a_copy_of_another_dtype_crosses_in_the_one_that_torch_converts_to_first():
    cpu, gpu, other = (torch.ones(2, 3, device=d) for d in ("cpu", "cuda:0", "cuda:1"))
    wide = {t.device: t.double() for t in (cpu, gpu, other)}
    assert crossing(wide[gpu.device], cpu, False) == 48  # the host converts
    assert crossing(wide[gpu.device], cpu, True) == 24
    assert crossing(wide[cpu.device], gpu, False) == 24
    assert crossing(wide[cpu.device], gpu, True) == 48
    assert crossing(wide[other.device], gpu, False) == 48
    assert crossing(gpu, torch.ones(3), False) == 24  # broadcast by the host


def test_synchronizing_is_counted_and_is_explicit(counting, monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: done.append(device))
    real = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    patches = ExitStack()
    dispatch.patch_synchronizing(patches)
    monkeypatch.setattr(torch.cuda._utils, "_get_device_index", lambda device, optional: 1)
    torch.cuda.synchronize("cuda:1")
    patches.close()
    assert torch.cuda.synchronize is real
    assert done == ["cuda:1"]
    (entry,) = counting.ledger()
    assert (entry.operator, entry.source, entry.implicit) == ("synchronize", "cuda:1", False)
    assert entry.code == 'torch.cuda.synchronize("cuda:1")'
