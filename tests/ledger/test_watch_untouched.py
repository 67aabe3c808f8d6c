"""With the ledger on nothing else changes, and what fails in it is not the user's."""

import gc
import pickle

import pytest
import torch
from watched import matrix

from gpumagic import faults, virtual
from gpumagic.frameworks.watching import watch
from gpumagic.ledger import attribute, dispatch

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


def test_kernels_are_registered_once_and_everything_is_put_back():
    dispatch.uninstall()  # what an earlier test has left on a GPU that stays
    before = registry()
    with watch():
        during = registry()
    assert during != before
    for _ in range(3):
        with watch():
            assert registry() == during
    with pytest.raises(ZeroDivisionError), watch():
        1 / 0  # noqa: B018
    with pytest.raises(KeyboardInterrupt), watch(), watch():
        raise KeyboardInterrupt
    assert registry() == during
    assert attribute.running == ()
    assert attribute.current.get() is None
    for _ in range(2):
        dispatch.uninstall()
        gc.collect()
        assert registry() == before


def test_while_nothing_watches_calls_are_passed_on():
    x = matrix()

    def use():
        y = x.clone()
        y[y > 3] = 0.5
        y[0] = torch.ones(4)
        return [y.cpu(), y.sum().item(), y.nonzero().cpu(), y.unique().cpu(), y.tolist(), repr(y)]

    bare = use()
    with watch() as w:
        pass
    passed = use()
    assert len(w.ledger) == 0
    assert str(bare) == str(passed)


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


@pytest.mark.parametrize("broken", ["locate", "watches", "in_cell"])
def test_a_failure_of_ours_is_not_the_users(monkeypatch, broken):
    def fail(*args):
        raise MemoryError

    x = matrix()
    faults.forget()
    with watch(), watch():
        place = attribute.entry if broken == "locate" else attribute
        monkeypatch.setattr(place, broken, fail)
        exec("y = x.cpu(); z = x.sum().item(); x[torch.tensor([0])]", {"x": x, "torch": torch})
    fault, *_ = faults.all_kept()
    assert "gpumagic failed while counting a copy or a wait: MemoryError" in str(fault)
    faults.forget()


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
