"""Timing changes nothing of the user's, and a copy does what the original would."""

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import CPU, GPU0, GPU1, Seen, allocated, notebook, run, runs_untouched

from gpumagic.copies import storages, trial
from gpumagic.copies.trial import CopiedVariables
from gpumagic.errors import GpuError

pytestmark = pytest.mark.usefixtures("gpus")

_TRAINING = """
torch.manual_seed(0)
class Net(nn.Module):
    runs = 0
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.lstm = nn.LSTM(2, 2)
        self.kept = {"scale": torch.ones(2)}
    def forward(self, x):
        Net.runs += 1
        self.last = self.norm(self.layer(x)).relu()
        out, _ = self.lstm(self.head(F.dropout(self.last, 0.1, self.training))[None])
        return out[0] * self.kept["scale"]
net = Net()
X, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
rows = [X[k] for k in range(3)]
adam = optim.Adam(net.parameters())
sgd = optim.SGD(net.parameters(), 0.1, momentum=0.9)
decay = optim.lr_scheduler.StepLR(sgd, 2)
history, cache, total = [], {}, 0
array = np.arange(6.0)
shared = torch.from_numpy(array)
generator = torch.Generator().manual_seed(1)
own, legacy = random.Random(1), np.random.RandomState(1)
def step(optimizer, seen=[]):
    global total
    total += 1
    optimizer.zero_grad()
    loss = F.cross_entropy(net(X), y)
    loss.backward()
    optimizer.step()
    seen.append(loss.item())
    step.count = len(seen)
    history.append(loss.item())
class Trainer:
    made = []
    def __init__(self, optimizer):
        self.optimizer, self.log = optimizer, []
    def train(self):
        step(self.optimizer)
        self.log.append(total)
        Trainer.made.append(self)
trainer = Trainer(adam)
net(X).sum().backward()
adam.step()
"""

_STATEMENTS = (
    "X.mul_(2)",
    "rows[0].zero_()",
    "step(adam)",
    "step(sgd); decay.step()",
    "trainer.train()",
    "net.eval()",
    "net.train(); net(X)",
    "net.new = torch.zeros(3)",
    "net.layer.weight.data.fill_(1.0)",
    "net.kept['scale'].add_(1)",
    "del net.head, net.lstm",
    "history.append(X.sum().item())",
    "cache['x'] = X; cache[total] = [1]",
    "history.clear()",
    "array += 1",
    "shared.add_(1)",
    "np.random.shuffle(array); random.shuffle(history)",
    "torch.randn(3); random.random(); np.random.rand(2)",
    "torch.rand(2, generator=generator); own.random(); legacy.rand(2)",
    "torch.manual_seed(7); random.seed(7); np.random.seed(7)",
    "X.resize_(16, 4); X[8:] = 0",
    "y = None; X = X + 1",
    "Net.runs = 100; Trainer.made.clear()",
    "adam.param_groups[0]['lr'] = 1.0",
    "adam.state.clear()",
    "exec('history.append(1)'); globals()['total'] = 5",
    "raise ValueError('the cell fails')",
)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(_STATEMENTS), min_size=1, max_size=5),
    st.sampled_from([CPU, GPU0, GPU1]),
)
def test_whatever_a_program_does_all_is_as_before(statements, device):
    body = "".join(f"\n    try: {s}\n    except Exception: pass" for s in statements)
    runs_untouched(notebook(_TRAINING), f"for _ in range(2):{body}", device)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(_STATEMENTS), min_size=1, max_size=5))
def test_a_copy_does_what_the_original_would(statements):
    code = "".join(f"\ntry: {s}\nexcept Exception: pass" for s in statements)
    code += "\nout = [net.state_dict(), X, history, array.tolist(), shared.tolist(), total]"
    results = []
    for copied in (True, False):
        namespace = notebook(_TRAINING)
        result = run(namespace, code)[0] if copied else namespace
        if not copied:
            exec(code, namespace)
        results.append(result["out"])
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_two_worlds_at_the_same_time_do_not_meet():
    namespace = notebook(_TRAINING)
    before = Seen(namespace)
    worlds = [CopiedVariables(namespace, ["trainer", "net"], device) for device in (GPU0, GPU1)]
    barrier = threading.Barrier(2)

    def work(world):
        barrier.wait()
        exec("for _ in range(3): trainer.train()", world.globals)

    threads = [threading.Thread(target=work, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for world, device in zip(worlds, (GPU0, GPU1), strict=True):
        assert len(world.globals["trainer"].log) == 3
        assert {p.device for p in world.globals["net"].parameters()} == {device}
        world.close()
    del world, threads, worlds
    assert Seen(namespace) == before


def test_functions_are_copied_with_what_they_see():
    namespace = notebook(_TRAINING)
    before = Seen(namespace)
    for function in (namespace["trainer"].train, lambda: namespace["trainer"].train()):
        world = CopiedVariables(namespace, [], GPU1, function=function)
        assert world.function is not function
        world.function()
        world.close()
    assert allocated() == [0, 0]
    assert namespace["total"] == 1, "the lambda is of another module, which it shares"
    del before


def test_memory_is_back_at_once():
    namespace = notebook(_TRAINING)
    gc.disable()
    try:
        world = CopiedVariables(namespace, ["trainer", "net", "rows"], GPU1)
        assert allocated()[1] >= world.storages.nbytes > 0
        world.close()
        assert allocated() == [0, 0]
    finally:
        gc.enable()


def test_no_room_leaves_nothing_behind():
    namespace = notebook("a, b = torch.ones(4), torch.empty(2**28)")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        CopiedVariables(namespace, ["a", "b"], GPU1)
    assert allocated() == [0, 0]


def test_an_interrupt_leaves_nothing_behind(monkeypatch):
    namespace = notebook(_TRAINING)
    before = Seen(namespace)

    def interrupted(*_):
        raise KeyboardInterrupt

    for place in ("_copy_family", "copied"):
        with monkeypatch.context() as patch:
            patch.setattr(storages.StorageCopier, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                CopiedVariables(namespace, ["trainer", "net"], GPU1)
        gc.collect()
        assert allocated() == [0, 0]
    assert Seen(namespace) == before


def test_what_is_tracked_is_copied_without_its_graph_and_said():
    namespace = notebook("w = torch.ones(2, requires_grad=True)\ny = w * 2")
    world = CopiedVariables(namespace, ["w", "y"], CPU)
    assert world.notes == ("y: copied without its autograd graph",)
    exec("y.mul_(3); leaf = y.is_leaf; y.sum().backward()", world.globals)
    assert world.globals["y"].tolist() == [6.0, 6.0]
    assert not world.globals["leaf"]
    assert world.globals["w"].grad is namespace["w"].grad is None
    world.close()


def test_it_is_timed_and_counted(monkeypatch):
    namespace = notebook("x = torch.ones(100); v = x[:50]; n = nn.Linear(2, 2)")
    times = iter((1.0, 4.0))
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    world = CopiedVariables(namespace, ["x", "v"], GPU1)
    assert (world.seconds, world.storages.nbytes) == (3.0, 400)
    assert world.globals["n"] is namespace["n"]
    world.close()


def test_a_lazy_parameter_is_refused_by_name():
    with pytest.raises(GpuError, match=r"^net cannot be copied \(cannot copy a lazy parameter\)"):
        CopiedVariables(notebook("net = nn.LazyLinear(2)"), ["net"], GPU1)
