"""A sampler whose ticks the test makes, and a clock that stands still."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

from snapshots import snapshot_in

from gpumagic.telemetry.history import History

SNAPSHOT = snapshot_in((Path(__file__).parents[1] / "data/snapshot.json").read_text())
MINE = {process.uuid for process in SNAPSHOT.processes if process.mine}


class Clock:
    """Replaces `time` in the widget's modules."""

    now = 0.0

    def __call__(self):
        return self.now

    time = monotonic = __call__


def monitor_of(monkeypatch, shell, sampler, clock, **replaced):
    """A monitor of this shell and sampler."""
    from gpumagic.widget import live_monitor, notebook_watch

    monkeypatch.setattr(notebook_watch, "time", clock)
    replaced |= {"shared_sampler": lambda: sampler, "get_ipython": lambda: shell.ip}
    for name, value in replaced.items():
        monkeypatch.setattr(live_monitor, name, value)
    return live_monitor.MonitorWidget()


class Sampler:
    """A sampler whose ticks the test makes."""

    def __init__(self):
        self.history = History()
        self.listeners = []
        self.now = SNAPSHOT

    def fresh(self, **_):
        future = Future()
        future.set_result(self.now)
        return future

    def subscribe(self, listener, **asked):
        self.asked = asked
        self.listeners.append(listener)
        return SimpleNamespace(close=lambda: self.listeners.remove(listener))

    def tick(self, snapshot=SNAPSHOT):
        for listener in list(self.listeners):
            listener(snapshot)
