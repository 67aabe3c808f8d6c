"""Real kernels of a real server: whose memory it is, when cells ran, and what may be ended."""

import asyncio
import json
import os
import subprocess
import sys

import psutil
import pytest
from waiting import ANSWER_S, becomes

from gpumagic.server import terminate
from gpumagic.server.cell_log import CellLog
from gpumagic.telemetry import ProcessSample, Snapshot
from gpumagic.telemetry.processes import is_alive

GPU = "VIRTUAL-1"
_HOLD = f"""
from gpumagic.telemetry.virtual import RESERVED, Publisher, VirtualFacts
gpu = Publisher([VirtualFacts({GPU!r}, "Virtual GPU", 2**30)])
gpu.counters[0][RESERVED] = 2**20
"""
# A child that holds memory and does not listen to SIGTERM if it is told so.
_CHILD = """
import signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
time.sleep(300)
"""


@pytest.fixture
def start(jp_fetch, jp_create_notebook):
    """Start a notebook's kernel; returns its id."""

    async def begin(name="work.ipynb"):
        jp_create_notebook(name)
        session = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
        answer = await jp_fetch("api", "sessions", method="POST", body=json.dumps(session))
        return json.loads(answer.body)["kernel"]["id"]

    return begin


@pytest.fixture
def execute(jp_serverapp):
    """Run a cell in a kernel; returns what it printed."""

    async def run(kernel, code):
        client = jp_serverapp.kernel_manager.get_kernel(kernel).client()
        client.start_channels()
        printed = []
        try:
            await client.wait_for_ready(timeout=30)
            await client.execute_interactive(
                code,
                timeout=30,
                output_hook=lambda m: printed.append(m["content"].get("text", "")),
            )
        finally:
            client.stop_channels()
        return "".join(printed)

    return run


async def test_the_memory_is_the_notebooks(hub, fetch, start, execute, jp_fetch, connect):
    kernel = await start()
    await execute(kernel, _HOLD)
    (process,) = Snapshot.from_json((await fetch("snapshot")).body).processes
    assert (process.kernel, process.notebook) == (kernel, "work.ipynb")
    assert (process.child, process.orphan, process.mine) == (False, False, False)
    assert process.server is None
    assert process.idle_since is not None
    # Renamed in the browser: the session has another path from then on.
    sessions = json.loads((await jp_fetch("api", "sessions")).body)
    change = json.dumps({"path": "renamed.ipynb"})
    await jp_fetch("api", "sessions", sessions[0]["id"], method="PATCH", body=change)
    client = await connect()
    await client.want(period=0.25, processes=True)
    await client.hear(
        until=lambda m: [p["notebook"] for p in m["snapshot"]["processes"]] == ["renamed.ipynb"]
    )
    await jp_fetch("api", "kernels", kernel, method="DELETE")
    await client.hear(until=lambda m: not m["snapshot"]["gpus"])


async def test_cells_are_logged_with_their_times_and_gpus(hub, start, execute, connect, fetch):
    kernel = await start()
    client = await connect()
    await client.want(period=0.25, processes=True)
    await becomes(lambda: kernel in hub.cells._channels)
    await execute(kernel, _HOLD + "print('x' * 10_000)")
    await becomes(lambda: [r for r in hub.cells.runs() if r.end is not None and r.gpus])
    (run,) = hub.cells.runs()
    assert (run.kernel, run.notebook, run.gpus) == (kernel, "work.ipynb", (GPU,))
    assert run.count == 1
    assert 0 <= run.end - run.start < ANSWER_S
    told = await client.hear("cells", until=lambda m: m["cells"][-1]["gpus"])
    assert told["cells"][0]["id"] == run.id
    # Reloaded: the log is the server's.
    past = json.loads((await fetch("history")).body)
    assert [cell["id"] for cell in past["cells"]] == [run.id]


async def test_a_cell_that_runs_ends_with_its_kernel(hub, start, execute, connect, jp_fetch):
    kernel = await start()
    client = await connect()
    await client.hear()
    await becomes(lambda: kernel in hub.cells._channels)
    hub._refresh_s = 0.05
    running = asyncio.create_task(execute(kernel, "import time; time.sleep(300)"))
    await becomes(lambda: hub.cells.runs())
    assert hub.cells.runs()[0].end is None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await jp_fetch("api", "kernels", kernel, "restart", method="POST", body="")
    await becomes(lambda: hub.cells.runs()[0].end is not None)
    # It listens to the one that came instead.
    await execute(kernel, "1 + 1")
    await becomes(lambda: len(hub.cells.runs()) == 2 and hub.cells.runs()[1].end)


async def test_listening_ends_some_time_after_the_last_client(hub, start, connect):
    hub._linger_s, hub._refresh_s = 0.0, 0.01
    kernel = await start()
    client = await connect()
    await becomes(lambda: kernel in hub.cells._channels)
    client.close()
    await becomes(lambda: not hub.cells._channels and hub._watch is None)


@pytest.fixture
def leave_behind(start, execute, jp_fetch):
    """Have a kernel leave a process that holds memory; returns its pid."""

    async def make(*words):
        kernel = await start()
        child = json.dumps(_HOLD + _CHILD)
        await execute(
            kernel,
            f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {child}, "
            f"*{words!r}], stdout=subprocess.PIPE, text=True)\nchild.stdout.readline()",
        )
        return kernel

    return make


