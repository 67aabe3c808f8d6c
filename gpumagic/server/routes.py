"""Answer requests for GPU data by REST and websocket, in the Jupyter server."""

import json
import math
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import nbformat
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.extension.application import ExtensionApp
from tornado import web
from tornado.websocket import WebSocketHandler

from gpumagic import faults
from gpumagic.server import kernels
from gpumagic.server.deaths import Deaths
from gpumagic.server.hub import Client, Hub, parse_want
from gpumagic.server.kernels import KernelCells, KernelTable
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.host import KernelLoads
from gpumagic.telemetry.processes import Owners
from gpumagic.telemetry.sampler import Sampler
from gpumagic.telemetry.snapshot import Snapshot

_JSON = "application/json"
HUB = "gpumagic_hub"  # the key of the hub in the settings of the web application


def routes() -> list[tuple[Any, ...]]:
    encode = partial(json.dumps, ensure_ascii=False)
    answers: dict[str, _Answer] = {
        "snapshot": (lambda route: route.hub.fresh(), Snapshot.to_json, _JSON),
        "history": (lambda route: route.hub.past(route.since()), bytes, _JSON),
        "doctor": (lambda route: route.hub.checks(), encode, _JSON),
        "deaths": (lambda route: [*map(vars, route.hub.deaths.events)], encode, _JSON),
        "monitor.js": (_renderer, bytes, "text/javascript; charset=utf-8"),
        "tour": (_tour, str, _JSON),
    }
    return [
        *((f"/gpumagic/api/{name}", GetRoute, {"given": given}) for name, given in answers.items()),
        ("/gpumagic/api/terminate", TerminateRoute),
        ("/gpumagic/api/stream", StreamRoute),
    ]


class Guard(JupyterHandler):
    """Base class of the handlers; refuses requests without a login or from other origins."""

    auth_resource = "gpumagic"  # the name of the resource that the server's authorizer checks
    # Requests do not count as activity, so an open monitor does not keep an idle server alive.
    _track_activity = False

    @property
    def hub(self) -> Hub:
        return cast(Hub, self.settings[HUB])

    async def prepare(self, **options: Any) -> None:
        """Refuse a request without a login, before its HTTP method is checked."""
        await super().prepare(**options)
        # Allow a browser's preflight request, which never has credentials.
        preflight = "Access-Control-Request-Method" in self.request.headers
        if self.current_user is None and not (self.request.method == "OPTIONS" and preflight):
            raise web.HTTPError(403)

    def skip_check_origin(self) -> bool:
        """Return False, so that the origin is checked even for a request with a token."""
        return False


class GetRoute(Guard, APIHandler):
    """Answers GET with the encoded result of a function."""

    def initialize(self, given: "_Answer") -> None:
        self._answer, self._encode, self._type = given

    @web.authenticated
    @authorized
    async def get(self) -> None:
        found = await ensure_async(self._answer(self))
        self.finish(self._encode(found), set_content_type=self._type)

    def since(self) -> float | None:
        if (text := self.get_query_argument("since", "")) in ("", "null"):
            return None
        with suppress(ValueError):
            if math.isfinite(since := float(text)):
                return since
        raise web.HTTPError(400, f"since={text[:40]}: give seconds of Unix time, or nothing")


# A function of the route, the encoder of the function's result, and the content type.
_Answer = tuple[Callable[[GetRoute], Any], Callable[[Any], str | bytes], str]


def _renderer(route: GetRoute) -> bytes:
    """Return the monitor's JavaScript. Browsers must revalidate their cached copy."""
    route.set_header("Cache-Control", "no-cache")
    return (Path(__file__).parents[1] / "static" / "panel.js").read_bytes()


def _tour(route: GetRoute) -> str:
    # A wheel has examples/ inside the package. A clone has examples/ next to the package.
    folders = Path(__file__).parents[1:3]
    every = (folder / "examples" / "tour.ipynb" for folder in folders)
    book = nbformat.read(next(filter(Path.is_file, every)), as_version=4)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return str(nbformat.writes(book))


class TerminateRoute(Guard, APIHandler):
    """Ends the orphaned process that has a given pid and start time."""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        snapshot = await self.hub.fresh(max_age_s=0.0)
        ended, message = await kernels.terminate(self.get_json_body(), snapshot)
        self.set_status(200 if ended else 202)
        self.finish(json.dumps({"ended": ended, "message": message}))


class StreamRoute(Guard, WebSocketMixin, WebSocketHandler, JupyterHandler):
    """Sends snapshots by websocket, as often as the client requests."""

    # These are seconds. Jupyter's own values are milliseconds, which make tornado warn.
    ping_interval = ping_timeout = 30.0
    _client: Client | None = None

    def get_compression_options(self) -> dict[str, Any]:
        """Compress messages, because the samples of 64 GPUs repeat much text."""
        return {"compression_level": 1, "mem_level": 7}

    @ws_authenticated
    async def get(self, *args: Any, **kwargs: Any) -> None:
        who, resource = self.current_user, self.auth_resource
        if not await ensure_async(self.authorizer.is_authorized(self, who, "execute", resource)):
            raise web.HTTPError(403)
        await super().get(*args, **kwargs)

    def open(self, *args: Any, **kwargs: Any) -> None:
        self.set_nodelay(True)
        link: Any = getattr(getattr(self.ws_connection, "stream", None), "socket", None)
        # Use small buffers, so that old snapshots do not queue for slow clients.
        with suppress(OSError, AttributeError):  # a Unix socket, or a system without these options
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 16384)
        self._client = self.hub.join(self.write_message)

    def on_message(self, message: str | bytes) -> None:
        if self._client and (want := parse_want(message, self._client.want)):
            self._client.ask(want)

    def on_close(self) -> None:
        if self._client is not None:
            self.hub.leave(self._client)
            self._client = None


# Jupyter must not track the "idle" status after these messages, because a cell may still run.
_ASIDE = ("gpumagic_request", "gpumagic_reply")
_KERNEL_ACTIONS = "https://events.jupyter.org/jupyter_server/kernel_actions/v1"


class Extension(ExtensionApp):
    """The server extension of gpumagic."""

    name = "gpumagic"

    def initialize_settings(self) -> None:
        """Create the hub, which is idle until a request or the start of a kernel."""
        server = self.serverapp
        assert server is not None
        manager = server.kernel_manager
        if hasattr(manager, "untracked_message_types"):
            manager.untracked_message_types = [*manager.untracked_message_types, *_ASIDE]
        kernels = KernelTable(server.kernel_manager, server.session_manager)
        owners = Owners(lambda: kernels.kernels, root=Path(server.root_dir))
        sampler = Sampler(Collector(owners=owners, usable=False))
        cells = KernelCells(kernels.notebook)
        deaths = Deaths(cells, KernelLoads(lambda: kernels.kernels), sampler.latest)
        self.hub = Hub(sampler, kernels, cells, deaths)
        self.settings[HUB] = self.hub
        with faults.kept("listening to the starts of kernels"):
            logger: Any = server.event_logger
            logger.add_listener(schema_id=_KERNEL_ACTIONS, listener=self._on_action)

    async def _on_action(self, logger: Any, schema_id: str, data: dict[str, Any]) -> None:
        self.hub.watch()

    def initialize_handlers(self) -> None:
        """Add the routes. The server adds its ``base_url`` to their paths."""
        self.handlers.extend(routes())

    async def stop_extension(self) -> None:
        if hasattr(self, "hub"):
            await self.hub.close()
