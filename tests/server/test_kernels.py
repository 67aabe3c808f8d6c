"""Real kernels of a real server: whose memory it is, when cells ran, and what may be ended."""

import asyncio
import json
from uuid import uuid4

import psutil
import pytest
from snapshots import snapshot_in
from waiting import ANSWER_S, becomes

from gpumagic.server import kernels
from gpumagic.telemetry.processes import is_alive

GPU = "VIRTUAL-1"
_HOLD = f"""
from gpumagic.telemetry.state_files import RESERVED, Publisher, VirtualFacts
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


async def test_what_pages_ask_a_kernel_makes_it_neither_busy_nor_idle(jp_serverapp):
    manager = jp_serverapp.kernel_manager
    if not hasattr(manager, "untracked_message_types"):
        pytest.skip("jupyter_server before 2.15 tracks all; the panel then asks no kernel")
    assert not manager.track_message_type("gpumagic_request")
    assert manager.track_message_type("execute_request")


async def test_the_memory_is_the_notebooks(fetch, start, execute, jp_fetch, connect, jp_serverapp):
    kernel = await start()
    await execute(kernel, _HOLD)
    # The server hears of it on a channel of its own, a moment later perhaps.
    manager = jp_serverapp.kernel_manager.get_kernel(kernel)
    await becomes(lambda: manager.execution_state == "idle")
    (process,) = snapshot_in((await fetch("snapshot")).body).processes
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


@pytest.mark.parametrize("kind", ["notebook", "console"])
async def test_a_session_whose_path_is_an_id_has_its_name(fetch, jp_fetch, kind):
    """JupyterLab gives a console, and for a moment a new notebook, an id for a path."""
    name = "Untitled.ipynb"
    session = {"path": str(uuid4()), "name": name, "type": kind, "kernel": {"name": "python3"}}
    await jp_fetch("api", "sessions", method="POST", body=json.dumps(session))
    (kernel,) = snapshot_in((await fetch("snapshot")).body).kernels
    assert kernel.notebook == name


async def test_cells_are_logged_with_their_times_and_gpus(hub, start, execute, connect, fetch):
    kernel = await start()
    client = await connect()
    await client.want(period=0.25, processes=True)
    await becomes(lambda: kernel in hub.cells.followed)
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
    await becomes(lambda: kernel in hub.cells.followed)
    hub.refresh_s = 0.05
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


@pytest.mark.parametrize("steps", range(3))
async def test_a_stopping_server_ends_the_watch_that_a_starting_kernel_woke(hub, start, steps):
    """In Python 3.11, `wait_for` drops a cancelling that comes as its wait ends."""
    await start()
    hub.watch()
    (watch,) = hub.tasks
    await becomes(lambda: getattr(watch.get_coro().cr_await, "__name__", "") == "wait_for")
    hub.watch()
    for _ in range(steps):
        await asyncio.sleep(0)
    await asyncio.wait_for(hub.close(), ANSWER_S)
    assert not hub.cells.followed


async def test_listening_ends_with_the_last_client_and_kernel(hub, start, connect, jp_fetch):
    hub.refresh_s, hub.idle_refresh_s = 0.01, 0.01
    kernel = await start()
    client = await connect()
    await becomes(lambda: kernel in hub.cells.followed)
    client.close()
    await becomes(lambda: not hub.clients)
    # When a kernel dies, its cell must be known, whether somebody watches or not.
    assert kernel in hub.cells.followed
    await jp_fetch("api", "kernels", kernel, method="DELETE")
    await becomes(lambda: not hub.cells.followed and not hub.tasks)


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
    return snapshot_in((await fetch("snapshot")).body).processes


async def orphans(fetch):
    """All who hold memory, once they are orphans: the snapshots may be some seconds late."""
    for _ in range(10 * ANSWER_S):
        found = await told(fetch)
        if found and all(process.orphan for process in found):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(found)


async def test_an_orphan_is_ended_and_nothing_else(
    fetch, order, leave_behind, jp_serverapp, monkeypatch
):
    kernel = await leave_behind("deaf")
    (process,) = await told(fetch)
    name = {"pid": process.pid, "started": process.started}
    assert (process.kernel, process.child, process.notebook) == (kernel, True, "work.ipynb")
    code, text = await order(**name)
    assert (code, "no orphan" in text) == (409, True)
    # Dead without a chance to tidy up.
    manager = jp_serverapp.kernel_manager.get_kernel(kernel)
    manager.stop_restarter()
    psutil.Process(manager.provisioner.pid).kill()
    await becomes(lambda: manager.provisioner.process.poll() is not None)
    (process,) = await orphans(fetch)
    assert process.notebook == "work.ipynb"
    for wrong in (process.started - 5, process.started + 5):
        code, text = await order(pid=process.pid, started=wrong)
        assert (code, "no orphan" in text) == (409, True)
    assert is_alive(process.pid)
    monkeypatch.setattr(kernels, "WAIT_S", 0.2)
    code, text = await order(**name)
    assert code == 202
    assert "force" in text
    monkeypatch.setattr(kernels, "WAIT_S", ANSWER_S)
    code, text = await order(**name, force=True)
    assert (code, "has ended" in text) == (200, True)
    assert not is_alive(process.pid)
    code, text = await order(**name)
    assert (code, "refresh the list" in text) == (409, True)


_WORKERS = """
import multiprocessing, time
def work(started):
    HOLD
    started.release()
    time.sleep(300)
started = multiprocessing.get_context("fork").Semaphore(0)
workers = [
    multiprocessing.get_context("fork").Process(target=work, args=(started,), daemon=True)
    for _ in range(2)
]
for worker in workers:
    worker.start()
for _ in workers:
    started.acquire()
"""


async def test_the_workers_of_a_loader_are_the_notebooks_until_it_dies(
    fetch, start, execute, jp_serverapp
):
    kernel = await start()
    hold = _HOLD.strip().replace("\n", "\n    ")
    await execute(kernel, _WORKERS.replace("HOLD", hold))
    workers = await told(fetch)
    assert len(workers) == 2
    assert {(w.kernel, w.notebook, w.child) for w in workers} == {(kernel, "work.ipynb", True)}
    assert not any(worker.orphan for worker in workers)
    manager = jp_serverapp.kernel_manager.get_kernel(kernel)
    manager.stop_restarter()
    psutil.Process(manager.provisioner.pid).kill()
    try:
        left = await orphans(fetch)
        assert {w.pid for w in left} == {w.pid for w in workers}
        assert {(w.kernel, w.notebook) for w in left} == {(None, "work.ipynb")}
    finally:
        for worker in workers:
            psutil.Process(worker.pid).kill()
