"""CPU and RAM of processes that are known to use so much, compared with psutil's own figures."""

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from gpumagic.telemetry import host
from gpumagic.telemetry.host import KernelLoads
from gpumagic.telemetry.processes import Kernel

MIB = 2**20
HOLD = "import sys, time; held = bytearray(%d * 2**20); print(1, flush=True); "
IDLE = HOLD + "sys.stdin.read()"
BUSY = HOLD + "exec('while 1: pass')"
PARENT = (
    "import subprocess, sys; held = bytearray(50 * 2**20)\n"
    f"child = subprocess.Popen([sys.executable, '-c', {IDLE % 150!r}], stdin=-1, stdout=-1)\n"
    "child.stdout.readline(); print(1, flush=True); sys.stdin.read(); child.kill()"
)


@pytest.fixture
def start():
    """Start Python with some code that prints a line when it is ready; returns the process."""
    began = []

    def begin(code):
        command = [sys.executable, "-c", code]
        began.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        began[-1].stdout.readline()
        return began[-1]

    yield begin
    for process in began:
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
        process.communicate()


def test_three_kernels_with_known_ram_and_cpu(start):
    pids = [start(IDLE % 100).pid, start(BUSY % 1).pid, start(PARENT).pid]
    kernels = [Kernel(pid, f"k{n}", f"{n}.ipynb") for n, pid in enumerate(pids)]
    loads = KernelLoads(lambda: kernels)
    # Unknown is not 0.
    assert [one.cpu for one in loads.samples()] == [None, None, None]
    before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    begun = time.perf_counter()
    while sum(psutil.Process(pids[1]).cpu_times()[:2]) - before[1] < 0.4:
        time.sleep(0.01)
    samples = loads.samples()
    seconds = time.perf_counter() - begun
    after = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    for sample, start_s, end_s, pid in zip(samples, before, after, pids, strict=True):
        assert sample.cpu == pytest.approx(100 * (end_s - start_s) / seconds, rel=0.05, abs=4)
        (child,) = psutil.Process(pid).children() or (None,)
        told = psutil.Process(pid).memory_info().rss
        told += child.memory_full_info().uss if child else 0
        assert sample.host_memory == pytest.approx(told, rel=0.05)
    assert samples[0].host_memory > 100 * MIB
    assert samples[2].host_memory > 200 * MIB
    assert [one.notebook for one in samples] == ["0.ipynb", "1.ipynb", "2.ipynb"]


def test_a_child_whose_own_pages_are_secret_counts_with_all_its_pages(start, monkeypatch):
    def refused(process):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refused)
    (sample,) = KernelLoads(lambda: [Kernel(start(PARENT).pid, "k")]).samples()
    assert sample.host_memory > 200 * MIB


def test_a_clock_that_was_set_back_stops_no_measurement(start, monkeypatch):
    parent = start("import sys; print(1, flush=True); sys.stdin.read()")
    loads = KernelLoads(lambda: (Kernel(parent.pid, "k"),))
    loads.samples()
    monkeypatch.setattr(host, "time", SimpleNamespace(time=lambda: 5.0))
    monkeypatch.setattr(host, "_family", lambda pid: [])
    assert loads.samples()[0].host_memory is None


def test_growth_and_what_it_was(start, monkeypatch):
    grow = "import sys; held = []; print(1, flush=True)\n"
    grow += "for line in sys.stdin: held.append(bytearray(64 * 2**20)); print(1, flush=True)"
    process = start(grow)
    now = [100.0]
    monkeypatch.setattr(host, "time", SimpleNamespace(time=lambda: now[0]))
    loads = KernelLoads(lambda: [Kernel(process.pid, "k")])
    (first,) = loads.samples()
    assert first.growth is None
    process.stdin.write(b"more\n")
    process.stdin.flush()
    process.stdout.readline()
    now[0] += 2.0
    (second,) = loads.samples()
    assert second.growth == pytest.approx(32 * MIB, rel=0.1)
    trail = loads.trail("k", process.pid)
    assert [at for at, _ in trail] == [100.0, 102.0]
    assert trail[1][1] - trail[0][1] == pytest.approx(64 * MIB, rel=0.1)
    # Restarted: another process has no past.
    assert loads.trail("k", 1) == []


def test_a_kernel_that_has_ended_has_no_figures(start):
    process = start(IDLE % 1)
    kernels = [Kernel(process.pid, "k")]
    loads = KernelLoads(lambda: kernels)
    loads.samples()
    process.communicate()
    (sample,) = loads.samples()
    assert (sample.cpu, sample.host_memory) == (None, None)
    kernels.clear()
    assert loads.samples() == ()
