"""What this kernel measures: posted from any thread, told to who listens."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.telemetry.history import KEPT, Board


@pytest.fixture
def made():
    return Board()


def test_what_runs_is_told_and_then_it_is_not(made):
    seen = []
    made.subscribe(lambda: seen.append(made.now))
    made.post({"line": "cuda:0"})
    made.post(None)
    assert seen == [{"line": "cuda:0"}, None]
    assert made.now is None


def test_what_was_measured_stands_newest_first(made):
    bars = [{"where": "cpu", "share": 1.0, "text": "2 ms"}]
    made.keep("1 ms", 1.0, "first", [])
    made.keep("2 ms", 2.0, "second", bars)
    assert [(e["title"], e["bars"], e["time"]) for e in made.entries] == [
        ("second", bars, 2.0),
        ("first", [], 1.0),
    ]
    told = made.entries[0]
    assert set(told) == {"id", "title", "time", "text", "bars"}  # a Result of snapshot.ts


@given(st.lists(st.sampled_from(["keep", "post", "listen", "leave"]), max_size=200))
def test_it_holds_no_more_than_the_newest_and_calls_who_listens(steps):
    made, kept, open_, heard = Board(), [], [], {}
    for n, step in enumerate(steps):
        if step == "listen":
            heard[n] = 0

            def hear(n=n):
                heard[n] += 1

            open_.append((n, made.subscribe(hear)))
        elif step == "leave" and open_:
            open_.pop(0)[1]()
        elif step in ("keep", "post"):
            before = dict(heard)
            if step == "keep":
                made.keep("", float(n), str(n), [])
                kept.insert(0, str(n))
            else:
                made.post({"n": n})
            listening = {number for number, _ in open_}
            assert heard == {k: v + (k in listening) for k, v in before.items()}
    assert [e["title"] for e in made.entries] == kept[:KEPT]
    assert len({e["id"] for e in made.entries}) == len(made.entries)


def test_a_listener_that_fails_stops_neither_the_measurement_nor_the_others(made):
    seen = []
    made.subscribe(lambda: 1 / 0)
    made.subscribe(lambda: seen.append(1))
    made.post({})
    assert seen == [1]


def test_closing_twice_and_within_a_call_does_nothing(made):
    seen = []

    def once():
        seen.append(1)
        close()

    close = made.subscribe(once)
    made.post({})
    made.post({})
    close()
    assert seen == [1]


def test_a_listener_may_post(made):
    made.subscribe(lambda: made.now and made.post(None))
    made.post({"line": "cpu"})
    assert made.now is None


def test_threads_lose_nothing(made):
    def keep():
        for n in range(10):
            made.keep("", n, str(n), [])

    threads = [threading.Thread(target=keep) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made.entries) == 40
