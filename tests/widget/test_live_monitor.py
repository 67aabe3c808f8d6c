"""The widget: who looks, which cells ran, and in a real kernel all of it over the wire."""

import gc
import weakref
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest
from fake_sampler import MINE, SNAPSHOT, Clock, Sampler, monitor_of
from IPython.core.events import EventManager, available_events

from gpumagic.errors import GpuError
from gpumagic.telemetry import ProcessSample, Snapshot
from gpumagic.widget import monitor, notebook_watch
from gpumagic.widget.notebook_watch import KEPT, ShellCells

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(notebook_watch, "time", made)
    return made


@pytest.fixture
def made(shell, monkeypatch):
    """A monitor without a front end, and what it stands on."""
    clock, sampler = Clock(), Sampler()
    widget = monitor_of(monkeypatch, shell, sampler, clock)
    published = []
    widget._save_table = lambda: published.append(widget._last.time)
    yield SimpleNamespace(
        widget=widget, sampler=sampler, clock=clock, shell=shell, published=published
    )
    widget.close()
    assert sampler.listeners == []


def hooks(shell):
    events = shell.ip.events.callbacks
    return [c for name in events for c in events[name] if isinstance(c.__self__, ShellCells)]


# -- the cells
def test_cells_are_told_with_their_numbers_and_times(shell, clock):
    changes = []
    log = ShellCells(shell.ip, lambda: changes.append(log.busy))
    log.install()
    clock.now = 1.0
    mine = (ProcessSample("GPU-1", 1, 5, mine=True), ProcessSample("GPU-2", 2, 7))
    shell.ns["holds"] = lambda: (log.see(Snapshot(2.0, processes=mine)), setattr(clock, "now", 3.5))
    shell.run("holds()")
    shell.run("1 / 0")
    shell.run("silent = 1", store_history=False)
    log.uninstall()
    shell.run("unheard = 1")
    first, second, third = log.runs()
    assert (first["start"], first["end"], first["gpus"]) == (1.0, 3.5, ["GPU-1"])
    assert second["count"] == first["count"] + 1
    assert third["count"] is None
    assert len({run["id"] for run in log.runs()}) == 3
    assert changes == [True, False] * 3
    assert hooks(shell) == []


def test_a_cell_that_runs_already_is_seen_to_end(shell, clock):
    log = ShellCells(shell.ip, lambda: None)
    shell.ns["install"] = log.install
    shell.run("install()")
    log.uninstall()
    assert [run["end"] for run in log.runs()] == [0.0]
    assert not log.busy


def test_a_cell_within_a_cell_ends_before_it(shell):
    log = ShellCells(shell.ip, lambda: None)
    log.install()
    shell.run("get_ipython().run_cell('inner = 1'); assert True")
    log.uninstall()
    assert len(log.runs()) == 2
    assert not log.busy


def test_an_async_cell_is_one_cell(shell):
    log = ShellCells(shell.ip, lambda: None)
    log.install()
    shell.run("import asyncio\nawait asyncio.sleep(0)")
    log.uninstall()
    assert len(log.runs()) == 1
    assert not log.busy


def test_a_cell_has_the_number_that_stands_beside_it(shell):
    began = []
    log = ShellCells(shell.ip, lambda: began.append(log.runs()[-1]["count"]))
    log.install()
    first = shell.ip.run_cell("x = 1", store_history=True).execution_count
    shell.ip.run_cell("raise ValueError", store_history=True)
    shell.ip.run_cell("y = 1", store_history=False)
    log.uninstall()
    assert [run["count"] for run in log.runs()] == [first, first + 1, None]
    # While it runs, as afterwards.
    assert began == [first, first, first + 1, first + 1, None, None]


def test_old_cells_are_forgotten():
    events = EventManager(None, available_events)
    stored = SimpleNamespace(input_hist_parsed=[""])
    shell = SimpleNamespace(events=events, displayhook=None, history_manager=stored)
    log = ShellCells(shell, lambda: None)
    log.install()
    outer = SimpleNamespace(store_history=True)
    events.trigger("pre_run_cell", outer)
    for _ in range(KEPT + 5):
        info = SimpleNamespace(store_history=True)
        events.trigger("pre_run_cell", info)
        events.trigger("post_run_cell", SimpleNamespace(info=info, execution_count=1))
    events.trigger("post_run_cell", SimpleNamespace(info=outer, execution_count=1))
    log.uninstall()
    assert len(log.runs()) == KEPT
    assert not log.busy


# -- the widget
def test_it_sends_what_the_sampler_tells(made):
    made.sampler.tick(replace(SNAPSHOT, time=5.0))
    assert made.widget.snapshot["time"] == 5.0
    assert made.sampler.asked == {"period_s": 1.0, "processes": True}


def test_its_table_says_of_when_it_is_and_what_the_view_waits_for(made):
    made.sampler.tick(replace(SNAPSHOT, time=datetime(2026, 11, 22, 17, 5).timestamp()))
    table = made.widget._table()
    assert table["text/plain"].endswith("\n\nAs of 2026-11-22 17:05:00.")
    assert "As of 2026-11-22 17:05:00." in table["text/html"]
    assert "The live view appears when the running cell ends" in table["text/html"]


def test_its_cells_hold_the_gpus_of_this_kernel(made):
    made.shell.run("x = 1")
    assert [set(run["gpus"]) for run in made.widget.cells] == [MINE]
    assert made.widget.cells[0]["end"] is not None


