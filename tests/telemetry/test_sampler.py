"""One sampler, many subscribers; here without threads, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpumagic import faults
from gpumagic.errors import GpuError
from gpumagic.telemetry import GpuSample, Snapshot, sampler
from gpumagic.telemetry.sampler import PERIODS_S, Sampler


class Machine:
    """A source that counts what it is asked, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[tuple[float, bool]] = []
        self.error: Exception | None = None
        self.sampler = Sampler(self)
        self.sampler._asking = True  # so it starts no thread: `run` takes the snapshots

    def time(self) -> float:
        return 1000.0 + self.now

    def monotonic(self) -> float:
        return self.now

    def take(self, *, processes: bool, max_age: float) -> Snapshot:
        self.asked.append((self.now, processes))
        if self.error:
            raise self.error
        return Snapshot(self.time(), gpus=(GpuSample("GPU-1", memory_used=len(self.asked)),))

    def run(self, seconds: float, step: float = 0.125) -> None:
        end = self.now + seconds
        while self.now <= end:
            while self.sampler._watching and self.sampler._pause() == 0:
                self.sampler._take()
            self.now += step
        self.now = end

    @property
    def times(self) -> list[float]:
        return [time for time, _ in self.asked]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(sampler, "time", made)
    return made


def test_with_nobody_nothing_is_asked(machine: Machine) -> None:
    machine.run(10)
    assert machine.asked == []
    assert machine.sampler.latest() is None


def test_the_last_one_to_go_ends_the_asking(machine: Machine) -> None:
    one, two = machine.sampler.subscribe(), machine.sampler.subscribe()
    machine.run(2.1)
    one.close()
    one.close()
    machine.run(2)
    assert len(machine.asked) == 5
    two.close()
    machine.run(10)
    assert len(machine.asked) == 5
    assert len(machine.sampler.history.since()["time"]) == 5


def test_the_fastest_period_wins_and_each_is_told_at_its_own(machine: Machine) -> None:
    told: dict[float, list[float]] = {period: [] for period in (0.5, 1.0, 2.5)}

    def listener(period: float) -> Callable[[Snapshot], None]:
        return lambda snapshot: told[period].append(snapshot.time - 1000)

    subscriptions = {
        period: machine.sampler.subscribe(listener(period), period_s=period) for period in told
    }
    machine.run(5)
    assert machine.times == [n / 2 for n in range(11)]
    assert told[0.5] == machine.times
    assert told[1.0] == [0, 1, 2, 3, 4, 5]
    assert told[2.5] == [0, 2.5, 5]
    subscriptions[0.5].close()
    machine.run(3)
    assert machine.times[11:] == [6, 7, 8]


def test_a_changed_mind(machine: Machine) -> None:
    with machine.sampler.subscribe(period_s=60):
        machine.run(3)
        assert machine.asked == [(0, False)]
        impatient = machine.sampler.subscribe(period_s=1, processes=True)
    machine.run(2)
    assert machine.asked[1:] == [(3, True), (4, True), (5, True)]
    with machine.sampler.subscribe(period_s=1):
        impatient.close()
        machine.run(1)
    assert machine.asked[-1] == (6, False)


def test_processes_are_asked_while_one_wants_them(machine: Machine) -> None:
    machine.sampler.subscribe()
    with machine.sampler.subscribe(processes=True):
        machine.run(1)
    machine.run(1)
    assert [processes for _, processes in machine.asked] == [True, True, False]


@pytest.mark.parametrize("period", [0.0, -1.0, 0.2, 61.0, float("nan"), float("inf")])
def test_periods_are_bounded(machine: Machine, period: float) -> None:
    with pytest.raises(GpuError, match=r"from 0\.25 to 60 s"):
        machine.sampler.subscribe(period_s=period)
    assert PERIODS_S == (0.25, 60.0)


def test_a_listener_that_raises_costs_nobody_else_anything(machine: Machine) -> None:
    told = []

    def bad(snapshot: Snapshot) -> None:
        raise RuntimeError("mine")

    machine.sampler.subscribe(bad)
    machine.sampler.subscribe(told.append)
    machine.run(5)
    assert len(told) == 6
    (fault,) = [f for f in faults.all_kept() if "a listener" in f.doing]
    assert "mine" in fault.traceback + fault.error
    assert fault.count == 6


def test_a_listener_may_close_itself_and_others(machine: Machine) -> None:
    told: list[str] = []

    def first(snapshot: Snapshot) -> None:
        told.append("first")
        one.close()
        two.close()

    one = machine.sampler.subscribe(first)
    two = machine.sampler.subscribe(lambda snapshot: told.append("second"))
    machine.run(5)
    assert told == ["first"]
    assert len(machine.asked) == 1


def test_a_source_that_fails_is_a_problem_and_recovers(machine: Machine) -> None:
    machine.sampler.subscribe()
    machine.error = RuntimeError("odd")
    machine.run(3)
    latest = machine.sampler.latest()
    assert latest is not None
    (problem,) = latest.problems
    assert problem.code == "snapshot-failed"
    (fault,) = [f for f in faults.all_kept() if "a snapshot" in f.doing]
    assert (fault.error, fault.count) == ("RuntimeError: odd", 4)
    machine.error = None
    machine.run(1)
    latest = machine.sampler.latest()
    assert latest is not None
    assert latest.problems == ()


def test_fresh_with_nobody_watching_asks_once(machine: Machine) -> None:
    future = machine.sampler.fresh()
    assert not future.done()
    machine.run(5)
    assert future.result(0).gpus[0].memory_used == 1
    assert machine.asked == [(0, True)]


def test_fresh_takes_what_is_young_enough(machine: Machine) -> None:
    machine.sampler.subscribe()
    machine.run(0.5)
    assert machine.sampler.fresh(processes=False).result(0).gpus[0].memory_used == 1
    with_processes = machine.sampler.fresh()
    assert not with_processes.done()
    machine.run(0.1)
    assert with_processes.result(0).gpus[0].memory_used == 2
    assert machine.asked == [(0, False), (0.5, True)]
    younger = machine.sampler.fresh(processes=False, max_age_s=0.05)
    assert not younger.done()
    machine.run(0.1)
    assert younger.done()
    machine.now = 1.0
    machine.run(0)
    assert machine.times[3:] == [1], "the grid stays"


def test_fresh_does_not_count_as_a_turn_of_a_slow_listener(machine: Machine) -> None:
    told: list[float] = []
    machine.sampler.subscribe(lambda snapshot: told.append(snapshot.time - 1000), period_s=10)
    machine.run(1)
    machine.sampler.fresh(max_age_s=0)
    machine.run(8)
    assert told == [0]


def test_after_close_nobody_is_told_and_fresh_still_answers(machine: Machine) -> None:
    told: list[Snapshot] = []
    subscription = machine.sampler.subscribe(told.append)
    machine.run(1)
    waiting = machine.sampler.fresh(max_age_s=-1)
    machine.sampler.close()
    machine.run(5)
    assert len(told) == 2
    assert subscription.closed
    assert waiting.result(0).gpus[0].memory_used == 2
    assert machine.sampler.fresh().result(0).gpus[0].memory_used == 2
    assert machine.sampler.subscribe(told.append).closed
    machine.run(5)
    assert len(machine.asked) == 2
    machine.sampler.close()


def test_history_is_kept_across_a_pause(machine: Machine) -> None:
    with machine.sampler.subscribe(period_s=0.25):
        machine.run(2)
    machine.run(20)
    with machine.sampler.subscribe():
        machine.run(1)
    assert machine.sampler.history.since()["time"] == [1000, 1001, 1002, 1022, 1023]
