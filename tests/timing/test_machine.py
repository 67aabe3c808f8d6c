"""What is said of this machine."""

import pytest
import torch

from gpumagic.timing import timing


def test_this_machine_without_starting_cuda():
    found = timing.this_machine()
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
    assert timing.this_machine(tmp_path / "cpuinfo").cpu == name


def test_elsewhere_it_is_what_python_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(timing.platform, "processor", lambda: "")
    monkeypatch.setattr(timing.platform, "machine", lambda: "aarch64")
    assert timing.this_machine(tmp_path / "none").cpu == "aarch64"
    monkeypatch.setattr(timing.platform, "machine", lambda: "")
    assert timing.this_machine(tmp_path / "none").cpu is None
