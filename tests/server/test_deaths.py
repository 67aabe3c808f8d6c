"""Why a kernel died: each cause from planted counters, then real kernels of a real server."""

import asyncio
import json
import os
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
from snapshots import snapshot_in
from waiting import becomes

from gpumagic.server import deaths, kernels
from gpumagic.server.deaths import Deaths
from gpumagic.server.kernels import KernelCells
from gpumagic.telemetry import GpuSample, ProcessSample, Snapshot
from gpumagic.telemetry.history import CellRun

MIB = 2**20
KILL, SEGV = -signal.SIGKILL, -signal.SIGSEGV


class Manager:
    """A kernel manager whose kernel a test ends."""

    def __init__(self, folder):
        self.provisioner = SimpleNamespace(pid=70, process=SimpleNamespace(returncode=None))
        self.connection_file = str(folder / "kernel-k.json")
        self.calls = []

    def add_restart_callback(self, call, event):
        assert event == "restart"
        self.calls.append(call)

    def dies(self, code):
        self.provisioner.process.returncode = code
        for call in self.calls:
            call()
        self.provisioner.pid += 1


class Container:
    """A container of 300 MiB, with one kernel in it."""

    def __init__(self, folder, monkeypatch):
        monkeypatch.setenv("GPUMAGIC_CGROUP", str(folder))
        for module in (deaths, kernels):
            monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: self.now))
        self.folder = folder
        self.now = 1000.0
        self.trail = []
        self.snapshot = None
        self.has(100, kills=0)
        self.manager = Manager(folder)
        self.cells = KernelCells(lambda kernel: "work/train.ipynb")
        loads = SimpleNamespace(samples=tuple, trail=lambda kernel, pid: self.trail)
        self.deaths = Deaths(self.cells, loads, lambda: self.snapshot)
        self.deaths.follow({"k": self.manager})
        self.deaths.look()

    def has(self, used, kills):
        files = {"max": 300 * MIB, "current": used * MIB, "events": f"oom 1\noom_kill {kills}"}
        for name, value in files.items():
            (self.folder / f"memory.{name}").write_text(str(value))

    def dies(self, code):
        """The last death after the kernel ended with this code."""
        self.manager.dies(code)
        return self.deaths.events[-1]


@pytest.fixture
def container(tmp_path, monkeypatch):
    return Container(tmp_path, monkeypatch)


def test_an_out_of_memory_kill_is_certain(container):
    container.cells.keep(CellRun("r", "k", "work/train.ipynb", 7, 990.0))
    container.trail = [(985.0, 20 * MIB), (993.0, 90 * MIB), (998.0, 280 * MIB)]
    container.has(120, kills=1)
    death = container.dies(KILL)
    assert death.cause == "out-of-memory"
    assert death.title == (
        "train.ipynb's kernel was killed by the out-of-memory killer while In [7] ran"
    )
    assert death.details == (
        "2 s before: 280 MiB of the container's 300 MiB of RAM, +190 MiB in 5 s",
        "variables are lost",
    )
    assert (death.count, death.exit_code, death.notebook) == (7, -9, "work/train.ipynb")
    assert "more RAM" in death.advice


def test_one_kill_explains_one_death(container):
    container.has(120, kills=1)
    assert container.dies(KILL).cause == "out-of-memory"
    container.now += 60
    assert container.dies(KILL).cause == "killed"
    # A kill long ago explains nothing.
    container.has(120, kills=2)
    container.deaths.look()
    container.now += 60
    assert container.dies(KILL).cause == "killed"
    assert len(container.deaths.events) == 3


def test_a_kill_while_ram_was_full_is_probable_and_says_so(container):
    container.has(290, kills=0)
    container.deaths.look()
    container.now += 3
    container.has(100, kills=0)
    death = container.dies(KILL)
    assert death.cause == "perhaps-out-of-memory"
    assert death.title == "train.ipynb's kernel was killed (signal 9, probably for lack of RAM)"
    container.now += 60
    plain = container.dies(KILL)
    assert (plain.cause, plain.title) == (
        "killed",
        "train.ipynb's kernel was killed (signal 9)",
    )


def test_signal_9_alone_is_not_said_to_be_more(container):
    death = container.dies(KILL)
    assert death.cause == "killed"
    assert "memory" not in death.title
    assert "RAM" not in death.title
    container.now += 60
    # Counted, but the signal is another.
    container.has(100, kills=1)
    assert container.dies(-signal.SIGTERM).title.endswith("was killed (signal 15)")


def test_a_crash_has_its_frames(container):
    (container.folder / "kernel-k.crash").write_text(
        "Fatal Python error: Aborted\n\n"
        '  File "child.py", line 1 in <module>\n'
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f (most recent call first):\n"
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
        '  File "/tmp/ipykernel_70/1234.py", line 3 in crash\n'
        '  File "/tmp/ipykernel_70/1234.py", line 4 in <module>\n'
        '  File "/x/IPython/core/interactiveshell.py", line 3577 in run_code\n'
        '  File "/x/runpy.py", line 1 in y\n'
    )
    death = container.dies(SEGV)
    assert death.cause == "crashed"
    assert death.title == "train.ipynb's kernel crashed (segmentation fault, signal 11)"
    assert death.details[:-1] == (
        "ctypes/__init__.py, line 519, in string_at",
        "a cell, line 3, in crash",
        "a cell, line 4",
    )
    # The next kernel has not loaded gpumagic, so that the file would still be the first one's.
    container.now += 60
    assert container.dies(SEGV).details == ("variables are lost",)


