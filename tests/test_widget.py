"""The widget: who looks, which cells ran, and in a real kernel all of it over the wire."""

import gc
import weakref
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.errors import GpuError
from gpumagic.telemetry.history import History
from gpumagic.telemetry.snapshot import Snapshot
from gpumagic.widget import monitor
from gpumagic.widget.audience import Audience
from gpumagic.widget.cells import KEPT, CellLog
from tests.test_kernel import TIMEOUT, Kernel

pytestmark = pytest.mark.filterwarnings("ignore")
SNAPSHOT = Snapshot.from_json((Path(__file__).parent / "data/snapshot.json").read_text())
MINE = {process.uuid for process in SNAPSHOT.processes if process.mine}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


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


@pytest.fixture
def made(shell):
    """A monitor without a front end, and what it stands on."""
    from gpumagic.widget.view import MonitorWidget

    clock, sampler = Clock(), Sampler()
    widget = MonitorWidget(sampler=sampler, shell=shell.ip, audience=Audience(clock, patience_s=90))
    published = []
    widget._keep = lambda: published.append(widget._last.time)
    yield SimpleNamespace(
        widget=widget, sampler=sampler, clock=clock, shell=shell, published=published
    )
    widget.close()
    assert sampler.listeners == []


def hooks(shell):
    events = shell.ip.events.callbacks
    return [c for name in events for c in events[name] if isinstance(c.__self__, CellLog)]


# -- who looks
def test_a_view_that_is_silent_for_long_is_gone():
    clock = Clock()
    audience = Audience(clock, patience_s=90)
    assert audience.look("a")
    assert not audience.look("a")
    clock.now = 90
    assert audience.anyone()
    clock.now = 91
    assert not audience.anyone()


def test_a_monitor_that_nobody_came_to_see_is_not_kept_going():
    clock = Clock()
    audience = Audience(clock, patience_s=90)
    clock.now = 89
    assert audience.anyone()
    clock.now = 91
    assert not audience.anyone()


def test_the_time_of_a_cell_does_not_count():
    clock = Clock()
    audience = Audience(clock, patience_s=90)
    audience.look("a")
    audience.hears(False)
    clock.now = 7200
    assert audience.anyone()
    audience.hears(True)
    clock.now += 89
    assert audience.anyone()
    clock.now += 2
    assert not audience.anyone()


def test_the_last_to_leave_is_known_as_such():
    audience = Audience(Clock())
    audience.look("a")
    audience.look("b")
    assert not audience.leave("a")
    assert not audience.leave("a")
    assert audience.leave("b")
    assert not audience.leave("never came")


@given(
    st.lists(
        st.tuples(st.sampled_from(["look", "leave", "busy", "free", "wait"]), st.integers(0, 60))
    )
)
def test_who_looked_a_moment_ago_is_there(steps):
    clock = Clock()
    audience = Audience(clock, patience_s=90)
    for step, number in steps:
        if step == "wait":
            clock.now += number
        elif step in ("busy", "free"):
            audience.hears(step == "free")
        else:
            getattr(audience, step)(str(number % 3))
        if step == "look":
            assert audience.anyone()


# -- the cells
def test_cells_are_told_with_their_numbers_and_times(shell):
    clock, changes = Clock(), []
    log = CellLog(shell.ip, lambda: changes.append(log.busy), clock)
    log.install()
    clock.now = 1.0
    shell.ns["holds"] = lambda: (log.holds(["GPU-1"]), setattr(clock, "now", 3.5))
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


def test_a_cell_that_runs_already_is_seen_to_end(shell):
    log = CellLog(shell.ip, lambda: None, Clock())
    shell.ns["install"] = log.install
    shell.run("install()")
    log.uninstall()
    assert [run["end"] for run in log.runs()] == [0.0]
    assert not log.busy


def test_a_cell_within_a_cell_ends_before_it(shell):
    log = CellLog(shell.ip, lambda: None, Clock())
    log.install()
    shell.run("get_ipython().run_cell('inner = 1'); assert True")
    log.uninstall()
    assert len(log.runs()) == 2
    assert not log.busy


def test_an_async_cell_is_one_cell(shell):
    log = CellLog(shell.ip, lambda: None, Clock())
    log.install()
    shell.run("import asyncio\nawait asyncio.sleep(0)")
    log.uninstall()
    assert len(log.runs()) == 1
    assert not log.busy


def test_old_cells_are_forgotten(shell):
    log = CellLog(shell.ip, lambda: None, Clock())
    info = SimpleNamespace(store_history=True)
    log._began(info)
    for _ in range(KEPT + 5):
        other = SimpleNamespace(store_history=True)
        log._began(other)
        log._ended(SimpleNamespace(info=other))
    log._ended(SimpleNamespace(info=info))
    log.install()
    log.uninstall()
    assert len(log.runs()) == KEPT


