"""Stream snapshots over a websocket, at the pace that one small message asks for."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import ws_authenticated
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from tornado.web import HTTPError
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from gpumagic.server.access import AUTH_RESOURCE, Guard
from gpumagic.server.hub import Hub
from gpumagic.server.outbox import Outbox
from gpumagic.server.wants import LONGEST_MESSAGE, parse_want

HUB = "gpumagic_hub"
"""Where a web application's settings have the hub."""

# What the system keeps for a client that does not read is a queue too: keep it short, in bytes.
_SEND_BUFFER = 32768
_UNSENT = 16384
_PING_S = 30.0


class StreamRoute(Guard, WebSocketMixin, WebSocketHandler, JupyterHandler):
    """Snapshots, at the pace that this client chose."""

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

    @property
    def _hub(self) -> Hub:
        hub: Hub = self.settings[HUB]
        return hub

    @ws_authenticated
    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Become a websocket, for whoever may."""
        allowed = await ensure_async(
            self.authorizer.is_authorized(self, self.current_user, "execute", AUTH_RESOURCE)
        )
        if not allowed:
            raise HTTPError(403)
        await super().get(*args, **kwargs)

    def open(self, *args: Any, **kwargs: Any) -> None:
        """A client came."""
        self.set_nodelay(True)
        self._keep_buffers_short()
        self._outbox = self._hub.join(self._send)

    def on_message(self, message: str | bytes) -> None:
        """A client wants something; what is malformed is ignored."""
        if self._outbox is not None:
            want = parse_want(message, self._outbox.want)
            if want is not None:
                self._hub.ask(self._outbox, want)

    def on_close(self) -> None:
        """A client has gone."""
        if self._outbox is not None:
            self._hub.leave(self._outbox)
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
