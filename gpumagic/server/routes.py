"""Answer the REST routes, for proxies that cut websockets, for scripts, and for Prometheus."""

from __future__ import annotations

import asyncio
import csv
import json
import math
from pathlib import Path

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web

from gpumagic.server import metrics, terminate
from gpumagic.server.access import Guard
from gpumagic.server.aside import aside
from gpumagic.server.hub import Hub
from gpumagic.server.stream import HUB, StreamRoute

_LONGEST_BODY = 4096
_COLUMNS = (
    "time (s since 1970, UTC)",
    "uuid",
    "utilization (%)",
    "memory used (B)",
    "temperature (°C)",
    "power (W)",
)
_ROWS_AT_ONCE = 2000
_RENDERER = Path(__file__).parents[1] / "static" / "widget.js"


def routes() -> list[tuple[str, type[web.RequestHandler]]]:
    """Each path and who answers it."""
    return [
        (r"/gpumagic/api/snapshot", SnapshotRoute),
        (r"/gpumagic/api/history", HistoryRoute),
        (r"/gpumagic/api/doctor", DoctorRoute),
        (r"/gpumagic/api/metrics", MetricsRoute),
        (r"/gpumagic/api/export.csv", ExportRoute),
        (r"/gpumagic/api/terminate", TerminateRoute),
        (r"/gpumagic/api/monitor.js", RendererRoute),
        (r"/gpumagic/api/stream", StreamRoute),
    ]


class Route(Guard, APIHandler):
    """What all routes have in common."""

    # A monitor that is left open does not keep an idle server alive.
    _track_activity = False

    @property
    def _hub(self) -> Hub:
        hub: Hub = self.settings[HUB]
        return hub

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


class SnapshotRoute(Route):
    """The machine now, or as it was at most a second ago."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish((await self._hub.fresh()).to_json())


class HistoryRoute(Route):
    """What was read and which cells ran: all that is kept, or what came after ``since``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(b"{" + await self._hub.past(self.since()) + b"}")


class DoctorRoute(Route):
    """What stands between this server and a GPU: a list of checks."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps(await self._hub.checks(), ensure_ascii=False))


class MetricsRoute(Route):
    """The snapshot in Prometheus's text format."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        snapshot = await self._hub.fresh()
        self.finish(metrics.text(snapshot), set_content_type=metrics.CONTENT_TYPE)


class ExportRoute(Route):
    """The history as a file of comma-separated values, for spreadsheets."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        since = self.since()
        readings = await aside(lambda: self._hub.sampler.history.readings(since))
        self.set_header("Content-Type", "text/csv; charset=utf-8")
        self.set_header("Content-Disposition", 'attachment; filename="gpus.csv"')
        table = csv.writer(self)
        table.writerow(_COLUMNS)
        for n, reading in enumerate(readings, 1):
            table.writerow(reading)
            if n % _ROWS_AT_ONCE == 0:
                await self.flush()
                # A client that reads fast must not keep all others waiting.
                await asyncio.sleep(0)
        self.finish(set_content_type="text/csv; charset=utf-8")


class RendererRoute(Route):
    """The code that draws, which the notebook's widget has too; a browser's copy is checked."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        try:
            code = _RENDERER.read_bytes()
        except OSError:
            raise web.HTTPError(404, "the front end is not built: pip install gpumagic") from None
        self.set_header("Cache-Control", "no-cache")
        self.finish(code, set_content_type="text/javascript; charset=utf-8")


class TerminateRoute(Route):
    """Ends an orphan, which is named by its pid and by when it began."""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        if len(self.request.body) > _LONGEST_BODY:
            raise web.HTTPError(413, f"a body of at most {_LONGEST_BODY} bytes is expected")
        try:
            order = terminate.parse_order(self.request.body)
            snapshot = await self._hub.fresh(max_age_s=0.0)
            owner = await self._hub.owner(order.pid)
            ended, message = await terminate.terminate(order, snapshot, owner)
        except terminate.NotEnded as refusal:
            raise web.HTTPError(refusal.status, str(refusal)) from None
        self.set_status(200 if ended else 202)
        self.finish(json.dumps({"ended": ended, "message": message}))
