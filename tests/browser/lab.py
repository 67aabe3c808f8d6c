"""A real JupyterLab, and a kernel gateway for it, in folders of their own, each on a machine whose
NVIDIA driver is the stand-in."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import nbformat

START_S = 60
STOP_S = 15
# A machine that all tests begin with: its driver is asked only every 10 s how many GPUs there are.
TWO_GPUS: dict[str, object] = {"gpus": 2}
OVERRIDES = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
    # A saved layout must not outlive its test.
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}


class Server:
    """A server on a machine whose GPUs a test plays; starts, stops, and starts again at the same
    address.

    Parameters
    ----------
    folder : Path
        Empty.
    library : Path
        The stand-in for NVML.
    host : str
        What the host is called; empty: as this machine is.
    """

    def __init__(self, folder: Path, library: Path, host: str = "") -> None:
        self.token = secrets.token_hex(16)
        self.log = folder / "log"
        self.group = folder / "group"
        self.group.mkdir()
        self._machine = folder / "machine"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()
        self._env = os.environ | {
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "IPYTHONDIR": str(folder / "ipython"),
            "GPUMAGIC_RUNTIME_DIR": str(folder / "state"),
            "LD_LIBRARY_PATH": str(library.parent),
            "STAND_IN_NVML": str(self._machine),
            "GPUMAGIC_HOST": host,
            # Empty, until a test gives the machine a limit.
            "GPUMAGIC_CGROUP": str(self.group),
        }
        self.machine()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def machine(self, settings: Mapping[str, object] = MappingProxyType({})) -> None:
        """Makes the machine one with two GPUs and these settings: see the stand-in."""
        settings = TWO_GPUS | dict(settings)
        lines = "".join(f"{key}={value}\n" for key, value in settings.items())
        # The stand-in reads the file at every call, and shall never find half of it.
        new = self._machine.with_suffix(".new")
        new.write_text(lines)
        new.replace(self._machine)

    def request(self, path: str, **options: object) -> bytes:
        """What the server answers to one who has the token."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(self.base + path, headers=headers, **options)  # type: ignore[arg-type]
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())

    def run(self, *command: str) -> None:
        """Starts this command of Python's, and waits until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self._folder,
                env=self._env,
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + START_S
        while True:
            try:
                self.request("api")
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{command[0]} does not start:\n{self.said()}") from None
                time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                # A thread of AnyIO's outlives its loop where a request for a file was under way.
                self._process.kill()
                self._process.wait()
            self._process = None

    def said(self) -> str:
        """The server's log."""
        return self.log.read_text()


class Gateway(Server):
    """A kernel gateway."""

    def __init__(self, folder: Path, library: Path, host: str) -> None:
        super().__init__(folder, library, host)
        # It tells its kernels nothing else.
        self._env["KG_ENV_PROCESS_WHITELIST"] = ",".join(self._env)

    @property
    def options(self) -> tuple[str, ...]:
        """Of a JupyterLab whose kernels run here."""
        return f"--gateway-url={self.base}", f"--GatewayClient.auth_token={self.token}"

    def start(self) -> None:
        self.run(
            "kernel_gateway",
            f"--KernelGatewayApp.port={self._port}",
            "--KernelGatewayApp.port_retries=0",
            f"--KernelGatewayApp.auth_token={self.token}",
            "--JupyterWebsocketPersonality.list_kernels=True",
        )


class Lab(Server):
    """A JupyterLab."""

    def __init__(self, folder: Path, library: Path, *options: str, host: str = "") -> None:
        super().__init__(folder, library, host)
        self.home = folder / "notebooks"
        self.home.mkdir()
        settings = folder / "config" / "labconfig" / "default_setting_overrides.json"
        settings.parent.mkdir(parents=True)
        settings.write_text(json.dumps(OVERRIDES))
        self._options = options

    def page(self, workspace: str) -> str:
        """The address of a workspace that is this test's own."""
        return f"{self.base}lab/workspaces/{workspace}?token={self.token}"

    def start(self) -> None:
        self.run(
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            f"--ServerApp.root_dir={self.home}",
            f"--port={self._port}",
            "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self.token}",
            "--LabApp.expose_app_in_browser=True",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            *self._options,
        )

    def write(self, name: str, cells: list[str]) -> str:
        """A notebook in the server's folder."""
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)"}
        nbformat.write(book, self.home / name)
        return name

    def write_settings(self, text: str) -> None:
        """Write the plugin's settings into the user's file; `forget` removes them."""
        file = self._folder / "settings" / "gpumagic" / "plugin.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def forget(self) -> None:
        """Ends the kernels; what a test set, and where its panels were, is gone."""
        shutil.rmtree(self._folder / "settings", ignore_errors=True)
        for session in json.loads(self.request("api/sessions")):
            self.request(f"api/sessions/{session['id']}", method="DELETE")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
