"""A machine with NVIDIA GPUs that are not there, for programs that use the real pynvml."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

_PREAMBLE = """
import json, os
def machine(**changes):
    with open(os.environ["STAND_IN_NVML"], "a") as file:
        for key, value in changes.items():
            file.write(f"{key.replace('__', '.')}={value}\\n")
"""


class StandIn:
    """Runs Python programs that find the stand-in where NVIDIA's library would be."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._library = library
        self._machine = folder / "machine"
        self._log = folder / "calls"
        self.runtime = folder / "runtime"
        self._log.touch()

    def run(self, program: str, machine: Mapping[str, object], **env: str) -> str:
        """What a program prints. In it ``machine(gpu__0__util=7)`` changes the machine."""
        self._machine.write_text("".join(f"{key}={value}\n" for key, value in machine.items()))
        completed = subprocess.run(
            [sys.executable, "-W", "error", "-c", _PREAMBLE + program],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(TESTS.parent),
                "LD_LIBRARY_PATH": str(self._library.parent),
                "STAND_IN_NVML": str(self._machine),
                "STAND_IN_NVML_LOG": str(self._log),
                "GPUMAGIC_RUNTIME_DIR": str(self.runtime),
                **env,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    def calls(self, function: str) -> int:
        """How often a function of NVML was called."""
        return self._log.read_text().splitlines().count(function)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of this test process's own, so that others may build theirs meanwhile."""
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = TESTS / "stand_in" / "nvml.c"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture
def stand_in(nvml_library: Path, tmp_path: Path) -> StandIn:
    return StandIn(nvml_library, tmp_path)
