"""`gpumagic.dry_run`: functions, and what is refused."""

import ctypes
import functools
import importlib
import signal
import threading
import time

import pytest
import torch
from dry_runs import of_cell
from torch import nn

from gpumagic import GpuError, dry_run

pytestmark = pytest.mark.usefixtures("gpus")

TABLE = torch.ones(3)  # the module's own
SEEN = []


def returned(result):
    (found,) = (a for a in result.assigned if a.name == "return")
    return found


def test_a_function_where_it_is():
    X = torch.ones(2, 3, device="cuda:1")
    result = dry_run(lambda x, power=1: x**power, X, power=2)
    assert (returned(result).shape, returned(result).device) == ((2, 3), "cuda:1")
    assert returned(result).dtype is torch.float32
    assert result.device == ""
    assert (result.moved, result.ledger.entries) == ((), ())
    assert X._version == 0


def test_the_import_of_torchs_compiler_counts(monkeypatch):
    clock, imported = time.monotonic, importlib.import_module

    def slow(name):
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 100)
        return imported(name)

    monkeypatch.setattr(importlib, "import_module", slow)
    assert dry_run(lambda: torch.ones(3)).seconds > 100


def test_a_function_that_is_placed_brings_its_arguments():
    X = torch.ones(2, 3)
    result = dry_run(lambda x: x + torch.ones(3), X, on=1)
    assert returned(result).device == "cuda:1"
    assert [(m.name, m.nbytes) for m in result.moved] == [("x", 24)]
    result = dry_run(lambda x: x, X, on=1, move=False)
    assert (returned(result).device, result.moved) == ("cpu", ())


def test_a_function_compiled_as_a_whole_is_followed_uncompiled():
    compiled = torch.compile(lambda x: x @ x + 1, backend="eager", fullgraph=True)
    compiled(torch.ones(4, 4))
    result = dry_run(compiled, torch.ones(256, 256), on=1)
    assert result.error is None
    assert (returned(result).shape, returned(result).device) == ((256, 256), "cuda:1")


def test_methods_modules_and_partials():
    net = nn.Linear(3, 2)
    X = torch.ones(4, 3)
    for call in (net, net.forward, functools.partial(net)):
        assert returned(dry_run(call, X, on=1)).kind == "float32[4, 2]"
    assert net.weight.device.type == "cpu"


def test_module_level_state_is_kept():
    def change():
        SEEN.append(1)
        TABLE.add_(1)
        globals()["NEW"] = 1
        return TABLE

    assert returned(dry_run(change)).shape == (3,)
    assert SEEN == []
    assert TABLE.tolist() == [1, 1, 1]
    assert "NEW" not in globals()


def test_what_it_refuses():
    async def wait(): ...

    for bad, words in (
        (lambda: dry_run(3), "takes a function to call, not int"),
        (lambda: dry_run(wait), "cannot follow an async function"),
        (lambda: dry_run(str, on=5), "no GPU 5"),
    ):
        with pytest.raises(GpuError, match=words) as error:
            bad()
        assert "\n" not in str(error.value)


def test_one_at_a_time():
    result = dry_run(lambda: dry_run(lambda: 1))
    assert "a dry run is under way" in result.error


def test_while_another_thread_runs_the_notebooks_code():
    go, started, counted = threading.Event(), threading.Event(), []
    lock = threading.Lock()

    def busy():
        with lock:
            started.set()
            while not go.wait(0.001):
                counted.append(1)

    thread = threading.Thread(target=busy, name="trainer")
    thread.start()
    started.wait(10)
    try:
        assert dry_run(lambda: 1).complete
        before = len(counted)
        result = dry_run(lock.acquire, limit=0.5)  # which nobody in the copy will ever release
        assert [u.ended for u in result.unknown] == [True]
        assert result.unknown[0].reason.startswith("the time limit of 0.5 s")
        assert len(counted) > before
    finally:
        go.set()
        thread.join()


def test_the_time_limit():
    def forever():
        x = torch.ones(2)
        while True:
            x = x + 1

    result = dry_run(forever, limit=0.05)
    (end,) = (unknown for unknown in result.unknown if unknown.ended)
    assert end.reason.startswith("the time limit of 0.05 s, after")
    assert end.where.function == "forever"


def test_a_bare_except_does_not_hide_what_is_not_known():
    X = torch.ones(3)

    def swallow():
        try:
            return 1 if X.sum() > 0 else 2
        except:  # noqa: E722
            return 3

    result = dry_run(swallow)
    (unknown,) = result.unknown
    assert "a condition on a tensor depends on data; the code caught the error" in unknown.reason


