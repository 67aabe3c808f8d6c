"""Which GPUs CUDA shows: its rules for CUDA_VISIBLE_DEVICES, and torch as the reference."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpumagic import device
from gpumagic.device import Device, visible


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    device.set_cuda_order(None)


def four(**facts: object) -> list[Device]:
    return [
        Device("cuda", None, f"GPU-{'aabc'[n]}{n}", n, **{"name": "H100", **facts})  # type: ignore[arg-type]
        for n in range(4)
    ]


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 3 , 1 ", [3, 1]),
        ("1,-1,2", [1]),
        ("1,9,2", [1]),
        ("1,,2", [1]),
        ("1,x,2", [1]),
        ("1,1", []),
        ("9,9", []),
        ("1gpu,2", [1, 2]),
        ("GPU-b", [2]),
        ("GPU-c3,GPU-a0", [3, 0]),
        ("GPU-a", []),
        ("GPU-c,GPU-a,GPU-b", [3]),
        ("GPU-c,GPU-c3", []),
        ("GPU-c,0", [3]),
        ("0,GPU-c", [0]),
        ("GPU-zz,GPU-c", []),
        ("MIG-a", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(setting: str | None, indices: list[int]) -> None:
    env = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    found = visible(four(), env)
    assert [place.index for place in found] == indices
    assert [place.ordinal for place in found] == list(range(len(indices)))


def test_cuda_shows_one_mig_device_and_nothing_beside_it() -> None:
    migs = [Device("cuda", None, f"MIG-{n}", 1) for n in "xy"]
    physical = [*four()[:2], *migs, *four()[2:]]

    def uuids(setting: str | None) -> list[str | None]:
        env = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
        return [place.uuid for place in visible(physical, env)]

    assert uuids(None) == ["MIG-x"]
    assert uuids("1") == ["MIG-x"]
    assert uuids("2,3") == ["GPU-b2", "GPU-c3"]
    assert uuids("MIG-y") == ["MIG-y"]
    assert uuids("MIG-y,MIG-x") == ["MIG-y"]


def test_the_order_of_unlike_gpus_is_certain_only_if_told() -> None:
    unlike = [*four(), Device("cuda", None, "GPU-z", 4, "RTX 4090")]

    def certain(**env: str) -> set[bool]:
        return {place.ordinal_certain for place in visible(unlike, env)}

    assert certain() == {False}
    assert certain(CUDA_VISIBLE_DEVICES="0,1") == {False}
    assert certain(CUDA_DEVICE_ORDER="PCI_BUS_ID") == {True}
    assert certain(CUDA_VISIBLE_DEVICES="GPU-z,GPU-c") == {True}
    assert {place.ordinal_certain for place in visible(four(), {})} == {True}


@settings(deadline=None)
@example("-0")
@example("0,-1,2")
@example("+1,-0")
@given(st.text("0123456789,-+ GPUMI-abcx", max_size=14))
def test_visible_devices_as_torch_reads_them(setting: str) -> None:
    cuda = pytest.importorskip("torch.cuda")
    physical = four()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", setting)
        try:
            said = cuda._parse_visible_devices()
        except ValueError:
            # torch gives up on a sign without digits, where CUDA ends the list.
            return
    if setting.startswith("GPU-"):
        said = cuda._transform_uuid_to_ordinals(said, [place.uuid for place in physical])
    expected = list(takewhile(lambda index: index in range(4), said))
    found = visible(physical, {"CUDA_VISIBLE_DEVICES": setting})
    assert [place.index for place in found] == expected


def test_cudas_own_order_is_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [SimpleNamespace(uuid=p.uuid, index=p.index, name="H", memory_total=1) for p in four()]
    door = SimpleNamespace(gpus=lambda: known, memory_free=lambda: {"GPU-c3": 5})
    monkeypatch.setattr("gpumagic.nvml.shared_nvml", lambda: door)
    device.set_cuda_order([device.Device("cuda", uuid=uuid) for uuid in ("c3", "GPU-a0")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = device.here()
    assert [(p.ordinal, p.index, p.memory_free) for p in found] == [(0, 3, 5), (1, 0, None)]
