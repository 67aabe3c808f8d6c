"""Runs programs, each in a fork of this process: what they import is imported once.

Each line that it reads is ``{"program": …, "env": …, "out": …}``; it answers with the exit status.
"""

from __future__ import annotations

import json
import os
import sys

import pynvml  # noqa: F401

import gpumagic.device
import gpumagic.telemetry.collect
import gpumagic.telemetry.doctor
import gpumagic.telemetry.nvml_source
import gpumagic.telemetry.sampler  # noqa: F401


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(asked["env"], asked["out"])
            # Its end is that of any program: with its threads joined, and a traceback if it fails.
            exec(compile(asked["program"], "<program>", "exec"), {"__name__": "__main__"})
            return
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(status, flush=True)


def become(env: dict[str, str], out: str) -> None:
    """Has the environment and the output that the program is to have."""
    os.environ.clear()
    os.environ.update(env)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    printed = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    said = os.open(f"{out}.errors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for old, new in ((nowhere, 0), (printed, 1), (said, 2)):
        os.dup2(old, new)


main()
