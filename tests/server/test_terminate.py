"""What is not ended: all that is no orphan of this user, named by its pid and its beginning."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from gpumagic.telemetry import ProcessSample
from gpumagic.telemetry.processes import is_alive

_CHILD = "import time; print('here', flush=True); time.sleep(300)"


async def test_an_order_that_names_no_process_is_refused(machine, fetch):
    for body in ("", "[]", '{"pid": 1}', '{"pid": "1", "started": 2}'):
        answer = await fetch("terminate", method="POST", body=body)
        assert answer.code == 409, body
        assert "PID and start time" in json.loads(answer.body)["message"]
    broken = await fetch("terminate", method="POST", body="{")
    assert broken.code == 400


async def test_another_users_process_is_never_ended(machine, order, monkeypatch):
    machine.processes = (ProcessSample("GPU-0", os.getpid(), 1, user="ada", orphan=True),)
    monkeypatch.setattr(os, "getuid", lambda: -7)
    code, text = await order(pid=os.getpid(), started=psutil.Process().create_time())
    assert (code, "no orphan" in text) == (409, True)


@pytest.fixture
def child():
    """A process that holds nothing; it is there until it is killed."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    made = subprocess.Popen([sys.executable, "-c", _CHILD], stdout=subprocess.PIPE, env=env)
    with made:
        made.stdout.readline()
        yield psutil.Process(made.pid)
        made.kill()


async def test_what_the_snapshots_do_not_call_an_orphan_is_left_alone(machine, order, child):
    # A daemon, of which only who watched its beginning can know that it is one.
    began = child.create_time()
    machine.processes = (ProcessSample("GPU-0", child.pid, 1, started=began),)
    code, text = await order(pid=child.pid, started=began)
    assert (code, "no orphan" in text) == (409, True)
    assert is_alive(child.pid)


async def test_a_process_that_began_anew_under_that_pid_is_left_alone(machine, order, child):
    began = child.create_time()
    machine.processes = (ProcessSample("GPU-0", child.pid, 1, started=began, orphan=True),)
    code, text = await order(pid=child.pid, started=1e9)
    assert (code, "no orphan" in text) == (409, True)
    # As the snapshot had it, and it has ended since.
    machine.processes = (ProcessSample("GPU-0", child.pid, 1, started=1e9, orphan=True),)
    code, text = await order(pid=child.pid, started=1e9)
    assert (code, "has ended by itself" in text) == (200, True)
    assert is_alive(child.pid)


async def test_no_pid_of_the_system_is_ever_ended(machine, order):
    parent = os.getppid()
    machine.processes = tuple(ProcessSample("GPU-0", n, 1, orphan=True) for n in (1, parent))
    for pid in (0, 1, -1, parent, 2**31, 10**40, 1.0, True):
        for started in (1.0, psutil.Process(parent).create_time()):
            code, _ = await order(pid=pid, started=started, force=True)
            assert 400 <= code < 500, pid
        assert is_alive(parent)
