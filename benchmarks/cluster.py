"""How fast a cluster of two engines starts, runs a cell, ends one, and replaces a rank that died.

    python benchmarks/cluster.py

On this machine, with virtual GPUs where there are no others. What it prints is from the notebook's
side: until the value, the error or the prompt is there. Ends with status 1 if a limit is broken.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import gpumagic
from gpumagic.cluster.cell_on_ranks import RanksError
from gpumagic.cluster.gpu_cluster import GpuCluster

START_S, CELL_MS, CTRL_C_S, STUCK_S, TOLD_S, REPLACED_S = 10.0, 30.0, 1.0, 6.0, 1.0, 10.0
CELLS = 40
_IMPORTS = "import os, time, torch, torch.distributed as dist"
# Where they wait long enough for it: the interrupt comes in the middle.
_MEANWHILE_S = 1.0


class Bench:
    """The verdicts."""

    def __init__(self) -> None:
        self.broken = 0

    def judge(self, what: str, value: float, limit: float, unit: str = "s") -> None:
        fits = value <= limit
        self.broken += not fits
        print(f"{'ok  ' if fits else 'FAIL'} {what}: {value:.2f} {unit} (at most {limit:g} {unit})")


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def interrupted(ranks: GpuCluster, code: str) -> float:
    """How long after Ctrl-C the prompt is back."""
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.perf_counter())
        signal.raise_signal(signal.SIGINT)

    timer = threading.Timer(_MEANWHILE_S, press)
    timer.start()
    try:
        ranks.run(code, quiet=True)
    except KeyboardInterrupt:
        return time.perf_counter() - pressed[0]
    raise SystemExit(f"it was not interrupted: {code}")


def killed(ranks: GpuCluster) -> float:
    """How long after its death a rank is told to be dead."""
    died = time.time() + _MEANWHILE_S
    code = f"time.sleep({died} - time.time())\nif dist.get_rank() == 1: os.kill(os.getpid(), 9)\n"
    try:
        ranks.run(code + "time.sleep(600)", quiet=True)
    except RanksError:
        return time.time() - died
    raise SystemExit("rank 1 did not die")


def shares() -> None:
    """What of the start is not ours: imports in a process of its own."""
    for what, code in {
        "import torch": "import torch",
        "and what an engine needs beside it": "import torch, ipyparallel.engine.app, "
        "gpumagic.cluster.engine",
        "and torch's first optimizer": "import torch, ipyparallel.engine.app, "
        "gpumagic.cluster.engine\ntorch.optim.SGD([torch.ones(1, requires_grad=True)])",
    }.items():
        took = seconds(lambda code=code: subprocess.run([sys.executable, "-c", code], check=True))
        print(f"     of these, a Python with {what}: {took:.2f} s")


def main() -> int:
    print(f"load of this machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    bench, began = Bench(), time.perf_counter()
    with gpumagic.cluster(2) as ranks:
        bench.judge("2 engines start", time.perf_counter() - began, START_S)
        ranks.run(_IMPORTS, quiet=True)
        took = [seconds(lambda: ranks.run("1", quiet=True)) for _ in range(CELLS)]
        bench.judge("a cell on all ranks, median", 1e3 * statistics.median(took), CELL_MS, "ms")
        bench.judge("Ctrl-C", interrupted(ranks, "while True: pass"), CTRL_C_S)
        stuck = "if dist.get_rank(): dist.barrier()\ntime.sleep(600)"
        bench.judge("Ctrl-C, one in a collective", interrupted(ranks, stuck), STUCK_S)
        ranks.run(_IMPORTS, quiet=True)
        bench.judge("a killed rank is told", killed(ranks), TOLD_S)
        back = seconds(lambda: (ranks.restart(1), ranks.run(f"{_IMPORTS}\ndist.barrier()")))
        bench.judge("it is replaced, and all have joined", back, REPLACED_S)
        optimizer = "torch.optim.SGD([torch.ones(1, requires_grad=True)])"
        first = [seconds(lambda: ranks.run(optimizer, quiet=True)) for _ in range(2)]
        print(f"     a cell with the first optimizer {first[0]:.2f} s, the second {first[1]:.2f} s")
    shares()
    return 1 if bench.broken else 0


if __name__ == "__main__":
    sys.exit(main())
