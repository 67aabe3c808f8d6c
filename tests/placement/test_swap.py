"""Swapped names: reached wherever the user has them, and all put back."""

import importlib
import sys
import threading
import types
from importlib.machinery import SourceFileLoader

import pytest
import torch
from torch import nn

import gpumagic
from gpumagic.placement import swap, twins

pytestmark = pytest.mark.usefixtures("gpus")
GPU1 = torch.device("cuda:1")


class Batch(torch.Tensor):
    """A subclass, whose `__new__` must stay its own."""


def test_names_imported_earlier_are_placed(tmp_path, monkeypatch):
    (tmp_path / "users_module_of_gpumagic.py").write_text(
        "from torch import ones, tensor as T\ndef make(): return ones(2), T([1])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import users_module_of_gpumagic as users

    original = users.ones
    space = {"__name__": "__main__"}
    exec("from torch import zeros as z, FloatTensor", space)
    exec(
        "import gpumagic\nwith gpumagic.on(1):\n    made = z(2), FloatTensor(2)\n"
        "    from torch import ones",
        space,
    )
    assert {t.device for t in space["made"]} == {GPU1}
    assert space["z"] is torch.zeros
    assert space["ones"] is original  # imported inside: the real one afterwards
    with gpumagic.on(1):
        assert {t.device for t in users.make()} == {GPU1}
    assert users.ones is original


def test_factories_that_a_library_took_earlier_are_placed(installed):
    # As torchaudio's transforms do; with torch.device(...) places them too.
    (installed / "library_of_gpumagic.py").write_text(
        "import torch\n"
        "from torch import ones, tensor as T\n"
        "def window(n, make=torch.hann_window): return make(n)\n"
        "class Spectrogram(torch.nn.Module):\n"
        "    def __init__(self, n=3, *, window_fn=torch.hann_window):\n"
        "        super().__init__()\n"
        "        self.register_buffer('window', window_fn(n))\n"
        "    @staticmethod\n"
        "    def make(fill=torch.zeros): return fill(2)\n"
        "def made(): return [ones(2), T(1), window(3), Spectrogram().window, Spectrogram.make()]\n"
    )
    import library_of_gpumagic as library

    defaults = library.window.__defaults__
    for _ in range(2):
        with gpumagic.on(1):
            assert {t.device for t in library.made()} == {GPU1}
        assert library.window.__defaults__ is defaults
        assert library.Spectrogram.__init__.__kwdefaults__ == {"window_fn": torch.hann_window}
        assert {t.device.type for t in library.made()} == {"cpu"}


@pytest.mark.parametrize("imported", ["before", "inside"])
def test_what_refuses_a_default_device_is_told_the_placements(imported, installed, monkeypatch):
    # As from_pretrained of transformers does where accelerate is not installed.
    (installed / "loads_of_gpumagic.py").write_text(
        "import torch\n"
        "def check_and_set_device_map(device_map):\n"
        "    if device_map or torch.get_default_device().type != 'cpu':\n"
        "        raise ValueError('needs accelerate')\n"
        "def load(device_map=None): return check_and_set_device_map(device_map)\n"
    )
    real = twins.IN_LIBRARIES["transformers.modeling_utils"]
    monkeypatch.setitem(twins.IN_LIBRARIES, "loads_of_gpumagic", real)
    if imported == "before":
        import loads_of_gpumagic
    for _ in range(2):
        with gpumagic.on(1):
            import loads_of_gpumagic

            assert loads_of_gpumagic.load() == {"": GPU1}
            with pytest.raises(ValueError, match="needs accelerate"):
                loads_of_gpumagic.load("auto")
        assert loads_of_gpumagic.load() is None
    assert loads_of_gpumagic.check_and_set_device_map.__qualname__ == "check_and_set_device_map"
    del sys.modules["loads_of_gpumagic"]


def test_a_default_of_a_function_made_inside_is_the_original_afterwards():
    space = {"__name__": "__main__", "torch": torch, "gpumagic": gpumagic}
    exec("with gpumagic.on(1):\n    def made(make=torch.zeros): return make(1)", space)
    assert space["made"].__defaults__ == (torch.zeros,)
    exec("with gpumagic.on(1):\n    x = made()", space)
    assert space["x"].device == GPU1


def test_modules_imported_inside_get_the_originals(tmp_path, monkeypatch):
    (tmp_path / "imported_inside_gpumagic.py").write_text("from torch import zeros\n")
    monkeypatch.syspath_prepend(tmp_path)
    with gpumagic.on(1):
        import imported_inside_gpumagic as imported
    assert imported.zeros is torch.zeros


def test_a_patch_of_the_users_own_made_inside_survives(monkeypatch):
    mine = lambda *a: None  # noqa: E731
    original = torch.zeros
    with gpumagic.on(1):
        torch.zeros = mine
    assert torch.zeros is mine
    torch.zeros = original


def test_a_patch_of_the_users_own_made_before_survives(monkeypatch):
    calls = []
    original = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: calls.append(a) or original(*a, **k))
    mine = torch.zeros
    with gpumagic.on(1):
        torch.zeros(2)
        assert torch.ones(1).device == GPU1
    assert torch.zeros is mine
    assert calls == [(2,)]


def test_a_proxy_to_something_dead_in_the_namespace_does_no_harm():
    import weakref

    namespace = {"dead": weakref.proxy(Batch([1.0])), "zeros": torch.zeros}
    entered = swap.enter(GPU1, namespace=namespace)
    assert namespace["zeros"](1).device == GPU1
    swap.leave(entered)
    assert namespace["zeros"] is torch.zeros


