"""A Jupyter server in a process of its own, on a driver that a test can break."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request

from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect
from waiting import ANSWER_S

TOKEN = "test"
_START_S = 90


class RealServer:
    """On the stand-in for NVIDIA's library, whose machine is in a text file."""

    def __init__(self, library, folder):
        self.machine = folder / "machine"
        self.machine.touch()
        self.log = folder / "log"
        self._info = folder / "runtime"
        self._env = {
            **{
                k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "JPY_", "JUPYTER"))
            },
            "LD_LIBRARY_PATH": str(library.parent),
            "STAND_IN_NVML": str(self.machine),
            "GPUMAGIC_RUNTIME_DIR": str(folder / "virtual"),
            **{f"JUPYTER_{kind.upper()}_DIR": str(folder / kind) for kind in ("config", "data")},
            "JUPYTER_RUNTIME_DIR": str(self._info),
        }
        self.folder = folder

    def begin(self, *options):
        command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"]
        command += ["--port=0", f"--IdentityProvider.token={TOKEN}"]
        command += [f"--ServerApp.root_dir={self.folder}", *options]
        command += ["--ServerApp.jpserver_extensions={'gpumagic': True}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=self._env, stdout=log, stderr=log)
        info = self._info / f"jpserver-{self.process.pid}.json"
        self._wait(lambda: json.loads(info.read_text())["url"])
        self.url = json.loads(info.read_text())["url"]
        self._wait(lambda: self.get("api/status"))

    def change(self, **changes):
        """``fail__nvmlDeviceGetName=3`` and its like."""
        with self.machine.open("a") as file:
            file.writelines(f"{key.replace('__', '.')}={to}\n" for key, to in changes.items())

    def get(self, path):
        request = urllib.request.Request(self.url + path)
        request.add_header("Authorization", f"token {TOKEN}")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return json.loads(answer.read())

    async def connect(self, **want):
        """A client of the stream."""
        url = self.url.replace("http", "ws", 1) + "gpumagic/api/stream"
        headers = {"Authorization": f"token {TOKEN}"}
        link = await websocket_connect(HTTPRequest(url, headers=headers))
        await link.write_message(json.dumps({"type": "want", **want}))
        return link

    def end(self):
        """Stop it; what it logged is returned."""
        self.process.terminate()
        assert self.process.wait(3 * ANSWER_S) == 0
        return self.log.read_text()

    def _wait(self, condition):
        deadline = time.monotonic() + _START_S
        while True:
            try:
                if condition():
                    return
            except (OSError, ValueError, KeyError):
                pass
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)


async def leave(link):
    """Close a connection, and wait until it is closed."""
    link.close()
    while await asyncio.wait_for(link.read_message(), ANSWER_S) is not None:
        pass


async def told(link, condition, patience_s=3 * ANSWER_S):
    """The first snapshot for which a condition holds."""

    async def look():
        while True:
            text = await link.read_message()
            assert text is not None, "the server closed the connection"
            message = json.loads(text)
            if message["type"] == "snapshot" and condition(message["snapshot"]):
                return message["snapshot"]

    return await asyncio.wait_for(look(), patience_s)
