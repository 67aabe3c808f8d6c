"""Refuse who may not ask: by the server's own rules, and two that it leaves open."""

from __future__ import annotations

from typing import Any

from jupyter_server.base.handlers import JupyterHandler
from tornado.web import HTTPError

AUTH_RESOURCE = "gpumagic"
"""What an authoriser is asked about."""


class Guard(JupyterHandler):
    """Goes before Jupyter's handlers. Nobody who has not logged in is told anything, whatever the
    method; and a foreign page is refused also where it has the token, unless the server's
    ``allow_origin`` names it."""

    auth_resource = AUTH_RESOURCE

    async def prepare(self, **options: Any) -> None:
        """Refuse before it is asked whether there is such a method."""
        await super().prepare(**options)
        # A browser asks without credentials whether another page may ask.
        preflight = "Access-Control-Request-Method" in self.request.headers
        if self.current_user is None and not (self.request.method == "OPTIONS" and preflight):
            raise HTTPError(403)

    def skip_check_origin(self) -> bool:
        """Jupyter's own answer is yes where there is a token."""
        return False
