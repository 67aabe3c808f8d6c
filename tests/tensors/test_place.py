"""Placement: what lands on the device, what stays, and that nothing is left behind."""

import asyncio
import os
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpumagic
from gpumagic.errors import GpuError
from gpumagic.tensors import factories, place, placement

pytestmark = pytest.mark.usefixtures("gpus")
GPU1 = torch.device("cuda:1")

MAKERS = {
    "zeros": lambda: torch.zeros(2, 3),
    "empty of a size": lambda: torch.empty((2, 3), dtype=torch.int32),
    "tensor": lambda: torch.tensor([1.0, 2.0], requires_grad=True),
    "tensor with device=None": lambda: torch.tensor(3, device=None),
    "arange": lambda: torch.arange(3),
    "randn": lambda: torch.randn(3, requires_grad=True),
    "randint": lambda: torch.randint(0, 9, (3,)),
    "eye": lambda: torch.eye(2),
    "linspace": lambda: torch.linspace(0, 1, 3),
    "full": lambda: torch.full((2,), 7),
    "normal of numbers": lambda: torch.normal(0.0, 1.0, (3,)),
    "fftfreq": lambda: torch.fft.fftfreq(4),
    "as_tensor of a list": lambda: torch.as_tensor([1, 2]),
    "as_tensor of an array": lambda: torch.as_tensor(np.ones(2)),
    "asarray": lambda: torch.asarray([1, 2]),
    "from_numpy": lambda: torch.from_numpy(np.ones(2)),
    "frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.float32),
    "Tensor of a size": lambda: torch.Tensor(2, 3),
    "Tensor of a list": lambda: torch.Tensor([1, 2]),
    "FloatTensor": lambda: torch.FloatTensor([1.0]),
    "LongTensor of a size": lambda: torch.LongTensor(3),
    "zeros_like of a new one": lambda: torch.zeros_like(torch.ones(2)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "Linear": lambda: nn.Linear(2, 3).weight,
    "BatchNorm's buffer": lambda: nn.BatchNorm1d(3).running_mean,
    "Embedding": lambda: nn.Embedding(3, 2).weight,
    "LSTM": lambda: nn.LSTM(2, 3).weight_ih_l0,
    "Transformer": lambda: nn.TransformerEncoderLayer(4, 2).linear1.weight,
    "bare cuda": lambda: torch.zeros(2, device="cuda"),
    ".cuda()": lambda: torch.zeros(2, device="cpu").cuda(),
    "a CPU generator": lambda: torch.randn(
        3, generator=torch.Generator().manual_seed(0), requires_grad=True
    ),
    "a GPU generator": lambda: torch.randn(3, generator=torch.Generator("cuda")),
    "distributions": lambda: torch.distributions.Normal(0.0, 1.0).sample(),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_lands_on_the_device(make):
    with gpumagic.on(1):
        made = make()
    assert made.device == GPU1
    assert made.is_leaf


STAYERS = {
    "explicit device": lambda: torch.zeros(2, device="cpu"),
    "explicit keyword of randn": lambda: torch.randn(2, device=torch.device("cpu")),
    "as_tensor with a device": lambda: torch.as_tensor([1], device="cpu"),
    "zeros_like": lambda: torch.zeros_like(CPU_ONES),
    "new_zeros": lambda: CPU_ONES.new_zeros(3),
    "as_tensor of a tensor": lambda: torch.as_tensor(CPU_ONES),
    "asarray of a tensor": lambda: torch.asarray(CPU_ONES),
    "Tensor of a tensor": lambda: torch.Tensor(CPU_ONES),
    "normal of tensors": lambda: torch.normal(CPU_ONES, 1.0),
    "out": lambda: torch.zeros(2, out=torch.empty(2, device="cpu")),
    "pinned": lambda: torch.zeros(2, pin_memory=True),
    "with torch.device": lambda: _inside_torch_device(),
    "Linear with a device": lambda: nn.Linear(2, 2, device="cpu").weight,
}
CPU_ONES = torch.ones(2)


def _inside_torch_device():
    with torch.device("cpu"):
        made = torch.zeros(2)
        assert torch.get_default_device().type == "cpu"
        assert torch.Tensor(2).device.type == torch.from_numpy(np.ones(1)).device.type == "cpu"
    assert torch.zeros(2).device == GPU1  # and after it, ours holds again
    return made


@pytest.mark.parametrize("make", STAYERS.values(), ids=STAYERS.keys())
def test_the_users_choice_wins(make):
    with gpumagic.on(1):
        made = make()
    assert made.device.type == "cpu"


def test_a_default_device_of_before_is_overruled_and_one_of_inside_overrules():
    torch.set_default_device("cuda:0")
    with gpumagic.on(1):
        assert torch.zeros(1).device == GPU1
    assert torch.zeros(1).device == torch.device("cuda:0")
    torch.set_default_device(None)
    with gpumagic.on(1):
        torch.set_default_device("cuda:0")
        assert torch.zeros(1).device == torch.device("cuda:0")
        torch.set_default_device(None)
        assert torch.zeros(1).device == GPU1


def test_as_tensor_of_a_tensor_is_that_tensor():
    with gpumagic.on(1):
        assert torch.as_tensor(CPU_ONES) is CPU_ONES


def test_load_lands_unless_told_where(tmp_path):
    file = tmp_path / "saved.pt"
    torch.save({"cpu": torch.ones(2), "gpu": torch.ones(2, device="cuda:0")}, file)
    with gpumagic.on(1):
        assert {t.device for t in torch.load(file).values()} == {GPU1}
        assert {t.device.type for t in torch.load(file, map_location="cpu").values()} == {"cpu"}
        assert {t.device.type for t in torch.load(file, "cpu").values()} == {"cpu"}


def test_current_device_and_default_device():
    torch.cuda.set_device(0)
    with gpumagic.on(1):
        assert torch.cuda.current_device() == 1
        assert torch.get_default_device() == GPU1
        torch.cuda.set_device(0)
    assert torch.cuda.current_device() == 0
    with pytest.raises(KeyError), gpumagic.on(1):
        raise KeyError
    assert torch.cuda.current_device() == 0
    assert torch.get_default_device().type == "cpu"


def test_types_are_types_still():
    with gpumagic.on("cpu"):
        x = torch.FloatTensor([1.0])
        assert isinstance(x, torch.FloatTensor)
        assert not isinstance(x, torch.LongTensor)
        assert x.type(torch.LongTensor).dtype == torch.int64
        assert torch.FloatTensor.dtype == torch.float32
        assert isinstance(x, torch.Tensor)


class Batch(torch.Tensor):
    """A subclass, whose `__new__` must stay its own."""


def test_subclasses_are_not_touched():
    with gpumagic.on(1):
        assert type(Batch([1.0])) is Batch
        assert type(torch.zeros(2).as_subclass(Batch)) is Batch


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


# ---------------------------------------------------------------- threads and tasks
def test_other_threads_do_not_see_it_and_may_have_their_own():
    seen = {}
    entered, leave = threading.Barrier(3), threading.Barrier(3)

    def work(where):
        if where is None:
            entered.wait()
            seen[where] = torch.zeros(1).device
            leave.wait()
            return
        with gpumagic.on(where):
            entered.wait()
            seen[where] = torch.zeros(1).device, torch.cuda.current_device()
            leave.wait()
            seen[where, "late"] = torch.zeros(1).device

    threads = [threading.Thread(target=work, args=(w,)) for w in (0, 1, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] == (torch.device("cuda:0"), 0)
    assert seen[1] == (GPU1, 1)
    assert seen[None].type == "cpu"
    assert seen[0, "late"].index == 0
    assert seen[1, "late"].index == 1
    assert not factories.installed()


def test_tasks_have_their_own_and_do_not_outlive_it():
    async def main():
        go = asyncio.Event()

        async def placed(where):
            with gpumagic.on(where):
                await asyncio.sleep(0)
                return torch.zeros(1).device.index

        async def straggler():
            await go.wait()
            return torch.zeros(1).device.type

        both = await asyncio.gather(placed(0), placed(1))
        with gpumagic.on(1):
            late = asyncio.create_task(straggler())
            await asyncio.sleep(0)
        with gpumagic.on(0):  # the names are swapped again, for another placement
            go.set()
            return both, await late

    assert asyncio.run(main()) == ([0, 1], "cpu")


def test_one_object_entered_by_several_threads():
    shared = gpumagic.on(1)
    first, second = threading.Event(), threading.Event()
    seen = []

    def work():
        with shared:
            first.set()
            second.wait()
            seen.append(torch.zeros(1).device)

    thread = threading.Thread(target=work)
    thread.start()
    first.wait()
    with shared, shared:
        seen.append(torch.zeros(1).device)
    assert torch.zeros(1).device.type == "cpu"
    second.set()
    thread.join()
    assert seen == [GPU1, GPU1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a property of fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_not_placed():
    with gpumagic.on(1):
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(write, torch.zeros(1).device.type.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        assert os.read(read, 10) == b"cpu"
        os.close(read)


# ---------------------------------------------------------------- the context manager and decorator
def test_nested():
    with gpumagic.on(0):
        with gpumagic.on(1):
            with gpumagic.on("cpu"):
                assert torch.zeros(1).device.type == "cpu"
            assert torch.zeros(1).device == GPU1
        assert torch.zeros(1).device.index == 0
        assert torch.cuda.current_device() == 0


def test_decorators():
    @gpumagic.on(1)
    def made(n):
        """Make."""
        return torch.zeros(n)

    @gpumagic.on(1)
    async def made_later(n):
        await asyncio.sleep(0)
        return torch.zeros(n)

    assert made(3).device == GPU1
    assert (made.__name__, made.__doc__) == ("made", "Make.")
    assert asyncio.run(made_later(3)).device == GPU1
    with pytest.raises(TypeError, match="generator numbers"):

        @gpumagic.on(1)
        def numbers():
            yield 1


def test_what_does_not_exist_is_refused_in_one_line():
    for where in (7, "gpu:x", "0,1", "0,,1", "", "mps"):
        with pytest.raises(GpuError) as caught:
            gpumagic.on(where)
        assert "type" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not factories.installed()


# ---------------------------------------------------------------- nothing is left behind
def _names():
    return {
        (owner.__name__, name): id(value)
        for owner in (torch, torch.fft, torch.nested, torch.utils.data.DataLoader, torch.Tensor)
        for name, value in vars(owner).items()
    }


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=3), max_leaves=8), st.data()
)
def test_any_nesting_with_any_failure_restores_everything(tree, data):
    before = _names()

    def enter(children, expected):
        where = data.draw(st.sampled_from(["0", "1", "cpu"]))
        device = torch.device("cpu" if where == "cpu" else f"cuda:{where}")
        try:
            with gpumagic.on(where):
                assert torch.zeros(1).device == device
                for child in children:
                    enter(child, device)
                if data.draw(st.booleans()):
                    raise KeyError(where)
        except KeyError:
            pass
        assert torch.zeros(1).device == expected

    enter(tree, torch.device("cpu"))
    assert _names() == before
    assert placement.placement() is None
    assert torch.cuda.current_device() == 0


def test_a_failure_to_install_leaves_the_current_device(monkeypatch):
    def fail(namespace):
        raise MemoryError

    monkeypatch.setattr(factories, "install", fail)
    with pytest.raises(MemoryError), gpumagic.on(1):
        pass
    assert torch.cuda.current_device() == 0
    assert placement.placement() is None


# ---------------------------------------------------------------- torch's own code
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


def test_what_on_cannot_wrap_is_said():
    with pytest.raises(TypeError, match="not a class"):
        gpumagic.on(1)(Batch)
    with pytest.raises(TypeError, match="not classmethod"):
        gpumagic.on(1)(classmethod(lambda cls: None))
    with pytest.raises(RuntimeError, match="not entered"):
        gpumagic.on(1).__exit__(None, None, None)


def test_a_proxy_to_something_dead_in_the_namespace_does_no_harm():
    import weakref

    namespace = {"dead": weakref.proxy(Batch([1.0])), "zeros": torch.zeros}
    entered = place.enter(GPU1, namespace=namespace)
    assert namespace["zeros"](1).device == GPU1
    place.leave(entered)
    assert namespace["zeros"] is torch.zeros


def test_a_failure_in_the_namespace_leaves_nothing_swapped():
    class Failing(dict):
        def items(self):
            raise MemoryError

    with pytest.raises(MemoryError):
        place.enter(GPU1, namespace=Failing())
    assert not factories.installed()
    assert torch.cuda.current_device() == 0


def test_collating_by_hand_lands_and_packing_works():
    from torch.utils.data import default_collate

    with gpumagic.on(1):
        assert default_collate([1, 2]).device == GPU1
        packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
        assert packed.data.device == GPU1
        assert packed.batch_sizes.device.type == "cpu"
