"""A thread whose jobs can be interrupted: the one that is meant, and no other."""

import subprocess
import sys

from gpumagic.isolation.worker import Quiet, Worker


def test_a_worker_that_is_interrupted_between_jobs_goes_on():
    worker = Worker("test")
    try:
        assert worker.submit(lambda: 1).result(20) == 1
        worker.interrupt()
        found = []
        for _ in range(20):  # the interrupt may hit a job, and then that one only
            try:
                found.append(worker.submit(lambda: 2).result(20))
            except KeyboardInterrupt:
                found.append(None)
        assert found.count(2) >= 19
    finally:
        worker.close()


PROFILED = """
import sys, threading
from gpumagic.isolation.worker import Worker

def job():
    began.set()
    while True:
        pass

worker, began = Worker("test"), threading.Event()
future = worker.submit(job)
began.wait()
worker.interrupt()
assert future.exception() is not None
sys.setprofile(lambda *args: None)
(lambda: None)()
sys.setprofile(None)
"""


def test_a_profiler_runs_after_an_interrupted_worker():
    """In a process of its own: where it hangs, no signal ends it."""
    done = subprocess.run([sys.executable, "-c", PROFILED], timeout=100, check=False)
    assert done.returncode == 0


def test_every_way_to_write_is_discarded(capsys):
    with Quiet():
        assert sys.stdout.write("abc") == 3
        sys.stdout.writelines(text for text in ("a", "b"))
    assert capsys.readouterr().out == ""


def test_a_display_that_is_cleared_is_discarded(shell):
    with Quiet():
        shell.ip.run_cell("from IPython.display import clear_output; clear_output()").raise_error()
