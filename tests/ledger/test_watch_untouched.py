"""With the ledger on nothing else changes, and what fails in it is not the user's."""

import gc
import pickle

import pytest
import torch
from watched import matrix

from gpumagic import virtual
from gpumagic.ledger import attribute, dispatch
from gpumagic.ledger.watch import watch

pytestmark = pytest.mark.usefixtures("gpus")


def registry():
    names = ("copy_", "_local_scalar_dense", "nonzero", "index.Tensor", "equal", "masked_select")
    return (
        [torch._C._dispatch_dump(f"aten::{name}") for name in names],
        set(torch.library._impls),
        torch._tensor_str._str,
        torch.cuda.synchronize,
        torch.cuda.Stream.synchronize,
    )


def test_everything_is_put_back():
    before = registry()
    for _ in range(3):
        with watch():
            assert registry() != before
        gc.collect()
    assert registry() == before
    with pytest.raises(ZeroDivisionError), watch():
        1 / 0  # noqa: B018
    with pytest.raises(KeyboardInterrupt), watch(), watch():
        raise KeyboardInterrupt
    assert registry() == before
    assert attribute.running == ()
    assert attribute.current.get() is None


def test_where_there_is_no_device_nothing_is_touched():
    virtual.disable()
    before = registry()
    with watch() as w:
        assert registry() == before
        torch.ones(3).sum().item()
    assert len(w.ledger) == 0


def test_virtual_gpus_that_come_and_go():
    with watch(warn=False) as outer:
        matrix().cpu()
        virtual.disable()
        virtual.enable(2, 2**30)
        with watch(warn=False) as inner:
            matrix().cpu()
    assert inner.ledger.transfers == 1
    assert outer.ledger.transfers == 2
    assert not dispatch.installed()


@pytest.mark.parametrize("broken", ["locate", "targets", "_new"])
def test_a_failure_of_ours_is_not_the_users(monkeypatch, broken):
    def fail(*args):
        raise MemoryError

    x = matrix()
    with watch(), watch():
        monkeypatch.setattr(attribute, broken, fail)
        exec("y = x.cpu(); z = x.sum().item(); x[torch.tensor([0])]", {"x": x, "torch": torch})
    monkeypatch.undo()
    assert not dispatch.installed()


def test_errors_of_the_operators_are_torchs_own():
    x = matrix()
    for do in (
        lambda: x.copy_(torch.ones(7)),
        lambda: x.item(),
        lambda: x[torch.tensor([9])],
        lambda: torch.masked_select(x, torch.ones(7, dtype=torch.bool, device="cuda:1")),
        lambda: x + torch.ones(3, 4),
    ):
        with pytest.raises((RuntimeError, IndexError)) as bare:
            do()
        with watch(warn=False) as w, pytest.raises((RuntimeError, IndexError)) as watched:
            do()
        assert (type(bare.value), str(bare.value)) == (type(watched.value), str(watched.value))
        assert len(w.ledger) == 0


def test_the_users_own_overrides_are_not_asked():
    asked = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            asked.append(func.__name__ if hasattr(func, "__name__") else str(func))
            return func(*args, **kwargs or {})

    x = matrix()

    def use():
        asked.clear()
        with Mode():
            x.cpu()
            x.sum().item()
        return list(asked)

    bare = use()
    with watch(warn=False):
        assert use() == bare


def test_pickles_hold_nothing_of_ours():
    x = matrix()
    with watch(warn=False):
        again = pickle.loads(pickle.dumps(x))
    assert torch.equal(again, x)
