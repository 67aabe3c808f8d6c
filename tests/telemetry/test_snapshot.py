"""The wire format: what goes through JSON comes back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import snapshot_in

from gpumagic.telemetry import GpuSample, Host, Problem, ProcessSample, Snapshot
from gpumagic.telemetry.snapshot import KernelDeath, KernelSample

SAMPLE = Path(__file__).parents[1] / "data" / "snapshot.json"

numbers = st.floats(allow_nan=False, allow_infinity=False)
snapshots = st.builds(
    Snapshot,
    time=numbers,
    host=st.builds(Host, name=st.none() | st.text(), cpu_utilization=st.none() | numbers),
    driver=st.none() | st.text(),
    gpus=st.lists(
        st.builds(
            GpuSample,
            uuid=st.text(),
            name=st.none() | st.text(),
            ordinal=st.none() | st.integers(),
            memory_used=st.none() | st.integers(0),
            utilization=st.none() | numbers,
            throttle=st.none() | st.lists(st.text()).map(tuple),
        )
    ).map(tuple),
    processes=st.lists(
        st.builds(ProcessSample, uuid=st.text(), pid=st.integers(), mine=st.booleans())
    ).map(tuple),
    problems=st.lists(st.builds(Problem, st.text(), st.text(), st.text())).map(tuple),
)


@given(snapshots)
def test_json_and_back(snapshot: Snapshot) -> None:
    assert snapshot_in(snapshot.to_json()) == snapshot
    assert snapshot_in(snapshot.to_dict()) == snapshot


def test_what_is_not_known_is_null_and_zero_is_zero() -> None:
    (gpu,) = Snapshot(1.0, gpus=(GpuSample("GPU-1", utilization=0.0),)).to_dict()["gpus"]
    assert gpu["utilization"] == 0.0
    assert gpu["power"] is None
    assert gpu["throttle"] is None


def test_infinity_does_not_get_into_json() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        Snapshot(float("inf")).to_json()


def test_the_sample_that_other_languages_read_has_every_field() -> None:
    text = SAMPLE.read_text(encoding="utf-8")
    snapshot = snapshot_in(text)
    assert json.loads(snapshot.to_json()) == json.loads(text)
    for part, kind in (
        (snapshot.gpus, GpuSample),
        (snapshot.processes, ProcessSample),
        (snapshot.problems, Problem),
        (snapshot.kernels, KernelSample),
        (snapshot.events, KernelDeath),
        ((snapshot.host,), Host),
    ):
        for field in dataclasses.fields(kind):
            assert any(getattr(item, field.name) is not None for item in part), field.name
