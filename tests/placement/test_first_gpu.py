"""A library that picks the first GPU gets the placement's; the user's own code does not."""

import copy
import importlib
import pickle
import sys

import pytest
import torch
from torch import nn

import gpumagic
from gpumagic.placement import swap, twins

pytestmark = pytest.mark.usefixtures("gpus")
GPU0, GPU1 = torch.device("cuda:0"), torch.device("cuda:1")
LIBRARY = """
import torch
from dataclasses import dataclass, field
from torch import device as Device, nn

@dataclass
class Config:
    rank: int = 0
    device: object = field(default_factory=lambda: torch.device("cuda:0"))

class Net(nn.Linear):
    def to(self, *args, **kwargs):
        return super().to(*args, **kwargs)
    def cuda(self, device=None):
        return super().cuda(device)

def devices():
    i = 0
    return [
        torch.device("cuda:0"), torch.device("cuda", 0), torch.device(type="cuda", index=i),
        torch.device(f"cuda:{i}"), torch.device(0), Device("cuda:0"), Config().device,
    ]
def moved(x):
    return [x.to(0), x.to("cuda:0"), x.to(device="cuda:0"), x.cuda(0), x.to("cuda:0", torch.half)]
def made():
    return [torch.zeros(2, device="cuda:0"), torch.tensor([1], device=0)]
def networks():
    return [nn.Linear(1, 1).to("cuda:0"), nn.Linear(1, 1).to(0), nn.Linear(1, 1).cuda(0)]
def count():
    return torch.cuda.device_count(), torch.accelerator.device_count()
def second(x):
    return x.to(1).device, torch.device("cuda", 1), x.to("cuda:1").device
def current():
    torch.cuda.set_device(0)
    with torch.cuda.device("cuda:0"):
        return torch.cuda.current_device()
def there(x):
    return torch.zeros(2, device=x.device) + x.to(torch.device(x.device))
def on(device):
    return torch.zeros(2, device=device), torch.device(device), torch.zeros(2).to(device)
def annotated(device: torch.device) -> torch.device:
    return device
def free():
    return torch.cuda.mem_get_info(0)[0]
def parallel(net): return nn.DataParallel(net, device_ids=[0, 1]).device_ids
"""


@pytest.fixture
def library(installed):
    (installed / "picks_of_gpumagic.py").write_text(LIBRARY)
    import picks_of_gpumagic

    yield picks_of_gpumagic
    del sys.modules["picks_of_gpumagic"]


def test_each_way_in_which_a_library_names_the_first_gpu(library):
    x = torch.ones(2)
    with gpumagic.on(1):
        assert set(library.devices()) == {GPU1}
        assert {t.device for t in (*library.moved(x), *library.made())} == {GPU1}
        assert {p.device for net in library.networks() for p in net.parameters()} == {GPU1}
        assert library.count() == (1, 1)
        assert library.current() == 1
        held = torch.empty(64 * 2**20)
        assert library.free() == torch.cuda.mem_get_info(1)[0]
        assert torch.cuda.mem_get_info(0)[0] - library.free() >= held.nbytes
    assert set(library.devices()) == {GPU0}
    assert {t.device for t in library.moved(x)} == {GPU0}
    assert library.count() == (2, 2)


def test_a_librarys_other_gpu_and_the_cpu_are_what_it_says(library):
    with gpumagic.on(1):
        assert set(library.second(torch.ones(2))) == {GPU1}
    with gpumagic.on(0):
        assert set(library.second(torch.ones(2))) == {GPU1}
        assert library.count() == (1, 1)
    with gpumagic.on("cpu"):
        assert set(library.devices()) == {GPU0}
        assert library.count() == (2, 2)


def test_the_users_own_code_means_what_it_says():
    with gpumagic.on(1):
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 2
        assert torch.device("cuda:0") == torch.device("cuda", 0) == torch.device(0) == GPU0
        assert torch.ones(2).to(0).device == torch.ones(2).cuda(0).device == GPU0
        assert torch.ones(2, device="cuda:0").device == GPU0
        one, two = nn.Linear(2, 2).to("cuda:0"), nn.Linear(2, 2).cuda(1)
        assert two(one(torch.ones(2, device=0)).to(GPU1)).device == GPU1
        assert nn.DataParallel(nn.Linear(2, 2).to(0)).device_ids == [0, 1]
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0


def test_an_explicit_device_of_the_users_wins_within_a_library(library):
    name, device = "cuda:0", torch.device("cuda:0")
    with gpumagic.on(1):
        for given in (name, device):
            tensor, named, moved = library.on(given)
            assert {tensor.device, named, moved.device} == {GPU0}
        assert library.there(torch.ones(2, device=0)).device == GPU0
        nets = [library.Net(1, 1).to(name), library.Net(1, 1).to(0), library.Net(1, 1).cuda(0)]
        assert {net.weight.device for net in nets} == {GPU0}
        assert library.parallel(nn.Linear(1, 1).to(0)) == [0, 1]
        with torch.device("cuda:0"):
            assert set(library.devices()) == {GPU0}


