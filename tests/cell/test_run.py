"""One cell on one device: what its report says, also when things go wrong."""

import itertools
from contextlib import contextmanager

import pytest
import torch

from gpumagic import faults
from gpumagic.cell.report import last_report
from gpumagic.cell.run import Run
from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.frameworks import torch_framework
from gpumagic.ledger import attribute, dispatch
from gpumagic.ledger.dispatch import MemoryMeter
from gpumagic.moving import move
from gpumagic.placement import placement

pytestmark = pytest.mark.usefixtures("gpus")
GPU1 = Device("cuda", ordinal=1, virtual=True)


def made(namespace=None, names=(), device=GPU1, **options):
    ticks = itertools.count()
    return Run(device, namespace or {}, names, clock=lambda: float(next(ticks)), **options)


def test_the_report_of_a_cell():
    space = {"X": torch.ones(10)}
    run = made(space, ["X"])
    run.start()
    assert placement().device == torch.device("cuda:1")
    report = run.finish()
    assert placement() is None
    assert (report.device, report.waited, report.error, report.fault) == (GPU1, True, None, None)
    assert [m.name for m in report.moved] == ["X"]
    assert report.moved_bytes == 40
    assert report.touched
    assert report.seconds > 0
    assert last_report() is report
    assert run.finish() is None  # once


def test_a_run_that_did_not_start_has_no_report():
    assert made().finish() is None


def test_memory_that_cannot_be_measured_stops_no_cell(monkeypatch):
    def fail(self, device):
        raise AttributeError("no such figure")

    monkeypatch.setattr(torch_framework.Torch, "peak", fail)
    run = made()
    run.start()
    assert torch.ones(1).device == torch.device("cuda:1")
    report = run.finish()
    assert (report.memory, report.ledger_complete, report.waited) == ((), False, True)
    assert [fault.doing for fault in faults.unreported] == ["measuring a cell's memory"]
    faults.forget()


def test_an_interrupted_cell_is_not_waited_for(monkeypatch):
    waits = []
    monkeypatch.setattr(move, "wait_for", waits.append)
    run = made()
    run.start()
    report = run.finish(KeyboardInterrupt())
    assert (report.waited, report.error, waits) == (False, "KeyboardInterrupt", [])


def test_an_error_of_the_device_surfaces_in_the_report_and_the_placement_is_undone(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: device-side assert triggered\nmore lines")

    run = made()
    run.start()
    monkeypatch.setattr(move, "wait_for", fail)
    report = run.finish()
    assert report.fault == "CUDA error: device-side assert triggered"
    assert not report.waited
    assert placement() is None


def test_an_error_without_a_message_is_told_by_its_type(monkeypatch):
    def fail(*_):
        raise RuntimeError

    run = made({"X": torch.ones(10)}, ["X"], back=True)
    run.start()
    monkeypatch.setattr(move, "wait_for", fail)
    monkeypatch.setattr(move, "bring_home", fail)
    report = run.finish()
    assert report.fault == "RuntimeError"
    assert [(left.name, left.reason) for left in report.left] == [("X", "RuntimeError")]


def test_a_new_tensor_at_the_address_of_an_old_one_is_new():
    space = {"x": torch.ones(2)}
    for _ in range(100):  # in some of them, the last y is where the first one was
        run = made(space, ["x"], back=True)
        run.start()
        for _ in range(3):
            space["y"] = space["x"] * 2
            space["y"] = space["y"].relu()
        assert run.finish().results == ("y",)


def test_every_touched_device_is_waited_for(monkeypatch):
    waits = []
    run = made()
    run.start()
    keep = torch.ones(1, device="cuda:0")
    monkeypatch.setattr(move, "wait_for", lambda device: waits.append(str(device)))
    run.finish()
    assert waits == ["cuda:1", "cuda:0"]
    assert keep.is_cuda


def test_the_placement_is_left_before_anything_else_ends(monkeypatch):
    placed = []

    class Recorder:
        def start(self):
            pass

        def stop(self, ran):
            placed.append(placement())

    monkeypatch.setattr(move, "wait_for", lambda device: placed.append(placement()))
    run = made(recorder=Recorder())
    run.start()
    assert placement().device == torch.device("cuda:1")
    run.finish()
    assert placed == [None, None]


def test_a_peak_is_timed_from_the_cells_start():
    class Recorder:
        def start(self):
            pass

        def stop(self, ran):
            self.ran = ran

    recorder = Recorder()
    run = made(recorder=recorder)
    run.start()
    report = run.finish()
    assert 0 < recorder.ran <= report.seconds


def test_a_device_that_one_framework_cannot_use_moves_nothing():
    class Refusing(torch_framework.Torch):
        def own(self, device):
            raise GpuError("there is none")

    x = torch.ones(2)
    run = made({"x": x}, ["x"], frameworks=[torch_framework.Torch(), Refusing()])
    with pytest.raises(GpuError, match="there is none"):
        run.start()
    assert (x.device.type, placement(), run.finish()) == ("cpu", None, None)


def test_a_cell_that_touches_nothing():
    run = made()
    run.start()
    assert not run.finish().touched


def test_an_object_whose_dict_is_a_property_that_raises_stops_no_cell():
    class Raises:
        __module__ = "__main__"

        @property
        def __dict__(self):
            raise RuntimeError("theirs")

    namespace = {"theirs": Raises(), "x": torch.ones(2)}
    run = made(namespace, ["x"])
    run.start()
    assert [moved.name for moved in run.finish().moved] == ["x"]


@pytest.mark.parametrize("at", ["recorder", "ledger", "memory", "home"])
def test_ctrl_c_while_a_cell_ends_leaves_nothing_in_force(monkeypatch, at):
    """Else every later cell would make its tensors there, without a word."""

    class Recorder:
        def start(self):
            pass

        def stop(self, ran):
            interrupt("recorder")

    def interrupt(where):
        if where == at:
            raise KeyboardInterrupt

    def interrupting(real, where):
        def call(*args, **options):
            interrupt(where)
            return real(*args, **options)

        return call

    @contextmanager
    def counting(*args, **options):
        with dispatch.counting(*args, **options):
            yield
        interrupt("ledger")

    monkeypatch.setattr(torch_framework, "counting", counting)
    monkeypatch.setattr(MemoryMeter, "stop", interrupting(MemoryMeter.stop, "memory"))
    monkeypatch.setattr(move, "bring_home", interrupting(move.bring_home, "home"))
    x = torch.ones(2)
    run = made({"x": x}, ["x"], back=True, recorder=Recorder())
    run.start()
    with pytest.raises(KeyboardInterrupt):
        run.finish()
    monkeypatch.undo()
    assert not attribute.running
    for meter in [*dispatch.meters]:
        meter.stop()
    assert placement() is None
    assert x.device.type == "cuda"
    move.bring_home({"x": x})  # as %ongpu home does
    assert x.device.type == "cpu"


@pytest.mark.parametrize("before", ["the memory is read", "it is placed"])
def test_ctrl_c_while_a_cell_begins_loses_no_origin(monkeypatch, before):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    where = (MemoryMeter, "start") if "memory" in before else (torch_framework, "enter")
    x = torch.ones(2)
    run = made({"x": x}, ["x"], back=True)
    monkeypatch.setattr(*where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.start()
    assert placement() is None
    move.bring_home({"x": x})
    assert x.device.type == "cpu"
