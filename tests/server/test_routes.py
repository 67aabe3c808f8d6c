"""The REST routes: who may, what they answer, and what they answer without a GPU."""

import asyncio
import itertools
import json
import logging
import time

import pytest
from snapshots import snapshot_in

from gpumagic.server.routes import routes
from gpumagic.telemetry import ProcessSample
from gpumagic.telemetry.history import CellRun

GIB = 2**30
GETS = ("snapshot", "history", "doctor")
ROUTES = [path.rpartition("/")[2] for path, *_ in routes()]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
EVIL = "https://evil.example"
NONE = "token 0123456789"


@pytest.mark.parametrize("token", ["", NONE])
async def test_without_the_token_no_method_is_answered(machine, fetch, token):
    for route, method in itertools.product(ROUTES, METHODS):
        answer = await fetch(
            route,
            method=method,
            headers={"Authorization": token},
            body=None,
            allow_nonstandard_methods=True,
        )
        assert answer.code == 403, (route, method)
        assert b"GPU-0" not in (answer.body or b"")
    assert machine.takes == 0


async def test_a_foreign_page_is_refused_even_with_the_token(machine, fetch):
    for route in GETS:
        assert (await fetch(route, headers={"Origin": EVIL})).code == 404, route
        asks = {"Origin": EVIL, "Access-Control-Request-Method": "GET"}
        answer = await fetch(route, method="OPTIONS", headers=asks)
        assert answer.code == 404, route
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert machine.takes == 0


async def test_a_page_that_the_server_allows_is_answered(
    machine, fetch, jp_serverapp, jp_http_port, dial, monkeypatch
):
    friend = "https://friend.example"
    token = {"Authorization": f"token {jp_serverapp.identity_provider.token}"}
    monkeypatch.setitem(jp_serverapp.web_app.settings, "allow_origin", friend)
    answer = await fetch("snapshot", headers={"Origin": friend})
    assert answer.code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == friend
    # What a browser asks first has no token.
    asks = {"Authorization": "", "Origin": friend, "Access-Control-Request-Method": "POST"}
    assert (await fetch("terminate", method="OPTIONS", headers=asks)).code < 300
    await dial({"Origin": friend, **token})
    assert (await fetch("snapshot", headers={"Origin": EVIL})).code == 404
    with pytest.raises(Exception, match="403"):
        await dial({"Origin": EVIL, **token})


async def test_without_the_token_nothing_is_ended(machine, fetch):
    answer = await fetch("terminate", method="POST", body="{}", headers={"Authorization": NONE})
    assert answer.code == 403
    assert machine.takes == 0


async def test_from_a_foreign_page_nothing_is_told(machine, fetch, cookies):
    browser = await cookies()
    for route in GETS:
        mine = await fetch(route, headers={"Authorization": "", **browser})
        assert mine.code == 200, route
        takes = machine.takes
        foreign = {"Authorization": "", "Origin": "https://evil.example", **browser}
        answer = await fetch(route, headers=foreign)
        assert answer.code in (403, 404), route
        assert machine.takes == takes


async def test_a_post_needs_the_xsrf_cookie_and_the_same_origin(machine, fetch, cookies):
    browser = {"Authorization": "", **await cookies()}
    for headers in (browser, {**browser, "Origin": "https://evil.example"}):
        answer = await fetch("terminate", method="POST", body="{}", headers=headers)
        # Jupyter's own answer to a foreign page is that there is no such thing.
        assert answer.code == (404 if "Origin" in headers else 403)
    assert machine.takes == 0
    xsrf = "0123456789abcdef"
    own = {**browser, "Cookie": f"{browser['Cookie']}; _xsrf={xsrf}", "X-XSRFToken": xsrf}
    # The order itself is refused: it names nobody.
    assert (await fetch("terminate", method="POST", body="{}", headers=own)).code == 409
    foreign = {**own, "Origin": EVIL}
    answer = await fetch("terminate", method="POST", body="{}", headers=foreign)
    assert answer.code == 404


async def test_who_is_not_authorised_is_told_nothing(
    machine, fetch, jp_serverapp, connect, monkeypatch
):
    monkeypatch.setattr(jp_serverapp.authorizer, "is_authorized", lambda *_: False)
    for route in GETS:
        assert (await fetch(route)).code == 403
    assert (await fetch("terminate", method="POST", body="{}")).code == 403
    with pytest.raises(Exception, match="403"):
        await connect()
    assert machine.takes == 0


async def test_the_snapshot(machine, fetch, jp_serverapp):
    machine.processes = (ProcessSample("GPU-0", 4242, GIB),)
    answer = await fetch("snapshot")
    assert answer.headers["Content-Type"] == "application/json"
    snapshot = snapshot_in(answer.body)
    assert snapshot.gpus == machine.gpus
    assert snapshot.processes == machine.processes
    assert "api_last_activity" not in jp_serverapp.web_app.settings


async def test_a_second_request_within_a_second_asks_no_second_time(machine, fetch):
    await fetch("snapshot")
    await fetch("snapshot")
    assert machine.takes == 1


async def test_the_history_and_the_cells(machine, hub, fetch):
    await fetch("snapshot")
    hub.cells.keep(CellRun("a", "k", "a.ipynb", 1, time.time(), None, ("GPU-0",)))
    past = json.loads((await fetch("history")).body)
    assert past["history"] == {
        "time": [1001.0],
        "gpus": {
            "GPU-0": {"utilization": [None], "memory_used": [GIB], "power": [None], "held": {}}
        },
    }
    assert [cell["id"] for cell in past["cells"]] == ["a"]
    assert past["cells"][0]["gpus"] == ["GPU-0"]
    later = json.loads((await fetch("history", params={"since": "1001.0"})).body)
    assert later["history"] == {"time": [], "gpus": {}}


async def test_a_moment_that_is_none_is_said_to_be_none(machine, fetch):
    for since in ("now", "nan", "1e999", "1" * 5000):
        answer = await fetch("history", params={"since": since})
        assert answer.code == 400, since
        assert "seconds of Unix time" in json.loads(answer.body)["message"]


async def test_the_doctor_says_what_it_found(machine, fetch):
    checks = json.loads((await fetch("doctor")).body)
    assert {"name", "ok", "found", "cure"} == set(checks[0])
    assert "NVML" in [check["name"] for check in checks]


async def test_a_stalled_driver_holds_nobody_up(machine, hub, fetch):
    hub.answer_s = 0.05
    hub.doctor = machine.answers.wait
    machine.answers.clear()
    snapshot, checks = await asyncio.gather(fetch("snapshot"), fetch("doctor"))
    assert json.loads(snapshot.body)["problems"][0]["code"] == "stalled"
    assert "has not answered" in json.loads(checks.body)[0]["found"]
    machine.answers.set()


async def test_with_no_driver_the_server_says_why(fetch, connect, caplog):
    caplog.set_level(logging.DEBUG)
    snapshot = snapshot_in((await fetch("snapshot")).body)
    assert snapshot.gpus == ()
    assert snapshot.problems[0].cause
    assert snapshot.problems[0].cure
    client = await connect()
    assert (await client.hear())["snapshot"]["problems"]
    checks = json.loads((await fetch("doctor")).body)
    assert any(check["ok"] is False and check["cure"] for check in checks)
    assert "Traceback" not in caplog.text


async def test_what_is_not_there_is_not_there(machine, fetch):
    assert (await fetch("nonsense")).code == 404
    assert (await fetch("snapshot", method="POST", body="{}")).code == 405


async def test_the_websocket_needs_the_token(machine, dial):
    for headers in ({}, {"Authorization": NONE}):
        with pytest.raises(Exception, match="403"):
            await dial(headers)
    assert machine.takes == 0


async def test_the_websocket_refuses_a_foreign_page(machine, dial, cookies, jp_serverapp):
    browser = await cookies()
    token = {"Authorization": f"token {jp_serverapp.identity_provider.token}"}
    for credentials in (browser, token, {**browser, **token}):
        with pytest.raises(Exception, match="403"):
            await dial({"Origin": EVIL, **credentials})
    assert machine.takes == 0
    await dial(browser)
