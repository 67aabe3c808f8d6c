"""In whatever notebook: the rows add up, each path leads to its bytes, and deleting gives back."""

import gc
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpumagic
from gpumagic.memory.holders_by_name import find

SET_UP = """
import collections, functools, threading
n = 0
def gpu():
    global n
    n += 1
    return zeros(200 * n, device="cuda:0")
"""
# Cells of a notebook. {n} is a number of its own, {x} and {net} are what earlier cells made.
CELLS = (
    "x{n} = gpu()",
    "x{n} = x{x}",
    "x{n} = x{x}[1:]",
    "x{n} = gpu().requires_grad_()\ng{n} = (x{n} * x{x}.detach()[0]).exp()",
    "del x{x}",
    "many{n} = [gpu(), {{'a': x{x}}}, (gpu(),)]",
    "net{n} = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to('cuda:1')",
    "net{net}[0].weight = net{net}[1].weight",
    "net{net}.register_buffer('seen', gpu())",
    "net{net}.register_forward_hook(lambda *a, t=x{x}: None)",
    "opt{n} = torch.optim.Adam(net{net}.parameters())\n"
    "net{net}(torch.ones(4, 8, device='cuda:1')).sum().backward()\nopt{n}.step()",
    "loss{n} = net{net}(torch.ones(4, 8, device='cuda:1')).pow(2).sum()",
    "loss{n} = net{net}(torch.ones(4, 8, device='cuda:1')).pow(2).sum()\nloss{n}.backward()",
    "net{net}.zero_grad()",
    "x{x}",
    "gpu()",
    "_",
    "def f{n}(a, t=x{x}):\n    b = gpu()\n    raise ValueError(a)\nf{n}(gpu())",
    "def f{n}(a):\n    try:\n        a[7]\n    except IndexError as e:\n        b = gpu()\n"
    "        raise KeyError from e\nf{n}([gpu()])",
    "try:\n    f{n} = [gpu()]\n    f{n}[1]\nexcept IndexError as e:\n    error{n} = e",
    "def walk{n}(a):\n    b = [gpu()]\n    yield a\n    yield b\n"
    "gen{n} = walk{n}(x{x})\nnext(gen{n}); 0",
    "def outer{n}():\n    kept = gpu()\n    return lambda: kept\nclosure{n} = outer{n}()",
    "@functools.lru_cache\ndef load{n}(k):\n    return gpu()\nload{n}(1); 0",
    "class C{n}:\n    shared = gpu()\n    def __init__(self): self.own = gpu()\nc{n} = C{n}()",
    "part{n} = functools.partial(print, x{x})",
    "dq{n} = collections.deque([gpu()], 3)",
    "def work{n}(t):\n    u = gpu()\n    ready.set()\n    stop.wait(60)\n"
    "ready = threading.Event()\nthread{n} = threading.Thread(target=work{n}, args=(gpu(),))\n"
    "thread{n}.start()\nready.wait(60); 0",
)
NOTEBOOKS = st.lists(st.tuples(st.sampled_from(CELLS), st.integers(0, 99)), max_size=14)
PLAIN = re.compile(r"\w+(\.\w+|\[('\w+'|\d+)\])*")


def write(ip, notebook):
    """Run the cells, with names that earlier ones made."""
    ip.run(SET_UP + "stop = threading.Event()\nx0 = gpu()\nnet0 = nn.Linear(8, 8, device='cuda:1')")
    ip.run("net0 = nn.Sequential(net0, nn.Linear(8, 8, device='cuda:1'))")
    for number, (cell, pick) in enumerate(notebook, 1):
        made = {
            kind: [name[len(kind) :] for name in ip.ns if re.fullmatch(rf"{kind}\d+", name)]
            or ["0"]
            for kind in ("x", "net")
        }
        chosen = {kind: names[pick % len(names)] for kind, names in made.items()}
        ip.run(cell.format(n=number, **chosen))


def allocated():
    return sum(torch.cuda.memory_allocated(n) for n in range(2))


def check(ip, notebook, deleted):
    gc.collect()  # what is frozen is never collected, also what an earlier test left in a cycle
    # Each collection would go through all that was imported, and there are several a notebook.
    gc.freeze()
    try:
        look(ip, notebook, deleted)
    finally:
        clean(ip)


def look(ip, notebook, deleted):
    write(ip, notebook)
    gc.collect()
    report = gpumagic.memory()
    for device in report.devices:
        assert sum(row.nbytes for row in device.holders) == device.allocated
    assert report.allocated == allocated()
    assert "unreached" not in {row.kind for row in report.holders}
    found = find(ip.ns, paths=True)
    for storage in found:
        path = "".join(storage.path)
        if PLAIN.fullmatch(path):
            tensor = eval(path, ip.ns)
            assert tensor.untyped_storage().data_ptr() == storage.address, path
    del tensor
    names = {name for storage in found for name in storage.roots} & ip.ns.keys()
    gone = {name for name in sorted(names) if deleted.random() < 0.5}
    for name in gone:
        del ip.ns[name]
    gc.collect()
    left = sum(s.nbytes for s in found if not s.roots <= gone)
    assert allocated() == left, gone


def clean(ip):
    """As a notebook begins."""
    ip.run("stop.set()")
    for name, value in [*ip.ns.items()]:
        if name.startswith("thread") and name != "threading":
            value.join(60)
    ip.ip.reset(new_session=False)
    gpumagic.free_memory()
    ip.run("import torch\nfrom torch import nn, zeros")
    gc.collect()
    assert allocated() == 0


FEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=5)


@FEW
@given(notebook=NOTEBOOKS, deleted=st.randoms(use_true_random=False))
def test_the_rows_add_up_and_deleting_gives_back(ip, notebook, deleted):
    check(ip, notebook, deleted)


@pytest.mark.slow
@settings(FEW, max_examples=400)
@given(notebook=NOTEBOOKS, deleted=st.randoms(use_true_random=False))
def test_the_rows_add_up_and_deleting_gives_back_in_many_notebooks(ip, notebook, deleted):
    check(ip, notebook, deleted)
