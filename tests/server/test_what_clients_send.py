"""What a client may send: anything at all, and nothing of it raises."""

import json

from hypothesis import given
from hypothesis import strategies as st

from gpumagic.server.hub import Want, parse_want
from gpumagic.server.kernels import NotEnded, Order, parse_order
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


@given(json_values)
def test_any_order_is_refused_or_an_order(given):
    try:
        assert isinstance(parse_order(given), Order)
    except NotEnded:
        return


@given(st.fixed_dictionaries({"pid": json_values, "started": json_values, "force": json_values}))
def test_any_order_of_the_right_shape(order):
    try:
        made = parse_order(order)
    except NotEnded:
        return
    assert made.pid > 0
    assert made.started > 0


def test_an_order():
    order = parse_order({"pid": 4242, "started": 17.5, "force": True})
    assert order == Order(4242, 17.5, True)