# -- the widget
def test_it_sends_what_the_sampler_tells(made):
    made.sampler.tick(replace(SNAPSHOT, time=5.0))
    assert made.widget.snapshot["time"] == 5.0
    assert made.sampler.asked == {"period_s": 1.0, "processes": True}


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


def test_it_rests_when_the_last_view_goes_and_wakes_when_one_comes(made):
    hear = made.widget._heard
    hear(None, {"type": "look", "id": "a"}, [])
    hear(None, {"type": "gone", "id": "a"}, [])
    assert made.sampler.listeners == hooks(made.shell) == []
    assert made.widget.history == {}
    assert made.published == [SNAPSHOT.time]
    hear(None, {"type": "look", "id": "b"}, [])
    assert len(made.sampler.listeners) == 1
    assert "time" in made.widget.history
    assert len(hooks(made.shell)) == 2


def test_it_rests_when_nobody_is_heard_but_not_in_a_long_cell(made):
    made.widget._heard(None, {"type": "look", "id": "a"}, [])
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
    "nonsense", [None, [], "look", {}, {"type": "gone"}, {"type": 7, "id": {}}]
)
def test_nonsense_from_a_view_is_ignored(made, nonsense):
    made.widget._heard(None, nonsense, [])
    assert len(made.sampler.listeners) == 1


def test_closing_twice_and_ticks_after_it_do_nothing(made):
    listener = made.sampler.listeners[0]
    made.widget.close()
    made.widget.close()
    listener(SNAPSHOT)
    made.widget._heard(None, {"type": "look", "id": "late"}, [])
    assert made.sampler.listeners == hooks(made.shell) == []
    assert made.published == [SNAPSHOT.time]


def test_results_stand_newest_first(made):
    class Timing:
        title = "Timing"

        def __str__(self):
            return "1 ms"

        def _repr_html_(self):
            return "<b>1 ms</b>"

    made.widget.show(Timing())
    made.widget.show(SimpleNamespace(x=1), title="plain")
    made.widget.add_result("t", "text")
    titles = [(r["title"], r["html"]) for r in made.widget.results]
    assert titles == [("t", None), ("plain", None), ("Timing", "<b>1 ms</b>")]
    for n in range(60):
        made.widget.add_result(str(n), "")
    assert len(made.widget.results) == 50
    assert made.widget.results[0]["title"] == "59"


@pytest.mark.parametrize("period", [0.2, 61, float("nan"), float("inf"), "fast", None])
def test_a_period_out_of_bounds_is_one_line(shell, period):
    from gpumagic.widget.view import MonitorWidget

    with pytest.raises(GpuError, match=r"from 0\.25 to 60 s; type gpumagic\.monitor\("):
        MonitorWidget(period, sampler=Sampler())
    gc.collect()


def test_where_it_is_not_built_one_line_says_how(tmp_path):
    from gpumagic.widget.view import script

    with pytest.raises(GpuError, match="npm run build"):
        script(tmp_path / "static" / "widget.js")


def test_in_a_terminal_it_is_the_table(shell):
    shell.ns["monitor"] = monitor
    text = shell.run("monitor()").text
    assert "type %gpus" in text
    assert text.count("live monitor needs a notebook") == 1


def test_two_hundred_opened_and_closed_leave_nothing(shell):
    from ipywidgets.widgets import widget as ipywidgets

    from gpumagic.widget.view import MonitorWidget

    sampler, gone = Sampler(), []
    before = len(ipywidgets._instances)
    for _ in range(200):
        widget = MonitorWidget(sampler=sampler, shell=shell.ip)
        sampler.tick()
        widget.close()
        gone.append(weakref.ref(widget))
    del widget
    gc.collect()
    assert [ref for ref in gone if ref() is not None] == []
    assert len(ipywidgets._instances) == before
    assert sampler.listeners == hooks(shell) == []


# -- in a real kernel
@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    runtime = str(tmp_path_factory.mktemp("kernels"))
    started = Kernel(GPUMAGIC_RUNTIME_DIR=runtime, GPUMAGIC_VIRTUAL="1")
    started.run("%load_ext gpumagic\nimport torch, threading\nfrom gpumagic.widget import monitor")
    yield started
    started.stop()


