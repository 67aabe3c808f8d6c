"""A fault of gpumagic itself: the cell has its result, a line says it, the doctor shows it."""

from contextlib import contextmanager

import pytest

import gpumagic
from gpumagic import faults
from gpumagic.frameworks.torch_framework import Torch
from gpumagic.frameworks.watching import watch
from gpumagic.ledger.entry import Tally


@pytest.fixture(autouse=True)
def _none_before():
    faults.forget()
    yield
    faults.forget()


def broken(*args, **kwargs):
    raise ValueError("a broken ledger")


@contextmanager
def stopped_and_broken(*args, real=Torch.count, **options):
    with real(*args, **options):
        yield
    broken()


BROKEN = {
    "start": (Torch, "count", broken),
    "stop": (Torch, "count", stopped_and_broken),
    "ledger": (Tally, "ledger", broken),
}


@pytest.mark.parametrize("step", BROKEN)
def test_a_broken_ledger_is_said_and_the_cell_runs(ip, monkeypatch, step):
    ip.run("X = torch.ones(3)")
    monkeypatch.setattr(*BROKEN[step])
    done = ip.run("%%ongpu 1\nX * 2")
    monkeypatch.undo()
    assert done.result.tolist() == [2, 2, 2]
    assert done.result.device.index == 1
    said = [line for line in done.text.splitlines() if line.startswith("gpumagic failed while")]
    assert len(said) == 1
    assert said[0].endswith("ValueError: a broken ledger; %gpus --doctor shows where")
    assert "some copies or waits were not counted" in str(gpumagic.last_report())
    assert "incomplete" not in ip.run("%%ongpu 1\nX * 2").text


def test_it_is_said_once_and_counted(ip, monkeypatch):
    monkeypatch.setattr(Torch, "count", broken)
    told = [ip.run("%%ongpu 1\nzeros(1)").text.count("gpumagic failed while") for _ in range(3)]
    monkeypatch.undo()
    assert told == [1, 0, 0]
    (fault,) = faults.all_kept()
    assert fault.count == 3


def test_the_doctor_shows_it_with_its_traceback(ip, monkeypatch):
    assert "no internal errors in this kernel" in ip.run("%gpus --doctor").text
    monkeypatch.setattr(Torch, "count", broken)
    ip.run("%%ongpu 1 --quiet\nzeros(1)")
    monkeypatch.undo()
    shown = ip.run("%gpus --doctor").text
    assert "✗ gpumagic" in shown
    assert "a broken ledger" in shown
    assert "in broken" in shown  # the traceback's last frame
    ip.ip.run_line_magic("reload_ext", "gpumagic")
    assert "no internal errors in this kernel" in ip.run("%gpus --doctor").text


def test_a_broken_ledger_under_gpuwatch_is_kept(ip, monkeypatch):
    ip.run("%gpuwatch on")
    monkeypatch.setattr(watch, "start", broken)
    done = ip.run("zeros(2).tolist()")
    monkeypatch.undo()
    assert done.result == [0, 0]
    assert "Traceback" not in done.text
    assert "gpumagic failed while" in done.text
    ip.run("%gpuwatch off")
