"""Every storage on a GPU is found, once, and nothing is left behind by the search."""

import gc
import sys
import threading
import types
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

import gpumagic
from gpumagic.memory.holders_by_name import find


def test_nothing_is_kept_alive_by_the_search(gpus):
    gc.collect()
    namespace = {"net": nn.Linear(3, 3, device="cuda"), "x": torch.ones(3, 3, device="cuda")}
    namespace["loss"] = namespace["net"](namespace["x"]).sum()
    gc.disable()
    try:
        assert len(find(namespace)) == 4
        kept = weakref.ref(namespace["net"])
        namespace.clear()
        assert kept() is None
        assert torch.cuda.memory_allocated() == 0
    finally:
        gc.enable()


def test_a_function_that_runs_keeps_nothing_longer(gpus):
    x = torch.ones(3, device="cuda")
    (storage,) = find({})
    assert storage.ways[0].root == f"{sys._getframe().f_code.co_name}() (running)"
    del x
    assert torch.cuda.memory_allocated() == 0


def test_a_variable_that_a_thread_uses_is_also_held_there(gpus):
    ready, stop = threading.Event(), threading.Event()

    def work(used):
        ready.set()
        stop.wait(60)

    x = torch.ones(3, device="cuda")
    thread = threading.Thread(target=work, args=[x])
    thread.start()
    ready.wait(60)
    (storage,) = find({"x": x})
    stop.set()
    thread.join()
    assert {"x", "work() (running)"} <= storage.roots


def test_both_ends_of_a_list_that_is_linked_both_ways_hold_it(gpus):
    nodes = [{"kept": torch.ones(3, device="cuda")}] + [{} for _ in range(5000)]
    for before, after in pairwise(nodes):
        before["after"], after["before"] = after, before
    (storage,) = find({"head": nodes[0], "tail": nodes[-1]})
    assert [way.root for way in storage.ways[:2]] == ["head", "tail"]


@pytest.fixture
def other_library(monkeypatch):
    """A library whose arrays lie on a GPU, as CuPy's do."""
    module = types.ModuleType("otherlib")
    module.__file__ = "/usr/lib/python3/site-packages/otherlib/__init__.py"
    monkeypatch.setitem(sys.modules, "otherlib", module)

    class Array:
        def __init__(self, address, nbytes):
            self.nbytes = nbytes
            self.address = address

        @property
        def __cuda_array_interface__(self):
            return {"data": (self.address, False)}

        def __dlpack_device__(self):
            return 2, 1

    Array.__module__ = "otherlib"
    return Array


def test_arrays_of_other_libraries_are_told_beside_what_torch_counts(ip, other_library):
    gc.collect()
    ip.run("x = zeros(1000, device='cuda:1')")
    ip.ns["mine"] = [other_library(4096, 10**6), ip.ns["x"]]
    ip.ns["view"] = other_library(5000, 100)
    ip.ns["shared"] = other_library(ip.ns["x"].data_ptr(), 4000)
    rows = {row.path: row for row in gpumagic.memory().devices[1].holders}
    assert rows.keys() == {"x", "mine"}
    assert (rows["mine"].kind, rows["mine"].nbytes) == ("otherlib array", 10**6)
    assert rows["mine"].aliases == ("view",)
    assert set(rows["x"].aliases) == {"mine", "shared"}


MANY = """
many = [torch.zeros(3, device="cuda") for _ in range(600)]
many[300] = nn.Parameter(torch.zeros(3, device="cuda"))
many[300].grad = torch.zeros(3, device="cuda")
many[400].requires_grad_()
many[401] = many[400] * 2
net = nn.ParameterList(nn.Parameter(torch.zeros(3, device="cuda")) for _ in range(300))
net.register_buffer("seen", torch.zeros(3, device="cuda"))
again, part = [*many[:10], net[7]], (many[20],)
"""


def test_of_many_beside_each_other_each_is_told_by_what_it_is_and_who_holds_it(gpus):
    namespace = {"torch": torch, "nn": nn}
    exec(MANY, namespace)
    found = {storage.address: storage.ways for storage in find(namespace)}
    assert len(found) == 902
    for name, ways in {
        "net[0]": [("net", "parameter")],
        "net[7]": [("net", "parameter"), ("again", "parameter")],
        "net.seen": [("net", "buffer")],
        "many[9]": [("many", "tensor"), ("again", "tensor")],
        "many[20]": [("many", "tensor"), ("part", "tensor")],
        "many[300]": [("many", "parameter")],
        "many[300].grad": [("many", "gradient")],
        "many[401]": [("many", "tensor")],
        "many[599]": [("many", "tensor")],
    }.items():
        assert found[eval(name, namespace).data_ptr()] == tuple(ways), name


HOSTILE = """
class Meta(type):
    def __hash__(cls): return ran.append("hash") or 0
    def __eq__(cls, other): return ran.append("eq") or False
    def __getattribute__(cls, name): return ran.append(f"class {name}")
    def __instancecheck__(cls, other): return ran.append("instance") or True
    def __subclasscheck__(cls, other): return ran.append("subclass") or True

class Hostile(metaclass=Meta):
    def __getattribute__(self, name): return ran.append(name)
    def __eq__(self, other): return ran.append("eq") or True
    def __hash__(self): return ran.append("hash") or 0
    def __repr__(self): return ran.append("repr") or ""
    def __len__(self): return ran.append("len") or 0
    def __bool__(self): return ran.append("bool") or True
    def __iter__(self): return ran.append("iter") or iter(())
    __class__ = property(lambda self: ran.append("class"))

class Sly(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        ran.append("torch")
        return super().__torch_function__(function, types, args, kwargs or {})
    @property
    def device(self): return ran.append("device")
    @property
    def grad(self): return ran.append("grad")

class SlyDict(dict):
    def __getitem__(self, key): return ran.append("item")
    def items(self): return ran.append("items") or []
    def __iter__(self): return ran.append("iter") or iter(())

class SlyList(list):
    def __iter__(self): return ran.append("iter") or iter(())
    def __len__(self): return ran.append("len") or 0
"""


def test_no_code_of_the_users_runs(gpus):
    namespace = {"torch": torch, "ran": [], "__name__": "__main__"}
    exec(HOSTILE, namespace)
    kept = [torch.zeros(200 * n, device="cuda") for n in range(1, 6)]
    hostile = object.__new__(namespace["Hostile"])
    object.__setattr__(hostile, "value", kept[0])
    namespace["a"] = hostile
    namespace["b"] = {hostile: kept[1]}
    namespace["c"] = kept[2].as_subclass(namespace["Sly"])
    namespace["d"] = namespace["SlyDict"](x=kept[3])
    namespace["e"] = namespace["SlyList"]([kept[4]])
    del kept
    namespace["ran"].clear()
    found = find(namespace, paths=True)
    assert namespace["ran"] == []
    assert sorted("".join(storage.path) for storage in found) == [
        "a.value",
        "b[<Hostile>]",
        "c",
        "d['x']",
        "e[0]",
    ]
