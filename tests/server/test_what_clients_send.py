"""What a client may send: anything at all, and nothing of it raises."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tornado.web import HTTPError

from gpumagic.server.hub import Want, parse_want
from gpumagic.server.kernels import terminate
from gpumagic.telemetry import ProcessSample, Snapshot
from gpumagic.telemetry.sampler import PERIODS_S

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
BEFORE = Want(2.0, True)


def fits(want):
    assert PERIODS_S[0] <= want.period_s <= PERIODS_S[1]
    assert isinstance(want.processes, bool)
    assert want.since is None or want.past


@given(st.text() | st.binary())
def test_any_text(text):
    want = parse_want(text, BEFORE)
    assert want is None or fits(want) is None


@given(
    st.fixed_dictionaries(
        {"type": st.just("want")},
        optional={"period": json_values, "processes": json_values, "since": json_values},
    )
)
def test_any_want(message):
    want = parse_want(json.dumps(message), BEFORE)
    if want is not None:
        fits(want)
        assert want.past == ("since" in message)
        if "period" not in message:
            assert want.period_s == BEFORE.period_s
        if "processes" not in message:
            assert want.processes


@given(st.floats(0.25, 60.0), st.booleans(), st.none() | st.floats(0, 2e9))
def test_what_is_right_is_taken_as_it_is(period, processes, since):
    text = json.dumps({"type": "want", "period": period, "processes": processes, "since": since})
    assert parse_want(text, Want()) == Want(period, processes, True, since)


ORPHAN = ProcessSample("GPU-0", 2**30, started=17.5, orphan=True)


@given(json_values | st.fixed_dictionaries({"pid": json_values, "started": json_values}))
def test_any_order_is_refused(given):
    with pytest.raises(HTTPError) as refused:
        asyncio.run(terminate(given, Snapshot(1.0, processes=(ORPHAN,))))
    assert refused.value.status_code == 409


def test_an_order_for_one_that_has_ended():
    order = {"pid": 2**30, "started": 17.5, "force": True}
    ended, text = asyncio.run(terminate(order, Snapshot(1.0, processes=(ORPHAN,))))
    assert (ended, "has ended by itself" in text) == (True, True)
