"""The ledger: the line, thread, task and watch that a copy or a wait is counted at."""

import asyncio
import threading

import pytest
import torch
from torch import nn
from watched import matrix, seen

from gpumagic.frameworks.watching import watch
from gpumagic.ledger import attribute
from gpumagic.ledger.ledger_view import advise

pytestmark = pytest.mark.usefixtures("gpus")


def test_the_line_is_the_users_through_library_frames():
    net = nn.Linear(4, 4)

    def bring():
        net.to("cuda:0")

    ledger = seen(bring)
    (entry,) = ledger.entries
    assert (entry.code, entry.count, entry.nbytes) == ('net.to("cuda:0")', 2, 80)
    assert entry.file == "test_watch_where.py"
    assert entry.line == bring.__code__.co_firstlineno + 1


def test_what_torch_copies_and_waits_for_by_itself_is_within_it(tmp_path):
    net = nn.Linear(4, 4, device="cuda:0")
    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def loss():
        loss = net(torch.ones(2, 4, device="cuda:0")).square().sum()
        loss.backward()
        return loss

    def step():
        for _ in range(3):
            lbfgs.step(loss)
            torch.save(net.state_dict(), tmp_path / "net.pt")

    entries = seen(step).entries
    assert {(e.kind, e.within.rpartition(".")[0]) for e in entries} == {
        ("wait", "torch.optim"),
        ("copy", "torch"),
    }
    assert [advise(e) for e in entries] == [None] * len(entries)


def test_a_line_that_copies_and_has_a_library_copy_has_two_entries():
    net, x = nn.Linear(4, 4), torch.ones(3)

    def bring():
        for _ in range(3):
            x.to("cuda:0"), net.to("cuda:0"), net.to("cpu")

    brought = {e.within: e.count for e in seen(bring) if e.destination == "cuda:0"}
    assert brought == {"": 3, "torch.nn.modules.module": 6}


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
        with pytest.raises(RuntimeError, match="is already running"):
            w.start()
    with w:
        pass
    assert w.ledger.transfers == 0
    assert repr(w) == "no copies between devices, no waits for a GPU"
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
    target, chain = attribute.current.get(), 0
    while target is not None:
        target, chain = target.outer, chain + 1
    attribute.current.set(None)
    assert chain <= 1


@pytest.mark.slow
def test_a_loop_of_many_lines_does_not_grow():
    x = matrix()
    space = {"x": x}
    with watch(warn=False) as w:
        for n in range(4200):  # more than a ledger has lines
            exec(compile("x.cpu()", f"/made/{n % 50}.py", "exec"), space)
    assert w.ledger.transfers == 4200
    assert len(w.ledger) == 50


def test_two_at_one_line_are_no_loop():
    x = matrix()

    def printed():
        return print(x[0, 0]), print(x[0, 1])

    found = []

    def read():
        found.extend([x.sum().item(), x.min().item()])

    once = [*seen(printed), *seen(read)]
    assert {advise(e) for e in once} == {None}
    assert sum(e.calls for e in once if e.via == "print") == 2
    advice = [advise(e) for e in seen(lambda: [read() for _ in range(10)])]
    assert [a.saved for a in advice] == [9, 9]
