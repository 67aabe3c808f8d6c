"""Are our medians those of `torch.utils.benchmark.Timer`?

Run it with `python benchmarks/timing_vs_torch.py`. Five workloads on the CPU, from 5 µs to 0.5 s,
in short rounds: Timer, `gpumagic.compare`, Timer again, so that what else the machine does slows
all three. The ratio is the median over the rounds of compare against the mean of the Timers beside
it. One thread (`--threads 2` for two): on a shared machine two wait for each other whenever one of
them is not let run. `--processor` measures with the processor's time, for both: what others do does
not count then. A workload is not judged where Timer differs from itself, within a round, by more
than the limit. Exits 1 where a ratio is outside of 1 ± 0.03, 2 where one could not be judged.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer

from gpumagic.timing import compare
from gpumagic.timing.runner import Stopwatch

LIMIT = 0.03
ROUNDS = 11


def workloads() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → code, and the variables that it reads; 5 µs, 50 µs, 1 ms, 30 ms, 0.5 s or so."""
    torch.manual_seed(0)
    tiny, small, middle = (torch.randn(n, n) for n in (128, 128, 384))
    net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 9))
    batch = torch.randn(512, 512)
    large = torch.randn(2**22)
    return {
        "5 µs: add and sum": ("y = (a + a).sum()", {"a": tiny}),
        "50 µs: product": ("y = a @ a", {"a": small}),
        "1 ms: product": ("y = a @ a", {"a": middle}),
        "30 ms: step of an MLP": (
            "net.zero_grad()\nnet(x).square().sum().backward()",
            {"net": net, "x": batch},
        ),
        "0.5 s: sort": ("y = a.sort()", {"a": large}),
    }


def by_timer(code: str, names: dict[str, Any], seconds: float, clock: Callable[[], float]) -> float:
    threads = torch.get_num_threads()
    timer = Timer(code, globals=dict(names), num_threads=threads, timer=clock)
    return timer.blocked_autorange(min_run_time=seconds).median


def by_compare(
    code: str, names: dict[str, Any], seconds: float, clock: Callable[[], float]
) -> float:
    made = compare(
        code,
        ["cpu"],
        namespace=dict(names),
        max_time=seconds,
        stopwatch=Stopwatch(clock=clock),
    )
    assert made.timings[0].median is not None
    return made.timings[0].median


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("--threads", type=int, default=1)
    asked.add_argument("--processor", action="store_true")
    given = asked.parse_args()
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.processor else time.perf_counter
    kind = "processor time" if given.processor else "wall clock"
    print(f"torch {torch.__version__}, {given.threads} thread(s), {kind}, {ROUNDS} rounds")
    ways = {"Timer": by_timer, "compare": by_compare, "Timer again": by_timer}
    print(f"{'':24}" + "".join(f"{way:>14}" for way in ways) + f"{'compare':>10}{'itself':>9}")
    failed = unjudged = 0
    for name, (code, names) in workloads().items():
        once = by_timer(code, names, 0.05, clock)
        seconds = max(0.5, 7 * once)
        rounds = [
            tuple(measure(code, names, seconds, clock) for measure in ways.values())
            for _ in range(ROUNDS)
        ]
        ratio = statistics.median(2 * ours / (one + other) for one, ours, other in rounds)
        itself = statistics.median(abs(other / one - 1) for one, _, other in rounds)
        known = itself <= LIMIT
        outside = known and abs(ratio - 1) > LIMIT
        unjudged += not known
        failed += outside
        verdict = "OUTSIDE" if outside else "" if known else "not judged"
        medians = (statistics.median(times) for times in zip(*rounds, strict=True))
        cells = "".join(f"{median * 1e6:11.2f} µs" for median in medians)
        print(f"{name:24}{cells}{ratio:10.3f}{itself:8.1%}  {verdict}", flush=True)
    return 1 if failed else 2 if unjudged else 0


if __name__ == "__main__":
    sys.exit(main())