def test_what_is_no_death(container):
    container.manager.dies(0)
    container.manager.dies(None)
    container.deaths.follow({})
    container.manager.dies(KILL)
    assert container.deaths.events == ()


def test_a_kernel_that_cannot_be_restarted_dies_once(container):
    container.dies(1)
    for _ in range(4):
        container.now += 3
        container.manager.dies(1)
    (death,) = container.deaths.events
    assert death.title == "train.ipynb's kernel ended with exit code 1"


def test_two_kernels_that_cannot_be_restarted_die_once_each(container):
    other = Manager(container.folder)
    container.deaths.follow({"k": container.manager, "o": other})
    for _ in range(4):
        container.now += 3
        container.manager.dies(1)
        other.dies(1)
    assert [death.kernel for death in container.deaths.events] == ["k", "o"]


def test_a_kernel_that_has_run_a_cell_since_dies_again(container):
    container.dies(KILL)
    container.now += 4
    container.cells.keep(CellRun("s", "k", "work/train.ipynb", 1, container.now))
    container.now += 4
    assert container.dies(KILL).title.endswith("while In [1] ran")
    assert len(container.deaths.events) == 2


def test_a_critical_error_of_its_gpu_is_mentioned(container):
    gpus = tuple(GpuSample(f"GPU-{n}", "H100", xid=79, xid_time=995.0) for n in (0, 1))
    container.snapshot = Snapshot(
        999.0, gpus=gpus, processes=(ProcessSample("GPU-1", 70, kernel="k"),)
    )
    assert container.dies(KILL).details[0] == "H100 had a critical error, Xid 79: see dmesg"
    assert len(container.deaths.events[0].details) == 2


def test_the_last_twenty_are_kept(container):
    for _ in range(30):
        container.now += 60
        container.manager.dies(KILL)
    assert len({one.id for one in container.deaths.events}) == 20


@pytest.fixture
def jp_server_config():
    return {
        "ServerApp": {"jpserver_extensions": {"gpumagic": True}},
        "AsyncIOLoopKernelRestarter": {"time_to_dead": 0.2},
    }


CRASH = "%load_ext gpumagic\nimport ctypes\nctypes.string_at(0)"


async def test_real_kernels_that_die_and_that_do_not(
    hub, fetch, jp_fetch, jp_serverapp, jp_create_notebook, connect
):
    managers = []
    for name in ("killed", "crashed", "ended", "restarted"):
        jp_create_notebook(f"{name}.ipynb")
        session = {"path": f"{name}.ipynb", "name": name, "type": "notebook"}
        body = json.dumps({**session, "kernel": {"name": "python3"}})
        kernel = json.loads((await jp_fetch("api", "sessions", method="POST", body=body)).body)
        managers.append(jp_serverapp.kernel_manager.get_kernel(kernel["kernel"]["id"]))
    killed, _, ended, restarted = managers
    # Nobody watches: a kernel that starts is followed all the same.
    await becomes(lambda: len(hub.cells.followed) == 4)
    begun = time.time()
    clients = [manager.client() for manager in managers]
    for client in clients:
        client.start_channels()
    for client in clients:
        await client.wait_for_ready(timeout=60)
    try:
        snapshot = snapshot_in((await fetch("snapshot")).body)
        assert {one.notebook for one in snapshot.kernels} >= {"killed.ipynb", "ended.ipynb"}
        assert all(one.host_memory > 10 * MIB for one in snapshot.kernels)
        clients[0].execute("import time\ntime.sleep(60)")
        await becomes(lambda: hub.cells.running(killed.kernel_id)[0])
        psutil.Process(killed.provisioner.pid).kill()
        clients[1].execute(CRASH)
        old = ended.provisioner.pid
        clients[2].execute("exit()")
        await jp_fetch("api", "kernels", restarted.kernel_id, "restart", method="POST", body="")
        await becomes(lambda: len(hub.deaths.events) == 2 and ended.provisioner.pid != old)
        await asyncio.sleep(0.5)
    finally:
        for client in clients:
            client.stop_channels()
    deaths = {one["cause"]: one for one in json.loads((await fetch("deaths")).body)}
    assert sorted(deaths) == ["crashed", "killed"]
    assert deaths["killed"]["notebook"] == "killed.ipynb"
    assert deaths["killed"]["title"].endswith("was killed (signal 9) while In [1] ran")
    assert deaths["killed"]["code"].startswith("import time")
    assert deaths["killed"]["time"] > begun
    assert "a cell, line 3" in deaths["crashed"]["details"]
    # A page that is opened later is told in each snapshot, and with the history.
    client = await connect()
    assert len((await client.hear())["snapshot"]["events"]) == 2
    await client.want(since=None)
    assert len((await client.hear("history"))["events"]) == 2
    assert os.listdir(jp_serverapp.root_dir)
