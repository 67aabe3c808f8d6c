"""The widget and the board: what the kernel measures, live, and afterwards."""

import gc
import weakref
from types import SimpleNamespace

import pytest
from fake_sampler import Clock, Sampler, monitor_of

from gpumagic.telemetry.history import Board

pytestmark = pytest.mark.filterwarnings("ignore")
NOW = {"line": "a @ a · cuda:0", "bars": [{"where": "cuda:0", "share": 1.0, "text": "1 ms"}]}


@pytest.fixture
def made(shell, monkeypatch):
    board = Board()
    board.keep("1 ms", 1.0, "before", [])
    clock, sampler = Clock(), Sampler()
    widget = monitor_of(monkeypatch, shell, sampler, clock, board=board)
    widget._save_table = lambda: None
    yield SimpleNamespace(widget=widget, board=board, clock=clock, sampler=sampler)
    widget.close()
    assert board._listeners == {}


def test_what_was_measured_before_it_was_opened_is_there(made):
    assert [t["title"] for t in made.widget.timings] == ["before"]
    assert made.widget.timing == {}


def test_what_is_measured_is_told_as_it_goes(made):
    made.board.post(NOW)
    assert made.widget.timing == NOW
    made.board.post(None)
    made.board.keep("2 ms", 2.0, "after", [])
    assert made.widget.timing == {}
    assert [t["title"] for t in made.widget.timings] == ["after", "before"]


def test_a_step_does_not_send_all_results_again(made):
    sent = []
    made.widget.observe(lambda change: sent.append(change["name"]), ["timing", "timings"])
    for n in range(3):
        made.board.post(NOW | {"line": str(n)})
    assert sent == ["timing"] * 3


def test_while_it_rests_it_hears_nothing_and_then_it_has_all(made):
    hear = made.widget.receive
    hear(None, {"type": "alive", "id": "a"}, [])
    hear(None, {"type": "gone", "id": "a"}, [])
    assert made.board._listeners == {}
    made.board.keep("", 3.0, "meanwhile", [])
    made.board.post(NOW)
    assert made.widget.timing == {}
    hear(None, {"type": "alive", "id": "b"}, [])
    assert [t["title"] for t in made.widget.timings] == ["meanwhile", "before"]
    assert made.widget.timing == NOW


def test_its_own_results_stay_beside_them(made):
    made.widget.show("text", title="mine")
    made.board.keep("", 3.0, "measured", [])
    assert [r["title"] for r in made.widget.results] == ["mine"]
    assert "mine" not in [t["title"] for t in made.widget.timings]


def test_two_hundred_leave_nothing_on_the_board(shell, monkeypatch):
    board, gone = Board(), []
    for _ in range(200):
        widget = monitor_of(monkeypatch, shell, Sampler(), Clock(), board=board)
        board.post(NOW)
        widget.close()
        gone.append(weakref.ref(widget))
    del widget
    gc.collect()
    assert board._listeners == {}
    assert [ref for ref in gone if ref() is not None] == []
