"""What does `%%ongpu 1 --profile` cost? For each event of torch's profiler, and each line.

Run it with `python benchmarks/profile_cost.py`. On the CPU, in one process and one thread, in
rounds that alternate with the bare code; each figure is the median over the rounds, each ratio the
median of the rounds' ratios. `read` is the time to read the trace once the cell has ended.
"""

import statistics
import time

import torch
from torch import nn

from gpumagic.device import CPU
from gpumagic.ledger.entry import Ledger
from gpumagic.profiling.cell_profiler import CellProfiler

ROUNDS = 7
NET = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
SMALL, IMAGES, WIDE = torch.ones(8), torch.randn(64, 256), torch.randn(1024, 256)


def small_operators():
    for _ in range(3000):
        SMALL + 1


def training_steps():
    for _ in range(60):
        NET(IMAGES).square().mean().backward()


def large_steps():
    for _ in range(4):
        NET(WIDE.repeat(4, 1)).square().mean().backward()


def plain_python():
    total = 0
    for n in range(100_000):
        total += n


def seconds(code) -> float:
    began = time.perf_counter()
    code()
    return time.perf_counter() - began


def profiled(code):
    """Return the seconds of the code, of reading, those that the profile says, and its events."""
    profiler = CellProfiler(CPU)
    profiler.start()
    took = seconds(code)
    profiler.stop()
    began = time.perf_counter()
    found = profiler.result(Ledger())
    events = sum(operator.calls for line in found.lines for operator in line.operators)
    return took, time.perf_counter() - began, found.seconds, events


def main():
    print(f"{'':18}{'bare':>10}{'profiled':>10}{'ratio':>8}{'said':>10}{'read':>10}{'events':>9}")
    for code in (small_operators, training_steps, large_steps, plain_python):
        profiled(code)
        rounds = [(seconds(code), *profiled(code)) for _ in range(ROUNDS)]
        bare, took, read, said, events = (statistics.median(r) for r in zip(*rounds, strict=True))
        ratio = statistics.median(r[1] / r[0] for r in rounds)
        times = f"{1e3 * bare:7.1f} ms{1e3 * took:7.1f} ms{ratio:6.2f} ×"
        print(f"{code.__name__:18}{times}{1e3 * said:7.1f} ms{1e3 * read:7.1f} ms{events:9,.0f}")


if __name__ == "__main__":
    main()
