"""The devices that torch can use, by the names that people give them, and the textbook's."""

import pytest
import torch

import gpumagic
from gpumagic import device as names
from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.placement import torch_devices


def test_the_textbooks_functions_print_as_the_book_prints_them(gpus):
    assert str((gpumagic.cpu(), gpumagic.gpu(), gpumagic.gpu(1))) == (
        "(device(type='cpu'), device(type='cuda', index=0), device(type='cuda', index=1))"
    )
    assert gpumagic.num_gpus() == 2
    assert str((gpumagic.try_gpu(), gpumagic.try_gpu(10), gpumagic.try_all_gpus())) == (
        "(device(type='cuda', index=0), device(type='cpu'), "
        "[device(type='cuda', index=0), device(type='cuda', index=1)])"
    )


def test_without_a_gpu():
    assert gpumagic.num_gpus() == 0
    assert gpumagic.try_gpu() == gpumagic.cpu() == torch.device("cpu")
    assert gpumagic.try_all_gpus() == []
    assert gpumagic.devices() == []
    with pytest.raises(GpuError, match=r"no GPU 1: .*type cpu, or .*%gpus --virtual 2"):
        torch_devices.find(1)


def test_virtual_ones_are_found_by_all_their_names(gpus):
    first, second = gpumagic.devices()
    assert (first.ordinal, first.virtual, first.memory_total) == (0, True, 2**30)
    for where in (1, "cuda:1", "/GPU:1", second.uuid[:12], torch.device("cuda", 1), second):
        assert torch_devices.as_torch(torch_devices.find(where)) == torch.device("cuda", 1)
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda:0")
    assert torch_devices.find("free").ordinal == 1
    torch.cuda.set_device(1)
    assert torch_devices.find("cuda").ordinal == 1
    torch.cuda.set_device(0)
    assert held.is_cuda


def test_a_gpu_that_this_torch_cannot_use_is_told_from_none(monkeypatch):
    there = [Device("cuda", ordinal=0, name="H100")]
    monkeypatch.setattr(names, "here", lambda env=None, memory=True: there)
    with pytest.raises(GpuError, match=r"cuda:0 is there, but torch .* cannot use it"):
        torch_devices.find(0)
    assert torch_devices.find("cpu").kind == "cpu"
    assert torch_devices.find("7?").kind == "cpu"


def test_where_nvml_is_silent_torch_is_asked(gpus, monkeypatch):
    monkeypatch.setattr(names, "here", lambda env=None, memory=True: [])
    found = gpumagic.devices()
    assert [d.ordinal for d in found] == [0, 1]
    assert found[0].memory_free <= 2**30
    assert torch_devices.find("free").kind == "cuda"


def test_the_order_of_ordinals_is_torchs_once_cuda_runs(gpus, monkeypatch):
    told = []
    monkeypatch.setattr(names, "set_cuda_order", lambda found, free: told.append(found))
    torch_devices.tell_cuda_order()
    assert [d.uuid for d in told[0]] == [d.uuid for d in gpumagic.devices()]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    torch_devices.tell_cuda_order()
    assert told[-1] is None


def test_virtual_ones_that_went_are_forgotten(gpus):
    from gpumagic import virtual

    torch_devices.find(1)  # tells the order of ordinals
    virtual.disable()
    assert names.here() == []
    virtual.enable(2, 2**30)


def test_intels_gpus_are_torchs_where_it_has_them(monkeypatch):
    there = [Device("xpu", ordinal=0, uuid="PCI-0000:03:00.0", name="Intel Arc B580")]
    monkeypatch.setattr(names, "here", lambda env=None, memory=True: there)
    with pytest.raises(GpuError, match=r"xpu:0 is there, but torch .* cannot use it; "):
        torch_devices.find("xpu:0")
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    for where in ("xpu:0", "xpu", 0, "gpu:0", "PCI-0000", torch.device("xpu", 0)):
        assert torch_devices.as_torch(torch_devices.find(where)) == torch.device("xpu", 0)
    with pytest.raises(GpuError, match=r"no cuda:0: there is only xpu:0 \(Intel Arc B580\)"):
        torch_devices.find("cuda:0")
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)  # of a card with two tiles
    monkeypatch.setattr(torch.xpu, "get_device_name", "tile {}".format)
    assert [(str(each), each.name) for each in torch_devices.devices(memory=False)] == [
        ("xpu:0", "tile 0"),
        ("xpu:1", "tile 1"),
    ]


@pytest.mark.parametrize("spelled", ["1", "cuda:1", "gpu:1", torch.device("cuda:1")])
def test_a_gpu_has_any_of_its_spellings(gpus, spelled):
    assert gpumagic.gpu(spelled) == gpumagic.try_gpu(spelled) == torch.device("cuda:1")
    assert gpumagic.try_gpu("cuda:7") == gpumagic.try_gpu(torch.device("cuda:7")) == gpumagic.cpu()
    for take in (gpumagic.gpu, gpumagic.try_gpu):
        with pytest.raises(gpumagic.GpuError, match="is not a device"):
            take("cuda.1")
