"""The ledger: what is counted, where, and that nothing else changes."""

import asyncio
import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn
from watched import seen

from gpumagic import virtual
from gpumagic.tensors.watching import hooks, observe
from gpumagic.tensors.watching.watch import watch

pytestmark = pytest.mark.usefixtures("gpus")


def matrix():
    return torch.arange(12.0, device="cuda:1").view(3, 4)


# ---------------------------------------------------------------- what is counted
COPIES = [
    (lambda x: x.cpu(), ("device_to_host", 48, False)),
    (lambda x: x.to("cpu", torch.float64), ("device_to_host", 48, False)),
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
    directions = {e.direction for e in ledger}
    assert (directions, ledger.nbytes, any(e.implicit for e in ledger)) == (
        {expected[0]},
        *expected[1:],
    )
    assert ledger.waits == 0
    assert {e.code for e in ledger} != {""}


WAITS = [
    (lambda x: x.sum().item(), "item", 1),
    (lambda x: float(x[0, 0]), "item", 1),
    (lambda x: bool(x[0, 0] > 1), "item", 1),
    (lambda x: int(x[0, 0]), "item", 1),
    (lambda x: range(x[0, 1].long()), "item", 1),
    (lambda x: f"{x[0, 0]:.2f}", "item", 1),
    (lambda x: 1 if x[0, 0] else 2, "item", 1),
    (lambda x: torch.allclose(x, x), "item", 1),
    (lambda x: torch.equal(x, x), "equal", 1),
    (lambda x: 1.0 in x, "item", 1),
    (lambda x: x.nonzero(), "nonzero", 1),
    (lambda x: torch.where(x > 1), "nonzero", 1),
    (lambda x: x[x > 1], "index", 1),
    (lambda x: x.index_put_((x > 1,), x.new_ones(10)), "_index_put_impl_", 1),
    (lambda x: torch.masked_select(x, x > 1), "masked_select", 1),
    (lambda x: x.unique(), "_unique2", 1),
    (lambda x: x.long().flatten().bincount(), "bincount", 1),
    (lambda x: torch.repeat_interleave(x.long().flatten()), "repeat_interleave", 1),
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
    assert 100 < again.repeats < 200


# ---------------------------------------------------------------- where
def test_the_line_is_the_users_through_library_frames():
    net = nn.Linear(4, 4)

    def bring():
        net.to("cuda:0")

    ledger = seen(bring)
    (entry,) = ledger.entries
    assert (entry.code, entry.count, entry.nbytes) == ('net.to("cuda:0")', 2, 80)
    assert entry.file == "test_watch.py"
    assert entry.line == bring.__code__.co_firstlineno + 1


def test_an_expression_over_lines():
    x = matrix()

    def read():
        return (
            x.sum()
            .item()
        )  # fmt: skip

    (entry,) = seen(read).entries
    assert entry.code.replace(" ", "") == "x.sum().item()"


def test_backward_and_its_copies_are_explicit():
    w = torch.ones(5, device="cuda:0", requires_grad=True)

    def train():
        loss = (w.to("cuda:1") * 2).sum()
        loss.backward()

    ledger = seen(train)
    assert [(e.via, e.implicit, e.nbytes) for e in ledger] == [
        ("", False, 20),
        ("backward", False, 20),
    ]
    assert [e.code for e in ledger] == ['w.to("cuda:1")', "loss.backward()"]


def test_threads_of_the_watched_code():
    x = matrix()

    def work():
        for _ in range(50):
            x.sum().item()
            x.cpu()

    def start():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ledger = seen(start)
    assert [(e.count, e.code) for e in ledger] == [(200, "x.sum().item()"), (200, "x.cpu()")]


def test_each_thread_has_its_own_watch():
    x, ledgers = matrix(), {}
    both = threading.Barrier(2)

    def work(name, count):
        with watch(warn=False) as w:
            both.wait()
            for _ in range(count):
                x.sum().item()
            both.wait()
        ledgers[name] = w.ledger.waits

    threads = [
        threading.Thread(target=work, args=("a", 3)),
        threading.Thread(target=work, args=("b", 7)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledgers == {"a": 3, "b": 7}
    assert not hooks.installed()


def test_another_task_is_not_counted():
    x = matrix()

    async def other(stop):
        while not stop.is_set():
            x.sum().item()
            await asyncio.sleep(0)

    async def main():
        stop = asyncio.Event()
        task = asyncio.create_task(other(stop))
        await asyncio.sleep(0)
        with watch(warn=False) as w:
            x.cpu()
            for _ in range(5):
                await asyncio.sleep(0)
        stop.set()
        await task
        return w.ledger

    ledger = asyncio.run(main())
    assert (ledger.transfers, ledger.waits) == (1, 0)


def test_nested_watches():
    x = matrix()
    with watch(warn=False) as outer:
        x.cpu()
        with watch(warn=False) as inner:
            x.sum().item()
        x.cpu()
    assert (outer.ledger.transfers, outer.ledger.waits) == (2, 1)
    assert (inner.ledger.transfers, inner.ledger.waits) == (0, 1)


def test_a_watch_is_read_while_it_runs_and_used_again():
    x, w = matrix(), watch(warn=False)
    with w:
        x.cpu()
        assert w.ledger.transfers == 1
        with pytest.raises(RuntimeError, match="runs already"):
            w.start()
    with w:
        pass
    assert w.ledger.transfers == 0
    assert repr(w) == "no copies between devices, and no waits for one"
    w.stop()  # twice does no harm


def test_watches_of_generators_that_end_in_any_order_do_not_chain():
    x = matrix()

    def counting():
        with watch(warn=False) as w:
            yield x.cpu()
            yield w.ledger.transfers

    for _ in range(5):
        first, second = counting(), counting()
        next(first), next(second), first.close(), second.close()
    with watch(warn=False) as w:
        x.cpu()
    assert w.ledger.transfers == 1
    target, chain = observe.current.get(), 0
    while target is not None:
        target, chain = target.outer, chain + 1
    observe.current.set(None)
    assert chain <= 1


def test_a_loop_of_many_lines_does_not_grow():
    x = matrix()
    space = {"x": x}
    with watch(warn=False) as w:
        for n in range(6000):
            exec(compile("x.cpu()", f"made/{n % 50}.py", "exec"), space)
    assert w.ledger.transfers == 6000
    assert len(w._tally._counts) <= 4096
    assert len(w.ledger) == 50


# ---------------------------------------------------------------- nothing else changes
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
    assert observe.running == ()
    assert observe.current.get() is None


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
    assert not hooks.installed()


@pytest.mark.parametrize("broken", ["locate", "targets", "_new"])
def test_a_failure_of_ours_is_not_the_users(monkeypatch, broken):
    def fail(*args):
        raise MemoryError

    x = matrix()
    with watch(), watch():
        monkeypatch.setattr(observe, broken, fail)
        exec("y = x.cpu(); z = x.sum().item(); x[torch.tensor([0])]", {"x": x, "torch": torch})
    monkeypatch.undo()
    assert not hooks.installed()


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
