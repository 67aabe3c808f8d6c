"""A real server in its own process on a driver at fault: it says why, without a traceback."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from waiting import ANSWER_S

TESTS = Path(__file__).parents[1]
TOKEN = "test"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    source = TESTS / "stand_in" / "nvml.c"
    made = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", made, source], check=True)
    return made


class Server:
    def __init__(self, library, folder):
        self.machine = folder / "machine"
        self.log = folder / "log"
        self._info = folder / "runtime"
        self._env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library.parent),
            "STAND_IN_NVML": str(self.machine),
            **{f"JUPYTER_{kind.upper()}_DIR": str(folder / kind) for kind in ("config", "data")},
            "JUPYTER_RUNTIME_DIR": str(self._info),
        }
        self._folder = folder

    def begin(self):
        command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"]
        command += ["--port=0", f"--IdentityProvider.token={TOKEN}"]
        command += [f"--ServerApp.root_dir={self._folder}"]
        command += ["--ServerApp.jpserver_extensions={'gpumagic': True}"]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, env=self._env, stdout=log, stderr=log)
        info = self._info / f"jpserver-{self._process.pid}.json"
        self._wait(lambda: json.loads(info.read_text())["url"])
        self._url = json.loads(info.read_text())["url"]
        self._wait(lambda: self.get("api/status"))

    def get(self, path):
        request = urllib.request.Request(self._url + path)
        request.add_header("Authorization", f"token {TOKEN}")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return json.loads(answer.read())

    def snapshot(self):
        return self.get("gpumagic/api/snapshot")

    def end(self):
        self._process.terminate()
        assert self._process.wait(ANSWER_S) == 0

    def _wait(self, condition):
        deadline = time.monotonic() + 3 * ANSWER_S
        while True:
            try:
                if condition():
                    return
            except (OSError, ValueError, KeyError):
                assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


@pytest.fixture
def server(library, tmp_path):
    made = Server(library, tmp_path)
    yield made
    made.end()
    text = made.log.read_text()
    assert "Traceback" not in text, text
    assert "gpumagic | extension was successfully loaded" in text


@pytest.mark.parametrize(
    ("machine", "code"),
    [
        ("fail.nvmlInitWithFlags=9", "driver-not-loaded"),
        ("fail.nvmlInitWithFlags=18", "version-mismatch"),
        ("gpus=2\ngpu.1.lost=1", "gpu-lost"),
        ("gpus=2\nfail.*=999", None),
        ("gpus=0", "no-gpu"),
        ("gpus=2\nfail.nvmlDeviceGetUtilizationRates=3\nfail.nvmlDeviceGetMemoryInfo_v2=3", None),
    ],
)
def test_a_driver_at_fault_is_named_with_its_cure(server, machine, code):
    server.machine.write_text(machine + "\n")
    server.begin()
    snapshot = server.snapshot()
    if code is not None:
        (problem,) = [p for p in snapshot["problems"] if p["code"] == code]
        assert problem["cause"]
        assert problem["cure"]
    assert server.get("gpumagic/api/doctor")
    assert server.get("gpumagic/api/history")