def wire(kernel, code):
    """Everything that a request sends, up to its end, as (type, content)."""
    sent, found = kernel.send(code), []
    while True:
        message = kernel.client.get_iopub_msg(timeout=TIMEOUT)
        content = message["content"]
        found.append((message["msg_type"], content))
        ended = message["parent_header"].get("msg_id") == sent
        if ended and content.get("execution_state") == "idle":
            kernel.client.get_shell_msg(timeout=TIMEOUT)
            return found


def errors(found):
    return [content["evalue"] for kind, content in found if kind == "error"]


def test_the_output_is_a_table_and_the_view_and_in_the_end_the_table(kernel):
    found = wire(kernel, "m = monitor(0.25)\nm")
    table, view = [content for kind, content in found if kind == "display_data"]
    assert "<table" in table["data"]["text/html"]
    assert "Virtual GPU" in table["data"]["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in view["data"]
    found = wire(kernel, "m.close()")
    updates = [content for kind, content in found if kind == "update_display_data"]
    last = {content["transient"]["display_id"]: content["data"] for content in updates}
    assert "<table" in last[table["transient"]["display_id"]]["text/html"]
    assert set(last[view["transient"]["display_id"]].values()) == {""}
    assert [kind for kind, _ in found].count("comm_close") == 2


@pytest.mark.parametrize("time", ["first", "second", "third"])
def test_each_time_it_is_displayed_once(kernel, time):
    kinds = [kind for kind, _ in wire(kernel, "%gpus --live")]
    assert kinds.count("display_data") == 2
    assert "execute_result" not in kinds
    assert errors(wire(kernel, "_.close()")) == []


def test_when_a_cell_has_run_the_table_is_brought_up_to_date(kernel):
    wire(kernel, "m = monitor(0.25)\nm")
    found = wire(kernel, "held = torch.empty(1000 * 2**20, dtype=torch.uint8, device='cuda')")
    # Told at the cell's end, be it before or after the word that it has ended.
    while not any(
        kind == "update_display_data" and "1000 MiB" in content["data"]["text/plain"]
        for kind, content in found
    ):
        message = kernel.client.get_iopub_msg(timeout=TIMEOUT)
        found.append((message["msg_type"], message["content"]))
    assert errors(wire(kernel, "del held\nm.close()")) == []


@pytest.mark.parametrize("wait", ["pass", "threading.Event().wait(0.01)"])
def test_it_draws_while_a_cell_runs(kernel, wait):
    code = (
        "m = monitor(0.25)\nbegan = m.snapshot['time']\n"
        f"while m.snapshot['time'] < began + 0.7: {wait}\nm.close()"
    )
    found = wire(kernel, code)
    states = [content["data"].get("state", {}) for kind, content in found if kind == "comm_msg"]
    assert len([state for state in states if "snapshot" in state]) >= 2
    assert errors(found) == []


def test_a_view_speaks_over_the_wire(kernel):
    wire(kernel, "m = monitor(0.25)")
    found = wire(kernel, "print(m.comm.comm_id)")
    comm = "".join(c["text"] for kind, c in found if kind == "stream").strip()
    for kind in ("look", "gone"):
        data = {"method": "custom", "content": {"type": kind, "id": "a"}}
        message = kernel.client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        kernel.client.shell_channel.send(message)
    found = wire(kernel, "assert not m._awake and m._subscription.closed\nm.close()")
    assert errors(found) == []


def test_two_hundred_in_a_kernel_leave_no_thread_comm_or_hook(kernel):
    code = (
        "import comm, gc\nfrom gpumagic.telemetry.sampler import sampler\n"
        "def count():\n"
        "    gc.collect()\n"
        "    for thread in threading.enumerate():\n"
        "        if thread.name.startswith('gpumagic'): thread.join(10)\n"
        "    hooks = sum(map(len, get_ipython().events.callbacks.values()))\n"
        "    return (threading.active_count(), len(comm.get_comm_manager().comms), hooks,\n"
        "            bool(sampler()._watching))\n"
        "m = monitor(); m.close(); del m; before = count()\n"
        "for _ in range(200): m = monitor(); m.close()\n"
        "del m; after = count(); assert before == after, (before, after)"
    )
    assert errors(wire(kernel, code)) == []


def test_when_the_kernel_ends_the_table_stays(tmp_path):
    ended = Kernel(GPUMAGIC_RUNTIME_DIR=str(tmp_path), GPUMAGIC_VIRTUAL="1")
    try:
        ended.run("%load_ext gpumagic\nfrom gpumagic.widget import monitor\nm = monitor()\nm")
        ended.manager.request_shutdown()
        while True:
            message = ended.client.get_iopub_msg(timeout=TIMEOUT)
            if message["msg_type"] == "update_display_data":
                break
        assert set(message["content"]["data"]) == {"text/plain", "text/html"}
    finally:
        ended.stop()
