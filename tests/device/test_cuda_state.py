"""Advice on errors of CUDA, whether or not torch is in use."""

import sys
from types import SimpleNamespace

import pytest

from gpumagic.device import cuda_state

NO_GPU = RuntimeError("No CUDA GPUs are available")


@pytest.mark.parametrize("error", [NO_GPU, AssertionError("Torch not compiled with CUDA enabled")])
def test_without_torch_its_errors_need_no_advice(monkeypatch, error):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert cuda_state.advice(error) == ""
    # An import that failed leaves a module without its parts.
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert cuda_state.advice(error) == ""


def test_with_torch_the_advice_depends_on_its_gpus(monkeypatch):
    for there in (False, True):
        cuda = SimpleNamespace(is_available=lambda there=there: there)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        assert cuda_state.advice(NO_GPU).startswith("PyTorch finds no GPU") is not there
