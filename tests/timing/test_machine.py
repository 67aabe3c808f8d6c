"""What is said of this machine."""

import pytest
import torch

from gpumagic.timing.result import machine


def test_this_machine_without_starting_cuda():
    found = machine.here()
    assert found.torch == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert found.cpu_count >= 1
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: AMD EPYC  9654\nflags : x\n", "AMD EPYC 9654"),
        ("model name : A\n\nmodel name : B\n", "A"),
    ],
)
def test_linux_says_the_model(tmp_path, text, name):
    (tmp_path / "cpuinfo").write_text(text)
    assert machine.here(tmp_path / "cpuinfo").cpu == name


def test_elsewhere_it_is_what_python_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert machine.here(tmp_path / "none").cpu == "aarch64"
    monkeypatch.setattr(machine.platform, "machine", lambda: "")
    assert machine.here(tmp_path / "none").cpu is None