def test_a_devices_copies_are_the_same(library):
    with gpumagic.on(1):
        assert copy.deepcopy(GPU0) == pickle.loads(pickle.dumps(GPU0)) == GPU0
        assert copy.deepcopy(library.Config(device=GPU0)).device == GPU0


def test_the_type_of_a_device_stays_what_it_is(library):
    real = torch.device
    with gpumagic.on(1):
        assert isinstance(GPU0, torch.device)
        assert isinstance(torch.device("cpu"), real)
        assert issubclass(real, torch.device)
        assert torch.device == real
        assert real in {torch.device: 1}
        assert repr(torch.device) == repr(real)
        assert pickle.loads(pickle.dumps(torch.device)) is torch.device
        with pytest.raises(RuntimeError, match="device type"):
            torch.device("gpu")
        from torch import device

        space = {"device": device}
    assert torch.device is library.Device is real
    assert space["device"]("cuda:0") == GPU0
    assert not {"to", "cuda", "__new__"} & vars(torch.Tensor).keys()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_reads_annotations(library):
    with gpumagic.on(1):
        scripted = torch.jit.script(library.annotated)
        assert scripted(GPU0) == GPU0


def fixed(x):
    device = torch.device("cuda", 0)
    first = x.to(device) if isinstance(x.device, torch.device) else x
    return first.cuda(0), x.to("cuda:1")


@pytest.mark.filterwarnings("ignore")
def test_the_compiler_follows_devices():
    for _ in range(2):
        with gpumagic.on(1):
            whole = torch.compile(fixed, backend="eager", fullgraph=True)
            first, second = whole(torch.ones(2))
            assert (first.device, second.device) == (GPU0, GPU1)
        torch.compiler.reset()
    whole = torch.compile(fixed, backend="eager", fullgraph=True)
    assert whole(torch.ones(2))[0].device == GPU0


HOOKS = """
class Hook:
    def __init__(self, device):
        self.device = device
    def pre_forward(self, x):
        return x.to(self.device)
def attach(execution_device):
    return [Hook(device) for device in execution_device.values()]
"""


@pytest.fixture
def hooks(installed, monkeypatch):
    (installed / "accelerate").mkdir()
    (installed / "accelerate" / "hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(installed / "accelerate")
    twin = twins.IN_LIBRARIES["accelerate.big_modeling"]["attach_align_device_hook_on_blocks"]
    monkeypatch.setitem(twins.IN_LIBRARIES, "hooks", {"attach": twin})
    yield importlib.import_module("hooks")
    del sys.modules["hooks"]


def test_hooks_of_a_device_map_send_to_the_devices_chosen_at_the_dispatch(hooks):
    def sent(attached):
        return [hook.pre_forward(torch.ones(2)).device for hook in attached]

    several = [{"a": 0, "b": 1}, {"a": "cuda:0", "b": "cuda:1"}, {"a": GPU0, "b": GPU1}]
    earlier = [hooks.attach(execution_device=device_map) for device_map in several]
    with gpumagic.on(1):
        assert [sent(attached) for attached in earlier] == [[GPU0, GPU1]] * 3
        attached = [hooks.attach(execution_device=device_map) for device_map in several]
        assert [sent(each) for each in attached] == [[GPU0, GPU1]] * 3
        single = hooks.attach(execution_device={"a": 0, "b": "cpu"})
        assert sent(single) == [GPU1, torch.device("cpu")]  # the library picked the first GPU
    assert sent(single) == [GPU1, torch.device("cpu")]  # where the weights are


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"": 0}, {"": GPU1}),
        ({"a": 0, "b": "cpu"}, {"a": GPU1, "b": "cpu"}),
        ({"a": 0, "b": 1}, {"a": GPU0, "b": GPU1}),  # the user's two GPUs
        ({"": "cuda:0"}, {"": "cuda:0"}),
        (None, None),
    ],
)
def test_a_device_map_has_devices_for_numbers(given, expected, installed, monkeypatch):
    # transformers copies on threads, on which no placement is in force.
    (installed / "maps_of_gpumagic.py").write_text(
        "def _get_device_map(device_map): return device_map\n"
        "def load(device_map): return _get_device_map(device_map)\n"
    )
    real = twins.IN_LIBRARIES["transformers.modeling_utils"]
    monkeypatch.setitem(twins.IN_LIBRARIES, "maps_of_gpumagic", real)
    import maps_of_gpumagic

    with gpumagic.on(1):
        assert maps_of_gpumagic.load(given) == expected
    assert maps_of_gpumagic.load(given) == given
    del sys.modules["maps_of_gpumagic"]


def test_whose_first_gpu_was_taken_is_noted(library):
    place = swap.enter(GPU1)
    try:
        torch.device("cuda:0")
        assert not place.taken
        library.devices()
        assert [*place.taken] == ["picks_of_gpumagic"]
    finally:
        swap.leave(place)
