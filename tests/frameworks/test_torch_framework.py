"""torch by the contract of a framework: the calls that `%%ongpu` makes, for any framework."""

import pytest
import torch

from gpumagic.device import Device
from gpumagic.frameworks import known
from gpumagic.ledger.entry import Tally

pytestmark = pytest.mark.usefixtures("gpus")
GPU1 = Device("cuda", ordinal=1, virtual=True)
MIB = 2**20


@pytest.fixture
def adapter():
    return known.torch_itself()


def test_it_is_the_first_of_those_in_use(adapter):
    assert known.in_use()[0] is adapter
    assert known.counted_here()[0] is adapter
    assert adapter not in known.imported()
    assert [str(device) for device in adapter.devices()] == ["cuda:0", "cuda:1"]


def test_what_it_moves_it_remembers_and_brings_home(adapter):
    x = torch.ones(2)
    space, origins = {"x": x}, []
    moves = adapter.move(space.items(), GPU1, space, origins)
    assert [(moved.name, moved.nbytes) for moved in moves.moved] == [("x", 8)]
    assert adapter.where(x) == "cuda:1"
    adapter.remember(origins, "In [1]")
    assert adapter.away(space) == {"x": {"cuda:1"}}
    adapter.home(space)
    assert (adapter.where(x), adapter.away(space)) == ("cpu", {})


def test_new_tensors_are_placed_and_their_memory_is_measured(adapter):
    stop = adapter.peak(GPU1)
    with adapter.place(GPU1) as placed:
        made = torch.ones(MIB)
    (memory,) = stop()
    assert (adapter.where(made), adapter.nbytes(made), placed.delivered) == ("cuda:1", 4 * MIB, [])
    assert (memory.device, memory.peak - memory.before) == ("cuda:1", 4 * MIB)
    assert torch.ones(1).device.type == "cpu"


def test_copies_are_counted_within_the_context_alone(adapter):
    tally = Tally()
    x = torch.ones(2)
    with adapter.count(tally, strict=False):
        x.to("cuda:1")
    x.to("cuda:1")
    assert [(entry.source, entry.destination, entry.count) for entry in tally.ledger()] == [
        ("cpu", "cuda:1", 1)
    ]


def test_without_names_it_waits_for_the_gpus_that_have_started(adapter, monkeypatch):
    from gpumagic.moving import move

    waits = []
    torch.ones(1, device="cuda:1")
    monkeypatch.setattr(move, "wait_for", lambda device: waits.append(str(device)))
    adapter.wait()
    assert "cuda:1" in waits
    waits.clear()
    adapter.wait("cuda:0")
    assert waits == ["cuda:0"]


def test_no_advice_names_a_virtual_gpu_that_is_off(adapter, monkeypatch):
    x, y = torch.ones(3, device="cuda:1"), torch.ones(3)
    with pytest.raises(RuntimeError) as raised:
        x + y
    assert "y.to" in adapter.explain(raised.value, {}).fix.code
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    explained = adapter.explain(raised.value, {})
    assert (explained.fix, explained.first) == (None, None)
    assert [operand.name for operand in explained.operands] == ["x", "y"]
    assert str(explained).endswith(
        "  why: virtual GPUs are off, so their tensors are unusable; create these tensors again"
    )