def test_backward_into_what_an_earlier_cell_computed():
    w = torch.ones(3, requires_grad=True)
    loss = (w * 2).sum()
    result = dry_run(lambda: loss.backward())
    assert any("an earlier cell's graph" in u.reason for u in result.unknown), result
    assert w.grad is None
    loss.backward()  # the graph is whole
    assert w.grad.tolist() == [2, 2, 2]


def test_hooks_run_on_the_copys_tensors():
    seen = []
    w = nn.Parameter(torch.ones(3))
    w.register_hook(lambda grad: seen.append(grad))
    result = dry_run(lambda: (w * 2).sum().backward())
    assert result.complete
    assert seen == []
    assert w.grad is None


def test_optimizers_in_the_backward_pass():
    w = nn.Parameter(torch.ones(1000, device="cuda:1"))
    opt = torch.optim.SGD([w], lr=0.1)

    def step(parameter):
        opt.step()
        opt.zero_grad()

    hook = w.register_post_accumulate_grad_hook(step)
    result = dry_run(lambda: (w * 2).sum().backward())
    assert result.complete, result
    assert w.tolist() == [1.0] * 1000
    hook.remove()  # torch never collects the cycle over it, and the next tests count `w`


def test_memory_that_other_variables_keep():
    def peak(**others):
        space = {"a": torch.ones(1000, 1000, device="cuda:1"), "torch": torch}
        space |= {name: take(space["a"]) for name, take in others.items()}
        result = of_cell("a = a + 1\na = a + 1", space)
        return result.peak["cuda:1"].needed

    size = -(-4_000_000 // 512) * 512
    assert peak() == size
    assert peak(b=lambda a: a) == 2 * size
    assert peak(view=lambda a: a[:1]) == 2 * size


def test_memory_that_the_graphs_of_other_variables_keep():
    def peak(cell, take):
        a = torch.ones(1000, 1000, device="cuda:1")
        w = torch.ones(1000, 1, device="cuda:1", requires_grad=True)
        space = {"a": a, "torch": torch, "b": take(a, w)}
        del a, w
        return of_cell(cell, space).peak["cuda:1"].needed

    size = -(-4_000_000 // 512) * 512
    again = "a = torch.ones(1000, 1000, device='cuda:1')\na = a + 1\na = a + 1"
    assert peak(again, lambda a, w: None) == size
    assert peak(again, lambda a, w: a @ w) == 2 * size
    assert peak(again, lambda a, w: ((a @ w) * 2).relu()[:1]) == 2 * size
    assert peak(f"b = b * 2\n{again}", lambda a, w: a @ w) == 2 * size + 4096
    assert peak(f"del b\n{again}", lambda a, w: a @ w) == size - 4096
    assert peak(f"del a\ndel b\n{again}", lambda a, w: (a + 1) * (w * w)) == 0


def test_no_peak_for_what_is_there_but_met_late():
    class Holder:
        __slots__ = ("tensor",)

        def __del__(self):
            """Makes it no object of plain data."""

    holder = Holder()
    holder.tensor = torch.ones(100_000, device="cuda:1")
    result = dry_run(lambda: holder.tensor.sum())
    assert result.peak["cuda:1"].needed == 512
    assert result.peak["cuda:1"].peak == torch.cuda.memory_allocated(1) + 512


def test_waits_that_copy_nothing_are_counted():
    x = torch.ones(3, device="cuda:1")

    def waits():
        torch.cuda.synchronize()
        print(x)

    found = [e for e in dry_run(waits).ledger.entries if e.kind == "wait"]
    read = {(e.operator, e.via, e.within, e.nbytes) for e in found}
    assert read == {("item", "print", "", 12), ("synchronize", "", "", 0)}


def test_an_index_on_the_cpu_is_copied():
    x, index = torch.ones(9, device="cuda:1"), torch.arange(3)
    (copy,) = dry_run(lambda: x[index]).ledger.copies
    assert (copy.operator, copy.source, copy.destination) == ("index", "cpu", "cuda:1")
    assert (copy.nbytes, copy.implicit) == (24, True)


def test_a_signal_to_its_group_reaches_the_copy_alone():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *args: seen.append(1))
    try:
        dry_run(lambda: ctypes.CDLL(None).kill(0, signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == []
