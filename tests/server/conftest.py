"""A real Jupyter server in the test's own process, with sources that a test makes up."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from pytest_jupyter.jupyter_core import *  # noqa: F403
from pytest_jupyter.jupyter_server import *  # noqa: F403
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect
from waiting import ANSWER_S

from gpumagic.server import routes
from gpumagic.server.routes import HUB
from gpumagic.telemetry import GpuSample, Host, Snapshot
from gpumagic.telemetry.sampler import Sampler

GIB = 2**30


class Machine:
    """What a sampler asks; a test says what there is, or that the driver stalls."""

    def __init__(self):
        self.gpus = (GpuSample("GPU-0", "H100", 0, memory_total=80 * GIB, memory_used=GIB),)
        self.processes = ()
        self.problems = ()
        self.takes = 0
        self.answers = threading.Event()
        self.answers.set()
        self.threads = set()

    def take(self, *, processes, **_):
        self.takes += 1
        self.threads.add(threading.get_ident())
        self.answers.wait(ANSWER_S)
        return Snapshot(
            time=1000.0 + self.takes,
            host=Host("box"),
            driver="580",
            source="nvml",
            gpus=self.gpus,
            processes=self.processes if processes else (),
            problems=self.problems,
        )


@pytest.fixture
def machine(monkeypatch):
    """The server's sampler asks this machine; without the fixture, the real one."""
    made = Machine()
    monkeypatch.setattr(routes, "Sampler", lambda collector: Sampler(made))
    return made


@pytest.fixture
def jp_server_config():
    return {"ServerApp": {"jpserver_extensions": {"gpumagic": True}}}


@pytest.fixture
def hub(jp_serverapp):
    return jp_serverapp.web_app.settings[HUB]


@pytest.fixture
def fetch(jp_fetch):
    """Fetch a route of the monitor; answers with errors do not raise."""

    def get(*path, **options):
        return jp_fetch("gpumagic", "api", *path, **{"raise_error": False, **options})

    return get


@pytest.fixture
def order(fetch):
    """Order the end of a process; returns the status and what is said to it."""

    async def send(**words):
        answer = await fetch("terminate", method="POST", body=json.dumps(words))
        return answer.code, json.loads(answer.body)["message"]

    return send


class Client:
    """A client of the stream."""

    def __init__(self, connection):
        self.connection = connection

    async def hear(self, kind="snapshot", until=lambda message: True):
        """The next message of a kind for which `until` holds."""
        while True:
            text = await asyncio.wait_for(self.connection.read_message(), ANSWER_S)
            assert text is not None, "the server closed the connection"
            message = json.loads(text)
            if message["type"] == kind and until(message):
                return message

    def want(self, **want):
        return self.connection.write_message(json.dumps({"type": "want", **want}))

    def close(self):
        self.connection.close()


@pytest.fixture
def links(jp_asyncio_loop):
    """The connections that a test opened; afterwards they are closed."""
    made = []
    yield made

    async def close(link):
        link.close()
        while await asyncio.wait_for(link.read_message(), ANSWER_S) is not None:
            pass

    for link in made:
        jp_asyncio_loop.run_until_complete(close(link))


@pytest.fixture
def connect(jp_ws_fetch, links):
    """Open the stream."""

    async def opened(**options):
        links.append(await jp_ws_fetch("gpumagic", "api", "stream", **options))
        return Client(links[-1])

    return opened


@pytest.fixture
def cookies(jp_serverapp, http_server_client, jp_base_url):
    """Log in as a browser does; returns the headers that it sends from then on."""

    async def login():
        token = jp_serverapp.identity_provider.token
        answer = await http_server_client.fetch(
            f"{jp_base_url}api/status?token={token}", raise_error=False
        )
        pairs = [c.partition(";")[0] for c in answer.headers.get_list("Set-Cookie")]
        return {"Cookie": "; ".join(pairs)}

    return login


@pytest.fixture
def dial(jp_serverapp, jp_http_port, http_server, jp_base_url, links):
    """Open the stream with exactly these headers and none else."""

    async def opened(headers):
        url = f"ws://127.0.0.1:{jp_http_port}{jp_base_url}gpumagic/api/stream"
        links.append(await websocket_connect(HTTPRequest(url, headers=headers)))

    return opened
