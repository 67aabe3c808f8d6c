"""The sampler with its real threads: a driver that stalls, forks, and nothing left behind."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator

import pytest

from gpumagic.telemetry import GpuSample, Snapshot
from gpumagic.telemetry.sampler import Sampler, shared_sampler

PATIENCE_S = 20


class Driver:
    """A source that answers while its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self.threads: set[threading.Thread] = set()

    def take(self, *, processes: bool, max_age: float) -> Snapshot:
        self.threads.add(threading.current_thread())
        self.inside.set()
        assert self.gate.wait(PATIENCE_S)
        return Snapshot(1.0, gpus=(GpuSample("GPU-1", memory_used=5),))

    def stall(self) -> None:
        """Returns when a call hangs."""
        self.gate.clear()
        self.inside.clear()
        assert self.inside.wait(PATIENCE_S)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def watched(driver: Driver) -> Iterator[Sampler]:
    made = Sampler(driver, stalled_s=0.02)
    yield made
    driver.gate.set()
    made.close()
    ended(*driver.threads)


def answers(asked: Sampler) -> None:
    """Returns when the driver answers; a busy machine may make it look stalled for a while."""
    while asked.fresh(max_age_s=0).result(PATIENCE_S).problems:
        pass


def ended(*asked: threading.Thread) -> None:
    """Returns when these have ended, and every thread that watches a driver."""
    watching = [t for t in threading.enumerate() if t.name == "gpumagic-sampler"]
    for thread in (*asked, *watching):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def heard_until(heard: queue.Queue[Snapshot], codes: list[str]) -> Snapshot:
    while True:
        snapshot = heard.get(timeout=PATIENCE_S)
        if [problem.code for problem in snapshot.problems] == codes:
            return snapshot


def test_a_stall_is_told_with_the_last_values_and_goes_by_itself(
    watched: Sampler, driver: Driver
) -> None:
    heard: queue.Queue[Snapshot] = queue.Queue()
    watched.subscribe(heard.put, period_s=0.25)
    assert heard_until(heard, []).gpus[0].age == 0
    driver.stall()
    first = heard_until(heard, ["stalled"])
    again = heard_until(heard, ["stalled"])
    assert first.gpus[0].memory_used == 5
    assert 0 < first.gpus[0].age < again.gpus[0].age
    (problem,) = again.problems
    assert " s; " in problem.cause
    assert problem.cure
    latest = watched.latest()
    assert latest is not None
    assert latest.problems[0].code == "stalled"
    assert watched.fresh(max_age_s=0).result(PATIENCE_S).problems[0].code == "stalled"
    driver.gate.set()
    assert heard_until(heard, []).gpus[0].age == 0
    assert len(driver.threads) == 1


def test_a_stall_of_the_very_first_call(watched: Sampler, driver: Driver) -> None:
    driver.gate.clear()
    heard: queue.Queue[Snapshot] = queue.Queue()
    watched.subscribe(heard.put, period_s=60)
    stalled = heard_until(heard, ["stalled"])
    assert stalled.gpus == ()
    driver.gate.set()
    assert heard_until(heard, []).gpus


def test_one_who_comes_while_the_driver_stalls_starts_no_second_call(
    watched: Sampler, driver: Driver
) -> None:
    driver.gate.clear()
    for _ in range(20):
        with watched.subscribe(period_s=0.25):
            assert watched.fresh().result(PATIENCE_S).problems[0].code == "stalled"
    assert len(driver.threads) == 1
    driver.gate.set()
    watched.close()
    ended(*driver.threads)


def test_close_does_not_wait_for_a_stalled_driver(watched: Sampler, driver: Driver) -> None:
    watched.subscribe()
    driver.stall()
    watched.close()
    ended()
    assert all(thread.is_alive() for thread in driver.threads)


def test_200_come_and_go_and_leave_no_thread(watched: Sampler, driver: Driver) -> None:
    heard: queue.Queue[Snapshot] = queue.Queue()
    for _ in range(200):
        with watched.subscribe(heard.put, period_s=0.25):
            pass
    with watched.subscribe(heard.put, period_s=0.25):
        heard.get(timeout=PATIENCE_S)
    watched.close()
    ended(*driver.threads)


def test_subscriptions_closed_from_many_threads(watched: Sampler, driver: Driver) -> None:
    def come_and_go() -> None:
        for _ in range(50):
            subscription = watched.subscribe(lambda snapshot: None, period_s=0.25)
            watched.latest()
            subscription.close()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    answers(watched)


def test_a_listener_may_close_the_sampler(driver: Driver) -> None:
    made = Sampler(driver)
    closed = threading.Event()

    def listener(snapshot: Snapshot) -> None:
        made.close()
        closed.set()

    made.subscribe(listener)
    assert closed.wait(PATIENCE_S)
    ended(*driver.threads)


def test_the_processs_own_is_one() -> None:
    assert shared_sampler() is shared_sampler()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_a_fork_has_its_own(watched: Sampler, driver: Driver) -> None:
    before = shared_sampler()
    subscription = watched.subscribe(period_s=0.25)
    answers(watched)
    with watched._changed:  # as another thread of the parent may hold it
        child = os.fork()
        if child == 0:
            code = 1
            try:
                watched.latest()
                subscription.close()
                watched.close()
                alone = threading.active_count() == 1
                fresh = Sampler(Driver())
                answered = fresh.fresh().result(PATIENCE_S).gpus != ()
                code = 0 if shared_sampler() is not before and alone and answered else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    answers(watched)
