"""What lands on the device, and what the user decides otherwise."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import gpumagic

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


def test_an_array_that_may_not_be_written_is_copied_without_torchs_warning():
    array = np.ones(2)
    array.flags.writeable = False
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), gpumagic.on(1):
            warnings.simplefilter("error")
            assert torch.from_numpy(array).device == GPU1
        with pytest.warns(UserWarning, match="not writable"), gpumagic.on("cpu"):
            assert torch.from_numpy(array).data_ptr() == array.ctypes.data
    finally:
        torch.set_warn_always(False)


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


def test_collating_by_hand_lands_and_packing_works():
    from torch.utils.data import default_collate

    with gpumagic.on(1):
        assert default_collate([1, 2]).device == GPU1
        packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
        assert packed.data.device == GPU1
        assert packed.batch_sizes.device.type == "cpu"


@pytest.mark.parametrize(
    "module", ["diffusers.schedulers.scheduling_euler", "fastai.data.transforms"]
)
def test_libraries_whose_small_tensors_go_to_numpy_keep_them_on_the_host(module):
    space = {"__name__": module, "torch": torch}
    exec("def order(n): return torch.randperm(n).numpy()", space)
    with gpumagic.on(1):
        assert sorted(space["order"](3)) == [0, 1, 2]