def test_what_a_cell_left_behind_is_told_at_its_end(made):
    later = replace(SNAPSHOT, time=9.0)
    made.sampler.now = later
    made.shell.run("x = 1")
    assert made.widget.snapshot["time"] == 9.0
    assert made.published == [9.0]


def test_a_cell_that_is_followed_at_once_by_another_has_its_gpus_too(made):
    asked = []
    made.sampler.fresh = lambda **_: asked.append(Future()) or asked[-1]
    held = ProcessSample("GPU-1", 1, 5, mine=True, utilization=0.0)
    made.sampler.tick(replace(SNAPSHOT, processes=(held,)))
    for cell in ("x = 1", "y = 1", "z = 1"):
        made.shell.run(cell)
    for future in asked:
        future.set_result(replace(SNAPSHOT, processes=(replace(held, memory=50),)))
    assert made.widget.cells[0]["gpus"] == ["GPU-1"]


def test_a_cell_that_only_opens_a_monitor_uses_no_gpu(shell, monkeypatch):
    sampler, held = Sampler(), ProcessSample("GPU-1", 1, 5, mine=True, utilization=0.0)
    sampler.now = replace(SNAPSHOT, processes=(held,))
    opened = shell.ns["opened"] = []
    shell.ns["monitor"] = lambda: monitor_of(monkeypatch, shell, sampler, Clock())
    shell.run("opened.append(monitor())")
    sampler.tick(sampler.now)
    assert [run["gpus"] for run in opened[0].cells] == [[]]
    opened[0].close()


def test_it_rests_when_the_last_view_goes_and_wakes_when_one_comes(made):
    hear = made.widget.receive
    hear(None, {"type": "alive", "id": "a"}, [])
    hear(None, {"type": "gone", "id": "a"}, [])
    assert made.sampler.listeners == hooks(made.shell) == []
    assert made.widget.history == {}
    assert made.published == [SNAPSHOT.time]
    hear(None, {"type": "alive", "id": "b"}, [])
    assert len(made.sampler.listeners) == 1
    assert "time" in made.widget.history
    assert len(hooks(made.shell)) == 2


def test_it_rests_when_nobody_is_heard_but_not_in_a_long_cell(made):
    made.widget.receive(None, {"type": "alive", "id": "a"}, [])
    made.ns = made.shell.ns

    def hours():
        made.clock.now += 7200
        made.sampler.tick()
        assert len(made.sampler.listeners) == 1

    made.shell.ns["hours"] = hours
    assert made.shell.run("hours()").error is None
    made.published.clear()
    made.clock.now += 91
    made.sampler.tick()
    assert made.sampler.listeners == []
    # A view may still be there that could not be heard: its output is left alone.
    assert made.published == []


@pytest.mark.parametrize(
    "nonsense", [None, [], "alive", {}, {"type": "gone"}, {"type": 7, "id": {}}]
)
def test_nonsense_from_a_view_is_ignored(made, nonsense):
    made.widget.receive(None, nonsense, [])
    assert len(made.sampler.listeners) == 1


def test_closing_twice_and_ticks_after_it_do_nothing(made):
    listener = made.sampler.listeners[0]
    made.widget.close()
    made.widget.close()
    listener(SNAPSHOT)
    made.widget.receive(None, {"type": "alive", "id": "late"}, [])
    assert made.sampler.listeners == hooks(made.shell) == []
    assert made.published == [SNAPSHOT.time]


def test_results_stand_newest_first(made):
    class Timing:
        title = "Timing"

        def __str__(self):
            return "1 ms"

    made.widget.show(Timing())
    made.widget.show(SimpleNamespace(x=1), title="plain")
    made.widget.show("text", title="t")
    titles = [(r["title"], r["text"]) for r in made.widget.results]
    assert titles == [("t", "text"), ("plain", "namespace(x=1)"), ("Timing", "1 ms")]
    for n in range(60):
        made.widget.show("", title=str(n))
    assert len(made.widget.results) == 50
    assert made.widget.results[0]["title"] == "59"


@pytest.mark.parametrize("period", [0.2, 61, float("nan"), float("inf"), "fast", None])
def test_a_period_out_of_bounds_is_one_line(shell, period):
    from gpumagic.widget.live_monitor import MonitorWidget

    with pytest.raises(GpuError, match=r"from 0\.25 to 60 s; type [0-9.]+$"):
        MonitorWidget(period)
    gc.collect()


def test_in_a_terminal_it_is_the_table(shell):
    shell.ns["monitor"] = monitor
    text = shell.run("monitor()").text
    assert "type %gpus" in text
    assert text.count("live monitor needs a notebook") == 1


def test_two_hundred_opened_and_closed_leave_nothing(shell, monkeypatch):
    from ipywidgets.widgets import widget as ipywidgets

    sampler, gone = Sampler(), []
    before = len(ipywidgets._instances)
    for _ in range(200):
        widget = monitor_of(monkeypatch, shell, sampler, Clock())
        sampler.tick()
        widget.close()
        gone.append(weakref.ref(widget))
    del widget
    gc.collect()
    assert [ref for ref in gone if ref() is not None] == []
    assert len(ipywidgets._instances) == before
    assert sampler.listeners == hooks(shell) == []