async def told(fetch):
    found = Snapshot.from_json((await fetch("snapshot")).body).processes
    return found[0] if found else None


async def order(fetch, **words):
    answer = await fetch("terminate", method="POST", body=json.dumps(words))
    return answer.code, json.loads(answer.body)["message"]


async def test_an_orphan_is_ended_and_nothing_else(fetch, leave_behind, jp_serverapp, monkeypatch):
    kernel = await leave_behind("deaf")
    process = await told(fetch)
    name = {"pid": process.pid, "started": process.started}
    assert (process.kernel, process.child, process.notebook) == (kernel, True, "work.ipynb")
    code, text = await order(fetch, **name)
    assert code == 403
    assert "no orphan" in text
    # Dead without a chance to tidy up.
    manager = jp_serverapp.kernel_manager.get_kernel(kernel)
    manager.stop_restarter()
    psutil.Process(manager.provisioner.pid).kill()
    await becomes(lambda: manager.provisioner.process.poll() is not None)
    # The snapshots may be some seconds late; what is asked of the process itself is not.
    while not (process := await told(fetch)).orphan:
        await asyncio.sleep(0.1)
    assert process.notebook.endswith("/work.ipynb")
    for wrong in (process.started - 5, process.started + 5):
        code, text = await order(fetch, pid=process.pid, started=wrong)
        assert (code, "another" in text) == (409, True)
    assert is_alive(process.pid)
    monkeypatch.setattr(terminate, "WAIT_S", 0.2)
    code, text = await order(fetch, **name)
    assert code == 202
    assert "force" in text
    code, text = await order(fetch, **name, force=True)
    assert (code, "has ended" in text) == (200, True)
    assert not is_alive(process.pid)
    code, text = await order(fetch, **name)
    assert (code, "look again" in text) == (404, True)


@pytest.mark.parametrize("body", ["", "{", "[]", '{"pid": 1}', '{"pid": "1", "started": 2}'])
async def test_an_order_that_names_no_process_is_refused(machine, fetch, body):
    answer = await fetch("terminate", method="POST", body=body)
    assert answer.code == 400
    assert '"started"' in json.loads(answer.body)["message"]
    long = await fetch("terminate", method="POST", body="x" * 5000)
    assert long.code == 413


async def test_another_users_process_is_never_ended(machine, fetch, monkeypatch):
    machine.processes = (ProcessSample("GPU-0", os.getpid(), 1, user="ada", orphan=True),)
    monkeypatch.setattr(os, "getuid", lambda: -7)
    code, text = await order(fetch, pid=os.getpid(), started=psutil.Process().create_time())
    assert (code, "another user" in text) == (403, True)


async def test_a_process_that_began_anew_under_that_pid_is_left_alone(machine, fetch):
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdout=subprocess.PIPE)
    with child:
        child.stdout.readline()
        machine.processes = (ProcessSample("GPU-0", child.pid, 1, started=1e9, orphan=True),)
        code, text = await order(fetch, pid=child.pid, started=1e9)
        assert (code, "another" in text) == (409, True)
        assert child.poll() is None
        child.kill()


def message(kind, parent="run-1", date=None, **content):
    return {
        "header": {"msg_type": kind, "msg_id": f"of-{parent}", "date": date},
        "parent_header": {"msg_type": "execute_request", "msg_id": parent} if parent else {},
        "content": content,
    }


def test_a_silent_run_is_no_cell_and_an_old_one_is_forgotten():
    now = [1000.0]
    log = CellLog(lambda kernel: None, lambda: now[0])
    log.hear("k", message("status", execution_state="busy"))
    log.hear("k", message("status", execution_state="idle"))
    assert log.runs() == []
    log.hear("k", message("status", "run-2", execution_state="busy"))
    now[0] += 5
    log.hear("k", message("execute_input", "run-2", execution_count=2))
    now[0] += 5
    log.hear("k", message("status", "run-2", execution_state="idle"))
    (run,) = log.runs()
    assert (run.start, run.end, run.count) == (1000.0, 1010.0, 2)
    assert log.runs(since=1011.0) == []
    now[0] += 601
    assert log.runs() == []


@pytest.mark.parametrize("bad", [{}, {"header": None}, message("status"), message("x", None)])
def test_a_message_that_is_none_is_ignored(bad):
    log = CellLog(lambda kernel: None)
    log.hear("k", bad)
    assert log.runs() == []


def test_a_run_takes_the_gpus_that_are_seen_while_and_just_after_it():
    now = [1000.0]
    log = CellLog(lambda kernel: "a.ipynb", lambda: now[0])
    log.hear("k", message("execute_input", execution_count=1))
    log.see(Snapshot(1001.0, processes=(ProcessSample("GPU-0", 1, 5, kernel="k"),)))
    now[0] = 1002.0
    log.hear("k", message("status", execution_state="idle"))
    seen = log.revision
    log.see(Snapshot(1003.0, processes=(ProcessSample("GPU-1", 1, 5, kernel="k"),)))
    log.see(Snapshot(1010.0, processes=(ProcessSample("GPU-2", 1, 5, kernel="k"),)))
    assert [run.gpus for run in log.changed(seen)] == [("GPU-0", "GPU-1")]
