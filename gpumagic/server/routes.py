"""Answer the routes: REST, for scripts, Prometheus and proxies that cut websockets; and the stream.

Who may not ask is refused by the server's own rules, and by two that it leaves open.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from gpumagic.server import metrics, terminate
from gpumagic.server.client import LONGEST_MESSAGE, Outbox, parse_want
from gpumagic.server.hub import Hub, aside

HUB = "gpumagic_hub"
"""Where a web application's settings have the hub."""

_LONGEST_BODY = 4096
_COLUMNS = (
    "time (s since 1970, UTC)",
    "uuid",
    "utilization (%)",
    "memory used (B)",
    "temperature (°C)",
    "power (W)",
)
_RENDERER = Path(__file__).parents[1] / "static" / "panel.js"
# What the system keeps for a client that does not read is a queue too: keep it short, in bytes.
_SEND_BUFFER = 32768
_UNSENT = 16384
_PING_S = 30.0


def routes() -> list[tuple[Any, ...]]:
    """Each path, who answers it, and how."""
    answers = {
        "snapshot": _snapshot,
        "history": _history,
        "doctor": _doctor,
        "metrics": _metrics,
        "export.csv": _export,
        "monitor.js": _renderer,
    }
    return [
        *((f"/gpumagic/api/{n}", GetRoute, {"answer": answer}) for n, answer in answers.items()),
        ("/gpumagic/api/terminate", TerminateRoute),
        ("/gpumagic/api/stream", StreamRoute),
    ]


class Guard(JupyterHandler):
    """Goes before Jupyter's handlers. Nobody who has not logged in is told anything, whatever the
    method; and a foreign page is refused also where it has the token, unless the server's
    ``allow_origin`` names it."""

    # What an authoriser is asked about.
    auth_resource = "gpumagic"
    # A monitor that is left open does not keep an idle server alive.
    _track_activity = False

    @property
    def hub(self) -> Hub:
        """The server's one hub."""
        hub: Hub = self.settings[HUB]
        return hub

    async def prepare(self, **options: Any) -> None:
        """Refuse before it is asked whether there is such a method."""
        await super().prepare(**options)
        # A browser asks without credentials whether another page may ask.
        preflight = "Access-Control-Request-Method" in self.request.headers
        if self.current_user is None and not (self.request.method == "OPTIONS" and preflight):
            raise web.HTTPError(403)

    def skip_check_origin(self) -> bool:
        """Jupyter's own answer is yes where there is a token."""
        return False


class GetRoute(Guard, APIHandler):
    """Answers GET by a function."""

    def initialize(self, answer: Callable[[GetRoute], Awaitable[None]]) -> None:
        """Tornado calls this with the last part of the route's entry."""
        self._answer = answer

    @web.authenticated
    @authorized
    async def get(self) -> None:
        await self._answer(self)

    def since(self) -> float | None:
        """The argument of that name, in seconds of Unix time."""
        text = self.get_query_argument("since", "")
        if not text or text == "null":
            return None
        try:
            since = float(text)
        except ValueError:
            since = math.nan
        if not math.isfinite(since):
            raise web.HTTPError(400, f"since={text[:40]}: give seconds of Unix time, or nothing")
        return since


async def _snapshot(route: GetRoute) -> None:
    """The machine now, or as it was at most a second ago."""
    route.finish((await route.hub.fresh()).to_json())


async def _history(route: GetRoute) -> None:
    """What was read and which cells ran: all that is kept, or what came after ``since``."""
    route.finish(await route.hub.past(route.since()))


async def _doctor(route: GetRoute) -> None:
    """What stands between this server and a GPU: a list of checks."""
    route.finish(json.dumps(await route.hub.checks(), ensure_ascii=False))


async def _metrics(route: GetRoute) -> None:
    """The snapshot in Prometheus's text format."""
    text = metrics.text(await route.hub.fresh())
    route.finish(text, set_content_type=metrics.CONTENT_TYPE)


async def _export(route: GetRoute) -> None:
    """The history as a file of comma-separated values, for spreadsheets."""
    since = route.since()

    def table() -> str:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([_COLUMNS, *route.hub.sampler.history.readings(since)])
        return text.getvalue()

    route.set_header("Content-Disposition", 'attachment; filename="gpus.csv"')
    route.finish(await aside(table), set_content_type="text/csv; charset=utf-8")


async def _renderer(route: GetRoute) -> None:
    """The code that draws, which the notebook's widget has too; a browser's copy is checked."""
    try:
        code = _RENDERER.read_bytes()
    except OSError:
        raise web.HTTPError(404, "the front end is not built: pip install gpumagic") from None
    route.set_header("Cache-Control", "no-cache")
    route.finish(code, set_content_type="text/javascript; charset=utf-8")


class TerminateRoute(Guard, APIHandler):
    """Ends an orphan, which is named by its pid and by when it began."""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        if len(self.request.body) > _LONGEST_BODY:
            raise web.HTTPError(413, f"a body of at most {_LONGEST_BODY} bytes is expected")
        try:
            order = terminate.parse_order(self.request.body)
            snapshot = await self.hub.fresh(max_age_s=0.0)
            owner = await self.hub.owner(order.pid)
            ended, message = await terminate.terminate(order, snapshot, owner)
        except terminate.NotEnded as refusal:
            raise web.HTTPError(refusal.status, str(refusal)) from None
        self.set_status(200 if ended else 202)
        self.finish(json.dumps({"ended": ended, "message": message}))


class StreamRoute(Guard, WebSocketMixin, WebSocketHandler, JupyterHandler):
    """Snapshots by websocket, at the pace that this client chose by one small message."""

    _outbox: Outbox | None = None

    @property
    def max_message_size(self) -> int:
        """Bytes; tornado closes the connection of who sends more."""
        return LONGEST_MESSAGE

    # Tornado pings by itself, and takes them for seconds. Jupyter's own are milliseconds, of which
    # tornado warns for each connection.
    @property
    def ping_interval(self) -> float:
        """Seconds."""
        return self.settings.get("websocket_ping_interval") or _PING_S

    @property
    def ping_timeout(self) -> float:
        """Seconds; who does not answer for so long is gone."""
        return self.ping_interval

    @ws_authenticated
    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Become a websocket, for whoever may."""
        who, resource = self.current_user, self.auth_resource
        if not await ensure_async(self.authorizer.is_authorized(self, who, "execute", resource)):
            raise web.HTTPError(403)
        await super().get(*args, **kwargs)

    def open(self, *args: Any, **kwargs: Any) -> None:
        """A client came."""
        self.set_nodelay(True)
        self._keep_buffers_short()
        self._outbox = self.hub.join(self._send)

    def on_message(self, message: str | bytes) -> None:
        """A client wants something; what is malformed is ignored."""
        if self._outbox is not None:
            want = parse_want(message, self._outbox.want)
            if want is not None:
                self.hub.ask(self._outbox, want)

    def on_close(self) -> None:
        """A client has gone."""
        if self._outbox is not None:
            self.hub.leave(self._outbox)
            self._outbox = None

    def _send(self, message: bytes) -> asyncio.Future[None]:
        try:
            return asyncio.ensure_future(self.write_message(message))
        except WebSocketClosedError as error:
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed

    def _keep_buffers_short(self) -> None:
        link = getattr(getattr(self.ws_connection, "stream", None), "socket", None)
        if link is None:
            return
        options = [(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)]
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            options.append((socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT))
        for option in options:
            try:
                link.setsockopt(*option)
            except OSError:
                continue  # a Unix socket, or a system without such an option
