"""Where virtual GPUs are refused, and how an unknown build of torch is tried."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from gpumagic import virtual
from gpumagic.errors import GpuError
from gpumagic.virtual import gate

PACKAGE = Path(virtual.__file__).parent


@pytest.mark.parametrize(
    ("devices", "memory", "said"),
    [
        (99, "1GiB", "virtual GPUs: 99 requested, 1 to 8 are possible; type "),
        (0, "1GiB", "virtual GPUs: 0 requested, 1 to 8 are possible; type "),
        (True, "1GiB", "virtual GPUs: True requested"),
        ("2", "1GiB", "virtual GPUs: 2 requested"),
        (
            2,
            "much",
            "virtual GPUs: their memory cannot be 'much', 1MiB to 1TiB are possible; type for",
        ),
        (2, -1, "memory cannot be -1, "),
        (2, True, "memory cannot be True, "),
        (2, "10", "memory cannot be '10', "),
        (2, 10, "memory cannot be 10, 1MiB to 1TiB"),
        (2, "100TiB", "memory cannot be '100TiB', "),
    ],
)
def test_bad_input_is_one_line(devices, memory, said):
    with pytest.raises(GpuError, match=re.escape(said)) as caught:
        virtual.enable(devices, memory)
    assert "\n" not in str(caught.value)
    assert not virtual.enabled()


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("512 mib", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        (2**20, 2**20),
    ],
)
def test_memory(memory, size):
    virtual.enable(1, memory)
    try:
        assert torch.cuda.get_device_properties(0).total_memory == size
    finally:
        virtual.disable()


def refuses(said, **options):
    with pytest.raises(GpuError, match=re.escape(said)) as caught:
        virtual.enable(2, **options)
    assert "\n" not in str(caught.value)
    assert not virtual.enabled()


def test_a_rocm_build(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    refuses("no virtual GPUs: they imitate CUDA, and this is a ROCm build of PyTorch")


def test_an_old_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    refuses("they need PyTorch 2.10 or later; this is 2.9.1")


def test_a_real_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refuses("this machine has a real GPU; add --force")


def test_a_real_gpu_in_use_even_with_force(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    refuses(
        "this process has used its real GPU; restart the kernel and turn virtual GPUs on first",
        force=True,
    )


def test_force_with_a_real_gpu_is_tried_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gate, "trial", lambda: "signal 11: boom")
    refuses("failed: signal 11: boom", force=True)


def test_force_hides_the_real_gpu_until_off(monkeypatch):
    with monkeypatch.context() as real:
        real.setattr(torch.cuda, "device_count", lambda: 1)
        real.setattr(gate, "trial", lambda: None)
        virtual.enable(2, force=True)
    try:
        assert torch.cuda.device_count() == 2
    finally:
        virtual.disable()


def test_a_missing_symbol(monkeypatch):
    monkeypatch.setattr(gate, "GET_HOOKS", "_ZN2at6nowhereEv")
    refuses("libtorch_cpu.so: undefined symbol: _ZN2at6nowhereEv)")


def test_another_order_of_the_hooks(monkeypatch):
    monkeypatch.setattr(gate, "header_order", lambda: ["~A", "isAvailable", "isBuilt"])
    refuses("lays its CUDA hooks out differently (~A, isAvailable, isBuilt)")


def test_this_build_passes_the_static_check():
    assert gate.static_problem() is None
    assert gate.header_order()[1:5] == list(gate.YES)


def test_torch_may_have_put_its_fake_guard_there_already(runtime):
    # On a build for CUDA it does so for fake tensors: torch.compile and torch.export make some.
    with ExitStack() as stack:
        gate.install(stack)
        for _ in range(2):
            virtual.enable(2)
            try:
                assert torch.ones(2, device="cuda:1").sum().item() == 2.0
            finally:
                virtual.disable()


@pytest.mark.parametrize("version", ["2.14.0.dev20260101", "2.13.0a0+gitabc", "3.0.0"])
def test_an_untested_version_is_tried_in_a_child(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(gate, "trial", lambda: "exit code 1: no")
    refuses(f"a trial with PyTorch {version} failed: exit code 1: no")


@pytest.mark.slow
def test_the_trial_passes():
    assert gate.trial() is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.abort()", "signal 6: no output"),
        ("raise SystemExit('no\\nnot at all')", "exit code 1: not at all"),
        ("print('nearly')", "exit code 0: no output"),
    ],
)
def test_a_trial_that_fails(code, said):
    assert gate.trial(code) == said


def test_a_trial_that_hangs(monkeypatch):
    monkeypatch.setattr(gate, "TIMEOUT_S", 0.2)
    assert gate.trial("__import__('threading').Event().wait()") == "it did not end in time"


def test_what_is_set_in_torch_is_set_through_patch_which_puts_it_back():
    for path in PACKAGE.glob("*.py"):
        set_directly = re.findall(r"^\s*(?:C|torch)(?:\.\w+)+ = ", path.read_text(), re.M)
        assert not set_directly, path.name
