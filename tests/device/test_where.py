"""Names of devices: every spelling, every mistake, and CUDA's rules of what is visible."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpumagic import device
from gpumagic.device import CPU, Device, complete, resolve, resolve_one
from gpumagic.errors import GpuError

GIB = 2**30


def gpu(ordinal: int, **facts: object) -> Device:
    defaults = {"uuid": f"GPU-{ordinal}a", "index": ordinal, "memory_free": ordinal * GIB}
    return Device("cuda", ordinal, **{**defaults, **facts})  # type: ignore[arg-type]


TWO = [gpu(0), gpu(1)]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    device.set_virtual(None)


@pytest.mark.parametrize(
    "where",
    [
        *("1", "gpu:1", "GPU:1", "cuda:1", "/gpu:1", "/GPU:1", "/device:GPU:1", "/cuda:1"),
        *(" 1 ", "GPU-1", "gpu-1a", "GPU-1a", "free", "1?", "cuda:1?", 1),
        torch.device("cuda", 1),
        TWO[1],
    ],
)
def test_every_spelling_of_the_second_gpu(where: object) -> None:
    assert resolve(where, TWO) == [TWO[1]]


@pytest.mark.parametrize(
    "where",
    ["cpu", "CPU", "cpu:0", "/cpu:0", "/device:CPU:0", torch.device("cpu")],
)
def test_every_spelling_of_the_cpu(where: object) -> None:
    assert resolve(where, TWO) == [CPU]


def test_the_cpu_wakes_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumagic.device.where.here", lambda: pytest.fail("asked for GPUs"))
    assert resolve(" cpu ") == [CPU]


@pytest.mark.parametrize("where", ["cuda", "gpu", "/gpu", torch.device("cuda")])
def test_bare_names_mean_the_current_device(where: object) -> None:
    assert resolve(where, TWO) == [TWO[0]]
    assert resolve(where, TWO, current=1) == [TWO[1]]


def test_lists_keep_their_order() -> None:
    assert resolve("1, 0", TWO) == [TWO[1], TWO[0]]
    assert resolve("cpu,cuda:0", TWO) == [CPU, TWO[0]]
    assert resolve("all", TWO) == TWO


def test_mig_by_its_uuid() -> None:
    mig = gpu(0, uuid="MIG-77aa-11")
    assert resolve("MIG-77aa-11", [mig]) == [mig]


def test_free_is_the_most_free_memory_and_not_the_unknown() -> None:
    some = [gpu(0, memory_free=None), gpu(1, memory_free=3), gpu(2, memory_free=5)]
    assert resolve_one("free", some) == some[2]
    with pytest.raises(GpuError, match="no GPU reports its free memory; type 0"):
        resolve("free", [gpu(0, memory_free=None)])


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (
            "7",
            "no GPU 7: there are cuda:0 and cuda:1; type 0, 1, cpu, or 7? to fall back to the CPU",
        ),
        (
            "cuda:7",
            "no cuda:7: there are cuda:0 and cuda:1; "
            "type 0, 1, cpu, or cuda:7? to fall back to the CPU",
        ),
        (
            "GPU-ff",
            "no GPU-ff: cuda:0 is GPU-0a, cuda:1 is GPU-1a; "
            "type 0, 1, cpu, or GPU-ff? to fall back to the CPU",
        ),
        ("cpu:1", "no cpu:1: the CPU is one device; type cpu"),
        ("0,,1", "a device is missing in '0,,1'; type 0, 1 or cpu"),
        ("", "a device is missing in ''; type 0, 1 or cpu"),
        ("?", "a device is missing in '?'; type 0, 1 or cpu"),
        ("1,gpu:1", "cuda:1 is named twice in '1,gpu:1'; name each device once"),
        ("all,0", "cuda:0 is named twice in 'all,0'; name each device once"),
        ("7?,8?", "cpu is named twice in '7?,8?'; name each device once"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_type(where: str, line: str) -> None:
    with pytest.raises(GpuError) as caught:
        resolve(where, TWO)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    "where", ["gpu:x", "gpu1", "-1", "1.0", "GPU-", "cuda:", "one\ntwo", True, None, 1.0, -1, [0]]
)
def test_what_is_no_device_is_told_how_to_write_one(where: object) -> None:
    with pytest.raises(GpuError, match=r"is not a device; .*type 1, gpu:1, cuda:1") as caught:
        resolve(where, TWO)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "meant"),
    [("cuda1", "cuda:1"), ("gpu0", "gpu:0"), ("fre", "free"), ("12x", None), ("banana", None)],
)
def test_what_was_meant_is_asked(where: str, meant: str | None) -> None:
    with pytest.raises(GpuError) as caught:
        resolve(where, TWO)
    asked = f"'{where}' is not a device; did you mean {meant}? type 1, "
    assert str(caught.value).startswith(asked) == (meant is not None)
    assert ("did you mean" in str(caught.value)) == (meant is not None)


@pytest.mark.parametrize("where", ["0", "cuda", "all", "free", "GPU-1", 0])
def test_without_gpus_virtual_ones_are_offered(where: object) -> None:
    with pytest.raises(GpuError, match=r"has no GPU .* type cpu, or .*%gpus --virtual 2"):
        resolve(where, [])


def test_with_a_question_mark_the_cpu_stands_in_and_says_so() -> None:
    (found,) = resolve("cuda:7?", TWO)
    assert found == CPU
    assert found.note == "asked for cuda:7, which is not here"
    assert resolve("all?", [])[0].note
    assert resolve("1?", TWO)[0].note is None


def test_a_question_mark_does_not_excuse_a_wrong_spelling() -> None:
    with pytest.raises(GpuError, match="is not a device"):
        resolve("gpu:x?", TWO)


def test_an_ambiguous_uuid_lists_them() -> None:
    with pytest.raises(GpuError, match="matches 2 UUIDs: GPU-aa1 and GPU-aa2"):
        resolve("GPU-aa", [gpu(0, uuid="GPU-aa1"), gpu(1, uuid="GPU-aa2")])


def test_one_device_is_needed() -> None:
    assert resolve_one("all", TWO[:1]) == TWO[0]
    with pytest.raises(GpuError, match=r"'0,1' names cuda:0 and cuda:1"):
        resolve_one("0,1", TWO)


def test_mps_only_on_a_mac_with_apple_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(GpuError, match="no mps: it is the GPU of Macs"):
        resolve("mps", TWO)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("gpumagic.device.where.machine", lambda: "arm64")
    assert str(resolve_one("mps", [])) == "mps"


@given(
    st.one_of(
        st.text(max_size=20),
        st.text("0123456789,?cudagp:/GPUMI- xl", max_size=12),
        st.integers(),
        st.none(),
        st.booleans(),
        st.floats(),
    )
)
def test_anything_at_all_is_devices_or_one_line(where: object) -> None:
    try:
        found = resolve(where, TWO)
    except GpuError as error:
        found, said = [], str(error)
    else:
        said = "found"
    assert len(said.splitlines()) == 1
    assert set(found) <= {*TWO, CPU}
    assert len(set(found)) == len(found)
    assert bool(found) == (said == "found")


@given(st.lists(st.sampled_from(["0", "1", "cpu", "7?"]), min_size=1, max_size=4, unique=True))
def test_a_list_is_its_parts(parts: list[str]) -> None:
    single = {part: resolve_one(part, TWO) for part in parts}
    if {"cpu", "7?"} <= set(parts):
        with pytest.raises(GpuError, match="is named twice"):
            resolve(",".join(parts), TWO)
    else:
        assert resolve(",".join(parts), TWO) == list(single.values())


def test_labels() -> None:
    assert str(gpu(1)) == gpu(1).label == "cuda:1"
    assert gpu(1, virtual=True).label == "cuda:1 (virtual)"
    assert str(CPU) == "cpu"


def test_equality_is_about_the_place() -> None:
    assert gpu(0) == gpu(0, memory_free=17, note="said")
    assert gpu(0) != gpu(0, uuid="GPU-other")


def test_virtual_ones_stand_in_for_all() -> None:
    device.set_virtual(lambda: [gpu(0, virtual=True)])
    assert device.here() == [gpu(0, virtual=True)]
    frees = iter([3, 9])
    device.set_virtual(lambda: [gpu(0, virtual=True, memory_free=next(frees))])
    assert [device.here()[0].memory_free for _ in range(2)] == [3, 9]


def test_completion() -> None:
    assert complete("", TWO) == ["0", "1", "cuda:0", "cuda:1", "cpu", "free", "all"]
    assert complete("c", TWO) == ["cuda:0", "cuda:1", "cpu"]
    assert complete("0,", TWO) == ["0,1", "0,cuda:0", "0,cuda:1", "0,cpu", "0,free", "0,all"]
    assert complete("0, CUDA", TWO) == ["0, cuda:0", "0, cuda:1"]
    assert complete("GPU-", TWO) == ["GPU-0a", "GPU-1a"]
    assert complete("", []) == ["cpu"]


@given(st.text("01,cudagp:/GPU-afr", max_size=8))
def test_each_completion_goes_on_from_what_was_typed_and_is_a_where(prefix: str) -> None:
    for text in complete(prefix, TWO):
        assert text.lower().startswith(prefix.lower())
        assert resolve(text.rpartition(",")[2], TWO)


def test_import_is_light() -> None:
    program = (
        "import sys, gpumagic.device, gpumagic.telemetry.collect;"
        "print([m for m in ('torch', 'IPython', 'pynvml', 'platformdirs', 'numpy')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
