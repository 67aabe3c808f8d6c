"""A machine with NVIDIA GPUs that are not there, for programs that use the real pynvml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]

_PREAMBLE = """
import json, os
def machine(**changes):
    with open(os.environ["STAND_IN_NVML"], "a") as file:
        for key, value in changes.items():
            file.write(f"{key.replace('__', '.')}={value}\\n")
"""


# A sampler over the real pynvml, on a clock that the program moves.
_WATCH = """
from dataclasses import asdict
from types import SimpleNamespace
from gpumagic.nvml import Nvml
from gpumagic.telemetry import collect, nvml_source, sampler, source
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.nvml_source import NvmlSource
from gpumagic.telemetry.sampler import Sampler
now = [0.0]
clock, unix = (lambda: now[0]), (lambda: 1e9 + now[0])
timed = collect, nvml_source, sampler, source
for module in timed:
    module.time = SimpleNamespace(time=unix, monotonic=clock)
door = Nvml(clock=clock)
source = NvmlSource(lambda: door)
collector = Collector([source], here=list, usable=False)
sampler = Sampler(collector)
sampler._asking = True  # so it starts no thread: `look` takes the snapshots
subscription = sampler.subscribe(processes=True)
def look(seconds=1):
    for _ in range(seconds):
        while sampler._watching and sampler._pause() == 0:
            sampler._take()
        now[0] += 1
    return sampler.latest()
def told(snapshot):
    return [
        [(gpu.index, gpu.lost, gpu.memory_used, gpu.utilization) for gpu in snapshot.gpus],
        [problem.code for problem in snapshot.problems],
    ]
"""


class StandIn:
    """Runs Python programs that find the stand-in where NVIDIA's library would be."""

    def __init__(self, library: Path, folder: Path, server: subprocess.Popen[str]) -> None:
        self._library = library
        self._server = server
        self._out = folder / "printed"
        self._machine = folder / "machine"
        self._log = folder / "calls"
        self.runtime = folder / "runtime"
        self._log.touch()

    def run(self, program: str, machine: Mapping[str, object], **env: str) -> str:
        """What a program prints. In it ``machine(gpu__0__util=7)`` changes the machine."""
        self._machine.write_text("".join(f"{key}={value}\n" for key, value in machine.items()))
        own = {
            "STAND_IN_NVML": str(self._machine),
            "STAND_IN_NVML_LOG": str(self._log),
            "GPUMAGIC_RUNTIME_DIR": str(self.runtime),
        }
        if not env:
            return self._forked(_PREAMBLE + program, _env(self._library) | own)
        # What a process had in its environment when it began can only be told of a new one.
        completed = subprocess.run(
            [sys.executable, "-W", "error", "-c", _PREAMBLE + program],
            env=_env(self._library) | own | env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    def _forked(self, program: str, env: Mapping[str, str]) -> str:
        assert self._server.stdin
        assert self._server.stdout
        asked = {"program": program, "env": env, "out": str(self._out)}
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        status = self._server.stdout.readline()
        assert status == "0\n", self._out.with_name("printed.errors").read_text()
        return self._out.read_text()

    def watch(self, program: str, machine: Mapping[str, object], **env: str) -> Any:
        """What a program prints as JSON. In it ``look(seconds)`` is the last snapshot of a sampler
        that ticks once a second, and ``told(snapshot)`` the gist of one."""
        return json.loads(self.run(_WATCH + program, machine, **env))

    def calls(self, function: str) -> int:
        """How often a function of NVML was called."""
        lines = self._log.read_text().splitlines()
        return sum(line.split()[1] == function for line in lines)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of this test process's own, so that others may build theirs meanwhile."""
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = TESTS / "stand_in" / "nvml.c"
    subprocess.run(
        ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source],
        check=True,
    )
    return library


def _env(library: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(TESTS.parent),
        "LD_LIBRARY_PATH": str(library.parent),
    }


@pytest.fixture(scope="session")
def program_server(nvml_library: Path) -> Iterator[subprocess.Popen[str]]:
    """Imports once what the programs import; each runs in a fork of it."""
    command = [sys.executable, "-W", "error", TESTS / "telemetry" / "program_server.py"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=_env(nvml_library), **pipes) as server:
        yield server
        server.stdin.close()


@pytest.fixture
def stand_in(nvml_library: Path, tmp_path: Path, program_server: subprocess.Popen[str]) -> StandIn:
    return StandIn(nvml_library, tmp_path, program_server)
