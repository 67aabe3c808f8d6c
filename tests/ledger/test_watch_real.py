"""What stands in front of a real GPU's kernels, tried on the CPU's: there is no real GPU here."""

import threading
from contextlib import ExitStack

import pytest
import torch

from gpumagic.ledger import attribute, copy_kernels, dispatch, synchronize
from gpumagic.ledger.counts import Tally


@pytest.fixture
def counting():
    target = attribute.ActiveWatch(Tally())
    token = attribute.current.set(target)
    attribute.running = (target,)
    yield target.tally
    attribute.running = ()
    attribute.current.reset(token)


def test_operators_at_a_device_s_own_key_give_the_same(counting, monkeypatch):
    monkeypatch.setattr(dispatch, "register_above", lambda *args: None)

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
    if dispatch._CAN_CALL_REPLACED:
        assert {"item", "nonzero"} <= {e.operator for e in entries}


class Side:
    """A tensor as `copy_`'s kernel sees it."""

    is_pinned = staticmethod(lambda: False)
    is_inference = staticmethod(lambda: False)
    _version = 0

    def __init__(self, device, nbytes=8):
        self.device, self.nbytes = torch.device(device), nbytes

    def get_device(self):
        return -1 if self.device.type == "cpu" else self.device.index

    def numel(self):
        return self.nbytes


def test_a_copy_by_way_of_a_temporary_counts_once(counting, monkeypatch):
    monkeypatch.setattr(copy_kernels, "_PLAIN", {Side})
    monkeypatch.setattr(copy_kernels.TIMER, "wants", lambda count: False)
    sides = Side("cuda:0", 32), Side("cpu", 16)

    def base(target, source):
        return copy(Side("cuda:0", 32), Side("cpu", 32)) if source is sides[1] else target

    copy = copy_kernels.copying(base, virtual=False)
    copy(*sides)
    copy(Side("cuda:0", 0), Side("cpu", 0))
    (entry,) = counting.ledger().entries
    assert (entry.count, entry.nbytes, entry.blocking, entry.pinned) == (1, 32, 1, False)


def test_waits_within_a_wait_count_once(counting, monkeypatch):
    monkeypatch.setattr(copy_kernels, "_PLAIN", {torch.Tensor})
    inner = copy_kernels.reading(lambda x: 3)
    outer = copy_kernels.waiting(lambda x: inner(x), "bincount")
    assert outer(torch.ones(1)) == 3
    assert inner(torch.ones(1)) == 3
    assert [(e.operator, e.count) for e in counting.ledger()] == [("bincount", 1), ("item", 1)]


def test_synchronizing_is_counted_and_is_explicit(counting, monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: done.append(device))
    real = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    patches = ExitStack()
    synchronize.patch_synchronizing(patches)
    monkeypatch.setattr(torch.cuda._utils, "_get_device_index", lambda device, optional: 1)
    torch.cuda.synchronize("cuda:1")
    patches.close()
    assert torch.cuda.synchronize is real
    assert done == ["cuda:1"]
    (entry,) = counting.ledger()
    assert (entry.operator, entry.source, entry.implicit) == ("synchronize", "cuda:1", False)
    assert entry.code == 'torch.cuda.synchronize("cuda:1")'


def test_the_way_of_older_versions(counting, monkeypatch):
    monkeypatch.setattr(dispatch, "above", [])
    names = ("_local_scalar_dense", "nonzero")
    operators = {name: getattr(torch.ops.aten, name).default for name in names}
    dispatch.register_above(operators, lambda base: base, device="cpu")
    kept = list(dispatch.above)
    entered = dispatch.enter()
    x = torch.ones(3, requires_grad=True)
    try:
        value, where = (x * 2.0).sum().item(), x.nonzero()
        (x * 2).sum().backward()
    finally:
        thread = threading.Thread(target=dispatch.leave, args=(entered,))
        thread.start()  # not the thread that entered
        thread.join()
        dispatch.leave(entered)
    x.sum().item()
    for library in reversed(kept):
        library._destroy()
    assert (value, where.shape, x.grad.tolist()) == (6.0, (3, 1), [2.0] * 3)
    assert [(e.operator, e.count) for e in counting.ledger()] == [("item", 1), ("nonzero", 1)]