def test_a_failure_in_the_namespace_leaves_nothing_swapped():
    class Failing(dict):
        def values(self):
            raise MemoryError

    with pytest.raises(MemoryError):
        swap.enter(GPU1, namespace=Failing(torch=torch))
    assert not swap.installed()
    assert torch.cuda.current_device() == 0


def test_optimizers_count_on_the_host_and_printing_works():
    with gpumagic.on(1):
        net = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = optimizer.state[net.weight]
        assert state["step"].device.type == "cpu"
        assert state["exp_avg"].device == GPU1
        assert "cuda:1" in repr(torch.tensor([1.5, float("nan"), 3e9]))


def test_device_none_in_torchs_own_code_means_the_placements_device():
    average = torch.optim.swa_utils.AveragedModel  # passes its argument `device` to a factory
    with gpumagic.on(1):
        net = nn.Linear(2, 2)
        averages = [average(net), average(net, device="cpu")]
    assert [str(each.n_averaged.device) for each in averages] == ["cuda:1", "cpu"]
    library = {"__name__": "diffusers.schedulers.scheduling_euler", "torch": torch}
    exec("def made(device=None): return torch.ones(2, device=device)", library)
    with gpumagic.on(1):
        assert library["made"]().device.type == "cpu"  # it combines them with NumPy's arrays


def scripted(n: int):
    return torch.zeros(n) + torch.ones(n)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_jit_script_and_trace():
    with gpumagic.on("cpu"):
        inside = torch.jit.script(scripted) if sys.version_info < (3, 14) else scripted
        traced = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    assert inside(2).tolist() == [1, 1]
    assert traced(torch.zeros(1, 2)).shape == (1, 2)


@pytest.mark.filterwarnings("ignore")
def test_compile_inside_leaves_dynamo_whole():
    def make(x):
        return x + torch.ones(2, device=x.device)

    with gpumagic.on(1):
        compiled = torch.compile(make, backend="eager")
        assert compiled(torch.zeros(2)).device == GPU1
    with gpumagic.on(1):  # again, now that dynamo knows the real ones

        @torch.compile(backend="eager")
        def add(x):
            return x + torch.ones(2)

        assert add(torch.zeros(2)).device == GPU1
    whole = torch.compile(make, backend="eager", fullgraph=True)
    assert whole(torch.zeros(2)).tolist() == [1, 1]


def test_a_module_at_the_address_of_one_that_is_gone_is_placed():
    name, seen = "same_address_of_gpumagic", set()
    while len(seen) < 50:
        module = types.ModuleType(name)
        module.ones = torch.ones
        sys.modules[name] = module
        with gpumagic.on(1):
            assert module.ones(2).device == GPU1
        if id(module) in seen:
            break
        seen.add(id(module))
        del sys.modules[name], module
    else:
        raise AssertionError("no module had the address of another")


def test_a_module_imported_anew_is_placed(tmp_path, monkeypatch):
    (tmp_path / "imported_twice_by_gpumagic.py").write_text("from torch import ones\n")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        sys.modules.pop("imported_twice_by_gpumagic", None)
        import imported_twice_by_gpumagic as users

        with gpumagic.on(1):
            assert users.ones(1).device == GPU1


def test_names_that_a_reload_brings_are_placed(tmp_path, monkeypatch):
    file = tmp_path / "edited_module_of_gpumagic.py"
    file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import edited_module_of_gpumagic as edited

    with gpumagic.on(1):
        pass
    file.write_text("from torch import ones\ndef make(fill=ones): return ones(2), fill(2)\n")
    importlib.reload(edited)  # as %autoreload does before a cell
    with gpumagic.on(1):
        assert {t.device for t in edited.make()} == {GPU1}
        file.write_text("from torch import zeros\n")
        importlib.reload(edited)
    assert edited.zeros is torch.zeros
    assert {t.device.type for t in edited.make()} == {"cpu"}


@pytest.mark.parametrize("first", ["torch.first_of_gpumagic", "waits_of_gpumagic"])
def test_imports_on_two_threads_do_not_wait_for_each_other(first, tmp_path, monkeypatch):
    second, begun = "torch.second_of_gpumagic", threading.Barrier(2)
    monkeypatch.setattr(sys, "begun", begun, raising=False)
    code = f"import sys; sys.begun.wait(); import {second}\n"
    (tmp_path / f"{first.removeprefix('torch.')}.py").write_text(code)
    (tmp_path / "second_of_gpumagic.py").touch()
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    real = twins.IN_LIBRARIES["transformers.modeling_utils"]
    monkeypatch.setitem(twins.IN_LIBRARIES, "waits_of_gpumagic", real)
    create = SourceFileLoader.create_module

    def create_module(self, spec):  # when its import has begun, and Python holds a lock for it
        if spec.name == second:
            begun.wait()
        return create(self, spec)

    monkeypatch.setattr(SourceFileLoader, "create_module", create_module)
    with gpumagic.on(1):
        other = threading.Thread(target=importlib.import_module, args=[second], daemon=True)
        other.start()
        importlib.import_module(first)
        other.join()
        assert torch.ones(1).device == GPU1
    assert torch.ones(1).device.type == "cpu"
    del sys.modules[first], sys.modules[second]
