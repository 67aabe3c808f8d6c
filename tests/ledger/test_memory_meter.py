"""Peak memory of a stretch of code, nested stretches included, on devices that it touched."""

import pytest
import torch

from gpumagic.ledger.dispatch import MemoryMeter, meters

pytestmark = pytest.mark.usefixtures("gpus")
MIB = 2**20


def on(device, mebibytes):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device=device)


def test_the_peak_counts_what_was_there_and_only_touched_devices_are_told():
    kept = on("cuda:1", 2)
    meter = MemoryMeter()
    meter.start()
    on("cuda:1", 5)  # freed at once
    late = on("cuda:1", 1)
    (memory,) = meter.stop()
    assert memory.device == "cuda:1"
    assert memory.peak == 7 * MIB
    assert memory.before == 2 * MIB
    assert memory.allocated == 3 * MIB
    assert kept.is_cuda
    assert late.is_cuda


def test_an_inner_stretch_does_not_lose_the_outer_ones_peak():
    outer, inner = MemoryMeter(), MemoryMeter()
    for before, within in ((8, 3), (2, 9)):
        outer.start()
        on("cuda:0", before)
        inner.start()
        on("cuda:0", within)
        assert inner.stop()[0].peak == within * MIB
        assert outer.stop()[0].peak == max(before, within) * MIB
        assert not meters


def test_nothing_touched_and_stopping_twice():
    meter = MemoryMeter()
    meter.start()
    assert meters
    assert meter.stop() == []
    assert meter.stop() == []


def test_without_cuda_nothing_is_initialized(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    meter = MemoryMeter()
    meter.start()
    on("cuda:0", 1)
    assert meter.stop() == []
