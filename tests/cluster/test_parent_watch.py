"""Kill what started a cluster: nothing of it may stay."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from uuid import uuid4

import psutil
import pytest

from gpumagic.cluster import launching
from tests.kernels import Kernel, text

# What starts a watching process, a child with the mark that has a child too, and is killed at once.
_KILLED = """
import os, signal, subprocess, sys
from gpumagic.cluster import launching
mark, directory = sys.argv[1:]
launching.start_watch(mark, directory)
child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
environment = {**os.environ, launching.MARK: f"{mark}/0/"}
subprocess.Popen([sys.executable, "-c", child], env=environment, stdin=subprocess.PIPE,
                 start_new_session=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def until(there, seconds):
    """Whether something came to be in that time."""
    end = time.monotonic() + seconds
    while not there():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_what_has_the_mark_ends_with_the_process_that_gave_it(tmp_path):
    mark, directory = uuid4().hex, tempfile.mkdtemp(dir=tmp_path)
    killed = subprocess.Popen(
        [sys.executable, "-c", _KILLED, mark, directory], stdin=subprocess.PIPE
    )
    assert until(lambda: len(launching.marked(mark)) == 2, 30)
    assert launching.marked(f"{mark}/1/") == []
    killed.communicate(b"\n")
    assert killed.returncode == -signal.SIGKILL
    assert until(lambda: not launching.marked(mark) and not os.path.exists(directory), 10)


_START = "import gpumagic\nranks = gpumagic.cluster(2); print(ranks._engines.mark)"
_DOES = {
    "idle": "",
    "busy": "ranks.run('while True: pass')",
    "in a collective": "ranks.run('import torch.distributed as dist\\n"
    "if dist.get_rank() == 0: dist.barrier()\\nelse: import time; time.sleep(600)')",
}


def mark_of(found):
    return text(found).split()[-1]


def ended(mark):
    """Whether a cluster has gone within 10 s; and which of it are left."""
    gone = until(lambda: not launching.marked(mark), 10)
    return gone or [process.cmdline() for process in launching.marked(mark)]


@pytest.fixture
def kernel():
    made = Kernel()
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.parametrize("does", _DOES)
def test_kernel_killed(kernel, does):
    found, reply = kernel.run(_START)
    assert reply["status"] == "ok"
    mark = mark_of(found)
    assert len(launching.marked(mark)) >= 5
    kernel.send(_DOES[does])
    if does != "idle":
        busy = [
            psutil.Process(p.pid)
            for p in launching.marked(mark)
            if "gpumagic.cluster.launching" in str(p.cmdline())
        ]
        before = sum(p.cpu_times().user for p in busy)
        if does == "busy":
            assert until(lambda: sum(p.cpu_times().user for p in busy) > before + 1, 30)
        else:
            time.sleep(2)
    psutil.Process(kernel.manager.provisioner.pid).kill()
    assert ended(mark) is True


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.5, 3.0, 5.0])
def test_kernel_killed_while_it_starts_a_cluster(kernel, seconds):
    kernel.run("import gpumagic.cluster.gpu_cluster\nfrom gpumagic.cluster import launching")
    of_all = {process.environ().get(launching.MARK) for process in launching.marked("")}
    kernel.send("import gpumagic; gpumagic.cluster(2)")

    def begun():
        return [
            p for p in launching.marked("") if p.environ().get(launching.MARK, "") not in of_all
        ]

    assert until(begun, 30)
    mark = begun()[0].environ()[launching.MARK].partition("/")[0]
    time.sleep(seconds)
    psutil.Process(kernel.manager.provisioner.pid).kill()
    assert ended(mark) is True


@pytest.mark.slow
@pytest.mark.parametrize("now", [False, True])
def test_kernel_restarted_by_jupyter(kernel, now):
    found, _ = kernel.run(_START)
    mark = mark_of(found)
    assert launching.marked(mark)
    kernel.manager.restart_kernel(now=now)
    assert ended(mark) is True
    kernel.client.wait_for_ready(timeout=60)


@pytest.mark.slow
def test_kernel_shut_down_by_jupyter(kernel):
    found, _ = kernel.run(_START)
    mark = mark_of(found)
    kernel.manager.shutdown_kernel()
    assert ended(mark) is True


@pytest.mark.slow
@pytest.mark.parametrize("does", ["idle", "busy"])
def test_engines_that_no_watch_reaches_end_too(kernel, does):
    """As those on other machines: when the notebook's process is gone, so is its store."""
    found, _ = kernel.run(_START)
    mark = mark_of(found)
    kernel.send(_DOES[does])
    of_kernel = psutil.Process(kernel.manager.provisioner.pid).children()
    [watches] = [p for p in of_kernel if "--watch" in p.cmdline()]
    directory = watches.cmdline()[-1]
    watches.kill()
    engines = [p for p in launching.marked(mark) if "gpumagic.cluster.launching" in p.cmdline()]
    assert len(engines) == 2
    psutil.Process(kernel.manager.provisioner.pid).kill()
    try:
        assert until(lambda: not any(p in launching.marked(mark) for p in engines), 10)
    finally:
        launching.end(mark)
        shutil.rmtree(directory)
