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
# For processes that started while others were killed.
_AGAIN_S = 3.0


def start(mark: str, directory: str) -> subprocess.Popen[bytes]:
    """Watch this process from another one, outside the cluster."""
    command = [sys.executable, "-m", __name__, str(os.getpid()), mark, directory]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes on this machine whose mark begins with `mark`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            its = process.environ().get(MARK)
            if its is not None and its.startswith(mark) and process.pid != os.getpid():
                found.append(process)
    return found


def end(mark: str) -> None:
    """Kill the processes that have the mark."""
    until = time.monotonic() + _GONE_S
    # A zombie has no environment.
    while (left := marked(mark)) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_GONE_S / 50)


def end_orphan() -> None:
    """End this engine and its processes, since the notebook is gone; its watch may be elsewhere."""
    end(os.environ[MARK])
    os._exit(1)


def main(pid: str, mark: str, directory: str) -> None:
    """Wait until the parent has ended, then end the cluster."""
    while os.getppid() == int(pid):
        time.sleep(_LOOK_S)
    until = time.monotonic() + _AGAIN_S
    while time.monotonic() < until:
        end(mark)
        time.sleep(_LOOK_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
