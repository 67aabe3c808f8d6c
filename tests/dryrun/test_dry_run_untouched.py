"""Random programs: a dry run changes nothing, and says what the program then really does."""

import ast
import gc
import random

import numpy as np
import pytest
import torch
from dry_runs import of_cell
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpumagic.cell.run import Run
from gpumagic.device import Device
from gpumagic.usercode.variables import names_read

GPU1 = Device("cuda", ordinal=1, virtual=True)

STATEMENTS = [
    "A = X + 1",
    "A = X @ W",
    "B = A.relu() if 'A' in globals() else X.relu()",
    "X += 1",
    "X.mul_(2)",
    "X[0] = 3",
    "V[1:] = 5",
    "V.data = torch.ones(3)",
    "W = W.T.contiguous()",
    "X.data.fill_(7)",
    "out = net(X)",
    "loss = net(X).square().mean(); loss.backward()",
    "opt.step()",
    "opt.zero_grad()",
    "opt.zero_grad(set_to_none=False)",
    "sched.step()",
    "net.to('cuda:0'); net.to('cuda:1')",
    "net.half(); net.float()",
    "net[0].weight.data.zero_()",
    "net[0].weight.requires_grad_(False); net[0].weight.requires_grad_(True)",
    "net[0] = nn.Linear(6, 4)",
    "opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)",
    "log.append(X.sum().item())",
    "log.clear()",
    "store['k'] = X.clone()",
    "store['net'] = net.state_dict()",
    "box.value += 1; box.tensor = box.tensor * 2",
    "box.items.append(box)",
    "Box.shared.append(1); Box.count += 1",
    "grow()",
    "counter()",
    "torch.manual_seed(1)",
    "R = torch.rand(4, 6)",
    "G = torch.randn(3, generator=gen)",
    "gen.manual_seed(5)",
    "np.random.seed(1); random.seed(1)",
    "arr += 1",
    "T = torch.from_numpy(arr) + 1",
    "del V",
    "C = X.cpu(); D = C.to('cuda:0')",
    "S = torch.zeros(1000, 100); S2 = S + 1; del S",
    "for i in range(3): X = X * 2",
    "P = torch.stack([X, X]).sum(0, dtype=torch.float64)",
    "bn(net(X))",
    "bn.eval()",
    "n = n + 1; words = [n, 'x']",
    "torch.set_default_dtype(torch.float64); Z = torch.ones(2)\n"
    "torch.set_default_dtype(torch.float32)",
    "X.requires_grad_(True); X.grad = None",
]

PRELUDE = """
class Box:
    shared = []
    count = 0
    def __init__(self): self.value, self.tensor, self.items = 0, torch.ones(5), []
box = Box()
def make_counter():
    total = 0; seen = []
    def counter():
        nonlocal total
        total += 1; seen.append(total); return total
    return counter
counter = make_counter()
def grow(into=[]):
    global n
    into.append(X); n += 1
"""


def world():
    torch.manual_seed(0)
    space = {"__name__": "__main__", "torch": torch, "nn": nn, "np": np, "random": random}
    exec(compile(PRELUDE, "<prelude>", "exec"), space)
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    opt = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 6)).sum().backward()
    opt.step()
    base = torch.randn(4, 6)
    return space | {
        "X": base,
        "V": base[:2].detach(),
        "W": torch.randn(6, 5),
        "net": net,
        "opt": opt,
        "sched": torch.optim.lr_scheduler.StepLR(opt, 1),
        "bn": nn.BatchNorm1d(3),
        "log": [1.0],
        "store": {"a": base},
        "gen": torch.Generator().manual_seed(3),
        "arr": np.ones((2, 3), dtype=np.float32),
        "n": 0,
    }


def tensors_of(space):
    box, opt = space["box"], space["opt"]
    yield from (space[n] for n in ("X", "V", "W"))
    yield from (*space["net"].parameters(), *space["bn"].buffers(), *space["bn"].parameters())
    yield from (p.grad for p in space["net"].parameters() if p.grad is not None)
    yield from (t for state in opt.state.values() for t in state.values())
    yield box.tensor
    yield from (t for t in space["store"].values() if isinstance(t, torch.Tensor))


def snapshot(space):
    """Everything that a dry run must leave, bit for bit."""
    box = space["box"]
    return {
        "names": [(name, id(value)) for name, value in space.items()],
        "tensors": [
            (
                id(t),
                t.untyped_storage()._cdata,
                t._version,
                t.requires_grad,
                str(t.device),
                t.detach().cpu().numpy().tobytes(),
                t.shape,
            )
            for t in tensors_of(space)
        ],
        "grads": [id(p.grad) for p in space["net"].parameters()],
        "box": (box.value, [id(i) for i in box.items], list(type(box).shared), type(box).count),
        "containers": (list(space["log"]), [(k, id(v)) for k, v in space["store"].items()]),
        "optimizer": ([id(p) for p in space["opt"].state], space["opt"].param_groups[0]["lr"]),
        "scheduler": (space["sched"].last_epoch, space["sched"]._step_count),
        "module": (space["bn"].training, [id(m) for m in space["net"]]),
        "functions": (
            list(space["grow"].__defaults__[0]),
            [c.cell_contents for c in space["counter"].__closure__ if type(c.cell_contents) is int],
        ),
        "random": (
            space["gen"].get_state().tolist(),
            torch.get_rng_state().tolist(),
            torch.cuda.get_rng_state(1).tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ),
        "array": space["arr"].tobytes(),
        "gpus": [torch.cuda.memory_stats(i) for i in range(2)],
        "current": torch.cuda.current_device(),
    }


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=15)
@given(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=6))
def test_random_programs(gpus_once, statements):
    gc.collect()  # the last example's tensors would be in this one's peak
    space = world()
    code = "\n".join(statements)
    tree = ast.parse(code)
    before = snapshot(space)
    result = of_cell(code, space, "1")
    after = snapshot(space)
    for part in before:
        assert after[part] == before[part], (part, code)
    _as_it_really_is(space, tree, result, code)


def _as_it_really_is(space, tree, result, code):
    gc.collect()
    kept = dict(space)
    run = Run(GPU1, space, names_read(tree))
    run.start()
    error = None
    try:
        exec(compile(tree, "<cell>", "exec"), space)
    except Exception as raised:  # noqa: BLE001
        error = raised
    report = run.finish(error)
    if error is not None:
        assert result.error or result.mismatches, (code, error, result)
        return
    assert result.complete, (code, result)
    found = [item for item in result.assigned if item.name != "Out"]
    for item in found:
        value = space[item.name]
        if isinstance(value, torch.Tensor):
            assert item.shape == tuple(value.shape), code
            assert (item.dtype, item.device) == (value.dtype, str(value.device)), code
    new = {name for name, v in space.items() if kept.get(name) is not v and name[0] != "_"}
    assert {item.name for item in found} == new, code
    for memory in report.memory:
        assert result.peak[memory.device].peak == pytest.approx(memory.peak, rel=0.01, abs=1024), (
            code
        )


@pytest.fixture(scope="module")
def gpus_once(tmp_path_factory):
    """Two virtual GPUs for all examples."""
    from gpumagic import virtual

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUMAGIC_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        virtual.enable(2, 2**30)
        yield
        virtual.disable()
