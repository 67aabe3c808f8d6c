"""The handler on the control channel: it waits for nothing, and leaves nothing behind."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from comm.base_comm import CommManager
from snapshots import snapshot_in

from gpumagic import faults
from gpumagic.magics.control_channel import REQUEST, ControlChannel
from gpumagic.telemetry import Snapshot, sampler


class Kernel:
    """What of a kernel is used; a stream's loop runs when a test says so."""

    def __init__(self):
        self.control_handlers = {"debug_request": len}
        self.comm_manager = CommManager()
        self.session = self.io_loop = self
        self.due = []
        self.sent = []

    def add_callback(self, call, *args, **how):
        self.due.append((call, args, how))

    def send(self, stream, kind, content, parent, ident):
        self.sent.append((kind, content, parent, ident))

    def ask(self, **content):
        self.control_handlers[REQUEST](self, b"who", {"content": content})


class Source:
    """A sampler whose driver stalls until a test answers."""

    def __init__(self):
        self.snapshot = Future()
        self.watching = []

    def fresh(self, **_):
        return self.snapshot

    def subscribe(self, listener, **_):
        made = SimpleNamespace(listener=listener, close=lambda: self.watching.remove(made))
        self.watching.append(made)
        return made


@pytest.fixture
def source(monkeypatch):
    made = Source()
    monkeypatch.setattr(sampler, "shared_sampler", lambda: made)
    return made


@pytest.fixture
def channel():
    kernel = Kernel()
    made = ControlChannel(kernel)
    made.install()
    yield kernel, made
    made.uninstall()


def test_a_driver_that_stalls_keeps_no_other_request_waiting(source, channel):
    kernel, _ = channel
    kernel.ask()
    assert not kernel.due
    source.snapshot.set_result(Snapshot(5.0))
    # Written on the stream's own thread, not on the sampler's.
    assert not kernel.sent
    ((send, args, how),) = kernel.due
    send(*args, **how)
    ((kind, content, parent, ident),) = kernel.sent
    assert (kind, parent, ident) == ("gpumagic_reply", {"content": {}}, b"who")
    assert snapshot_in(content["snapshot"]) == Snapshot(5.0)


def test_it_samples_only_while_somebody_asks(source, channel, monkeypatch):
    kernel, _ = channel
    now = [100.0]
    monkeypatch.setattr("gpumagic.magics.control_channel.time.monotonic", lambda: now[0])
    assert not source.watching
    kernel.ask()
    kernel.ask()
    (watching,) = source.watching
    now[0] += 4
    watching.listener(Snapshot(5.0))
    assert source.watching
    now[0] += 2
    watching.listener(Snapshot(6.0))
    assert not source.watching
    kernel.ask()
    assert len(source.watching) == 1


def test_the_kernels_own_handlers_stay_and_ours_goes(source, channel):
    kernel, made = channel
    assert kernel.control_handlers["debug_request"] is len
    assert [comm.target_name for comm in kernel.comm_manager.comms.values()] == ["gpumagic"]
    kernel.ask()
    made.uninstall()
    assert kernel.control_handlers == {"debug_request": len}
    assert not kernel.comm_manager.comms
    assert not source.watching


def test_a_fault_of_ours_is_kept_and_the_kernel_goes_on(monkeypatch, channel):
    kernel, _ = channel
    monkeypatch.setattr(sampler, "shared_sampler", lambda: 1 / 0)
    kernel.ask()
    (fault,) = faults.all_kept()
    assert "ZeroDivisionError" in str(fault)
