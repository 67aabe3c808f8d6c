"""Break a cluster in 50 ways drawn at random: the next cell runs on all ranks, nothing is left."""

import random
import signal
import threading
import time

import psutil
import pytest

from gpumagic.cluster import gpu_cluster, launching

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

_IMPORTS = "%%ongpu @all\nimport os, sys, time, torch, subprocess, torch.distributed as dist\n"
_WORKERS = (
    "from torch.utils.data import DataLoader\n"
    "batches = iter(DataLoader(range(1000), num_workers=2, persistent_workers=True))\n"
    "next(batches)\nchild = subprocess.Popen(['sleep', '1000'])\n"
)
# What the rank R does, and what the others do meanwhile.
_BREAKS = {
    "raises": "1 / 0",
    "exits": "os._exit(3)",
    "exits as Python does": "sys.exit(4)",
    "is killed": "os.kill(os.getpid(), 9)",
    "is killed with workers": _WORKERS + "os.kill(os.getpid(), 9)",
    "is stopped": "os.kill(os.getpid(), 19)",
}
_LASTS = {
    "hangs in Python": "while True: pass",
    "sleeps": "time.sleep(600)",
    "hangs in a collective": "dist.barrier()",
    "prints without end": "while True: print('line', time.time())",
    "draws a bar without end": "while True: print('\\r', time.time(), end='', flush=True)",
    "will not be interrupted": "while True:\n"
    "        try: time.sleep(600)\n"
    "        except KeyboardInterrupt: pass",
    "has workers": _WORKERS.replace("\n", "\n    ") + "time.sleep(600)",
}
_OTHERS = ["pass", "time.sleep(600)", "dist.barrier()", "while True: pass"]


class Broken:
    """A cluster of two ranks that is broken and mended, in a notebook."""

    def __init__(self, shell):
        self.shell = shell
        self.start()
        self.processes = len(self.marked())

    def start(self):
        assert self.shell.run("%gpucluster start 2").error is None
        self.mark = gpu_cluster.current()._engines.mark

    def marked(self):
        return launching.marked(self.mark)

    def pids(self):
        return [row["pid"] for row in gpu_cluster.current().status().rows]

    def press(self, seconds, cell):
        """Run a cell, and press Ctrl-C after so many seconds each."""
        timers = [threading.Timer(s, signal.raise_signal, (signal.SIGINT,)) for s in seconds]
        try:
            for timer in timers:
                timer.start()
            return self.shell.run(cell)
        except KeyboardInterrupt:
            return None
        finally:
            for timer in timers:
                timer.cancel()
                timer.join()

    def is_whole(self):
        """The ranks are there or can be had back, and they are in order; nothing else is there."""
        if not gpu_cluster.is_running():
            assert until(lambda: not self.marked()), self.left()
            self.start()
        lost = [
            str(row["rank"])
            for row in gpu_cluster.current().status().rows
            if "gone" in row["state"]
        ]
        if lost:
            result = self.shell.run(f"%gpucluster restart {' '.join(lost)}")
            assert result.error is None, result.text
        ask = (
            "a = torch.ones(1) * 10**dist.get_rank()\ndist.all_reduce(a)\n"
            "(dist.get_rank(), a.item(), os.getpid())"
        )
        began = time.monotonic()
        result = self.shell.run(_IMPORTS + ask)
        assert result.error is None, result.text
        assert [(rank, total) for rank, total, _ in result.result] == [(0, 11), (1, 11)]
        assert [pid for *_, pid in result.result] == self.pids()
        assert time.monotonic() - began < 10
        assert until(lambda: len(self.marked()) == self.processes), self.left()

    def left(self):
        return [(p.pid, p.ppid(), p.cmdline()) for p in self.marked()]


def until(there, seconds=8.0):
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(0.05)
    return there()


_kept = []


@pytest.fixture
def broken(shell):
    if not _kept:
        _kept.append(Broken(shell))
    _kept[0].shell = shell
    return _kept[0]


@pytest.fixture(scope="module", autouse=True)
def _stop():
    if gpu_cluster.is_running():  # that of tests before
        gpu_cluster.current().stop()
    yield
    if gpu_cluster.is_running():
        gpu_cluster.current().stop()
    if _kept:
        assert _kept.pop().marked() == []


@pytest.mark.parametrize("seed", range(50))
def test_the_next_cell_runs_and_nothing_is_left(broken, seed):
    drawn = random.Random(seed)
    rank, other = drawn.randrange(2), drawn.choice(_OTHERS)
    kind = drawn.choice([*_BREAKS, *_LASTS, "restarting", "starting", "a short cell", "outside"])
    times = sorted(drawn.uniform(0, 3) for _ in range(drawn.choice([1, 1, 2, 3])))
    print(seed, kind, rank, other, times)
    broken.shell.run(_IMPORTS + "kept = dist.get_rank()")
    both = f"{_IMPORTS}if dist.get_rank() == {rank}:\n    {{}}\nelse:\n    {other}"
    if kind in _BREAKS:
        does = _BREAKS[kind].replace("\n", "\n    ")
        if kind == "is stopped":
            broken.press([12], both.format(does))
        else:
            result = broken.shell.run(both.format(does))
            assert result.error is not None
    elif kind in _LASTS:
        broken.press(times, both.format(_LASTS[kind]))
        if kind == "has workers":  # as long as the rank is there, they may be too
            assert broken.shell.run(f"%gpucluster restart {rank}").error is None
    elif kind == "restarting":
        broken.press([3 * s for s in times], f"%gpucluster restart {rank}")
    elif kind == "starting":
        broken.shell.run("%gpucluster stop")
        assert broken.marked() == []
        broken.press([3 * s for s in times], "%gpucluster start 2")
        if gpu_cluster.is_running():
            broken.mark = gpu_cluster.current()._engines.mark
    elif kind == "a short cell":
        broken.press([s / 30 for s in times], _IMPORTS + "dist.barrier()\nkept + 1")
    else:
        psutil.Process(broken.pids()[rank]).kill()
    broken.is_whole()


def test_the_order_by_rank_holds_after_20_restarts(broken):
    for number in range(20):
        assert broken.shell.run(f"%gpucluster restart {number % 2}").error is None
    broken.is_whole()
