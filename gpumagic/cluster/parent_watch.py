"""End every process of a cluster when the process that started it has ended, for any reason.

Run as ``python -m gpumagic.cluster.parent_watch PID MARK DIRECTORY``, by the process PID. Every
process of the cluster has its mark in the environment, which children inherit. An engine's mark
begins with the cluster's. The directory is removed too.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time

import psutil

MARK = "GPUMAGIC_CLUSTER"
_LOOK_S = 0.3
_GONE_S = 1.0
# Whoever was being born while the first were ended.
_AGAIN_S = 3.0


def start(mark: str, directory: str) -> subprocess.Popen[bytes]:
    """Watch this process from another one, which the cluster's end does not reach."""
    command = [sys.executable, "-m", __name__, str(os.getpid()), mark, directory]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )


def marked(mark: str) -> list[psutil.Process]:
    """The processes of the cluster on this machine, or of what in it has this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            its = process.environ().get(MARK)
            if its is not None and its.startswith(mark) and process.pid != os.getpid():
                found.append(process)
    return found


def end(mark: str) -> None:
    """Kill what has the mark; nothing of it is worth waiting for."""
    until = time.monotonic() + _GONE_S
    # One that has ended has no environment, also where nobody collects it.
    while (left := marked(mark)) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_GONE_S / 50)


def end_orphan() -> None:
    """End this engine and what it started: the notebook is gone, and its watch may be elsewhere."""
    end(os.environ[MARK])
    os._exit(1)


def main(pid: str, mark: str, directory: str) -> None:
    """Wait for the end of the parent, then end the cluster."""
    while os.getppid() == int(pid):
        time.sleep(_LOOK_S)
    until = time.monotonic() + _AGAIN_S
    while time.monotonic() < until:
        end(mark)
        time.sleep(_LOOK_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
