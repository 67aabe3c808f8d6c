"""The ring of readings against a list that keeps everything, and what it costs."""

from __future__ import annotations

import json
import threading
import tracemalloc
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpumagic.telemetry import GpuSample, ProcessSample, Snapshot
from gpumagic.telemetry.history import History


def at(time: float, **used: int | None) -> Snapshot:
    return Snapshot(time, gpus=tuple(GpuSample(uuid, memory_used=b) for uuid, b in used.items()))


readings = st.fixed_dictionaries(
    {},
    optional={
        uuid: st.none() | st.tuples(st.floats(0, 100), st.integers(0, 2**40)) for uuid in "abc"
    },
)


@given(st.lists(st.tuples(st.floats(0.95, 9), readings), max_size=30), st.integers(0, 40))
def test_like_a_list_that_forgets_its_head(
    moments: list[tuple[float, dict[str, tuple[float, int] | None]]], ask: int
) -> None:
    size = 7
    history = History(entries=size)
    kept: list[tuple[float, dict[str, tuple[float, int] | None]]] = []
    time = 100.0
    for step, gpus in moments:
        time += step
        kept.append((time, gpus))
        assert history.add(
            Snapshot(
                time,
                gpus=tuple(
                    GpuSample(uuid, utilization=v and v[0], memory_used=v and v[1])
                    for uuid, v in gpus.items()
                ),
            )
        )
    kept = kept[-size:]
    since = kept[min(ask, len(kept)) - 1][0] if kept and ask else None
    told = [(time, gpus) for time, gpus in kept if since is None or time > since]
    uuids = {uuid for _, gpus in kept for uuid in gpus} if told else set()
    assert history.since(since) == {
        "time": [time for time, _ in told],
        "gpus": {
            uuid: {
                "utilization": [(gpus.get(uuid) or (None, None))[0] for _, gpus in told],
                "memory_used": [(gpus.get(uuid) or (None, None))[1] for _, gpus in told],
                "power": [None] * len(told),
                "held": {},
            }
            for uuid in uuids
        },
    }
    assert len(history.since()["time"]) == len(kept)


def test_what_comes_too_soon_is_left_out() -> None:
    history = History()
    assert [history.add(at(t, a=1)) for t in (10.0, 10.25, 10.5, 10.99, 11.25, 11.98, 12.2)] == [
        True,
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert history.since()["time"] == [10.0, 10.99, 11.98]


def test_a_clock_that_was_set_back_takes_what_is_later_along() -> None:
    history = History()
    for time in (10.0, 11.0, 12.0, 13.0, 11.5):
        history.add(at(time, a=int(time)))
    assert history.since()["time"] == [10.0, 11.0]
    history.add(at(12.5, a=1))
    assert history.since()["time"] == [10.0, 11.0, 12.5]
    assert history.since()["gpus"]["a"]["memory_used"] == [10, 11, 1]


def test_a_gpu_that_has_left_the_ring_is_forgotten() -> None:
    history = History(entries=3)
    history.add(at(1, a=1, b=2))
    for time in (2, 3):
        history.add(at(time, a=1))
    assert history.since()["gpus"]["b"]["memory_used"] == [2, None, None]
    history.add(at(4, a=1))
    assert set(history.since()["gpus"]) == {"a"}


def test_zero_is_not_unknown_and_all_is_json() -> None:
    history = History()
    history.add(at(1, a=0, b=None))
    told = history.since()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["gpus"]["a"]["memory_used"] == [0]
    assert told["gpus"]["b"]["memory_used"] == [None]


def test_empty() -> None:
    assert History().since() == {"time": [], "gpus": {}}


def test_8_gpus_for_ten_minutes_are_small() -> None:
    uuids = [f"GPU-{n}" for n in range(8)]
    tracemalloc.start()
    try:
        history = History()
        for second in range(620):
            samples = tuple(
                GpuSample(uuid, utilization=float(second % 100), memory_used=second * 2**20)
                for uuid in uuids
            )
            history.add(Snapshot(float(second), gpus=samples))
        bytes_held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history.since()["time"]) == 600
    assert bytes_held < 2e6


def test_many_threads() -> None:
    history = History(entries=50)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(100):
                told = history.since()
                assert all(
                    len(column) == len(told["time"])
                    for gpu in told["gpus"].values()
                    for column in gpu.values()
                )
        except AssertionError as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for time in range(300):
        history.add(at(time, **{f"g{time // 40}": time}))
    for reader in readers:
        reader.join()
    assert not failures


def test_who_held_memory_is_kept_and_unknown_where_nobody_asked() -> None:
    def holds(time: float, **memory: int) -> Snapshot:
        parts = (GpuSample("GPU"), GpuSample("MIG", mig="GPU"))
        processes = [ProcessSample("MIG", 1, count, kernel=k) for k, count in memory.items()]
        return Snapshot(time, gpus=parts, processes=tuple(processes))

    history = History()
    for taken in (holds(1.0, a=5), holds(2.0), holds(3.0, a=6, b=1)):
        history.add(taken)
    history.add(
        replace(holds(4.0), processes=(ProcessSample("MIG", 9, 7, kernel="a", orphan=True),))
    )
    told = history.since()["gpus"]
    expected = {"a": [5, None, 6, 0], "b": [0, None, 1, 0], "left": [0, None, 0, 7]}
    assert told["GPU"]["held"] == told["MIG"]["held"] == expected
