"""What does `--check` cost? A training step with it, against the bare step.

Run it with `python benchmarks/checked.py`. The step has an embedding, layers and a cross entropy,
so two checks of each kind that is common; it is measured on the CPU and on a virtual GPU, in one
process and one thread, in rounds that alternate between the ways. Each ratio is the median of the
rounds' ratios. Exits 1 over a limit. `--check nan` has no limit: it reads each result.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import gpumagic

ROUNDS = 15
LIMITS = {"1 ms": 1.5, "50 ms": 1.05}
WIDTHS = {"1 ms": (64, 64), "50 ms": (256, 832)}  # of the layers, and the size of a batch
WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "bare": contextlib.nullcontext,
    "--check": gpumagic.check,
    "--check nan": lambda: gpumagic.check(nan=True),
}


def step_of(width: int, batch: int, device: str) -> Callable[[], None]:
    """Return a training step of a small text classifier."""
    torch.manual_seed(0)
    layers = nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10)
    words, net = nn.Embedding(1000, width).to(device), nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD([*words.parameters(), *net.parameters()], lr=0.1)
    tokens = torch.randint(1000, (batch, 32), device=device)
    labels = torch.randint(10, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(words(tokens).mean(1)), labels).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], runs: int) -> float:
    """Return the seconds of one of several runs."""
    start = time.process_time()
    for _ in range(runs):
        step()
    return (time.process_time() - start) / runs


def measured(step: Callable[[], None], rounds: int) -> tuple[float, dict[str, float]]:
    """Return the bare step's seconds, and by way the ratio against it."""
    seconds(step, 5)
    runs = max(1, round(0.05 / seconds(step, 3)))
    bare: list[float] = []
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, enter in WAYS.items():
            with enter():
                took = seconds(step, runs)
            if way == "bare":
                bare.append(took)
            ratios[way].append(took / bare[-1])
    return statistics.median(bare), {way: statistics.median(each) for way, each in ratios.items()}


def main(rounds: int = ROUNDS) -> int:
    """Print one line for each step and device; return 1 over a limit."""
    torch.set_num_threads(1)
    gpumagic.virtual.enable(1, "1GiB", force=True)
    over = False
    for device in ("cpu", "cuda:0"):
        for name, (width, batch) in WIDTHS.items():
            bare, ratios = measured(step_of(width, batch, device), rounds)
            over |= ratios["--check"] > LIMITS[name]
            ways = "  ".join(f"{way} {ratio:.3f} ×" for way, ratio in ratios.items())
            print(f"{device:6}  {bare * 1e3:6.2f} ms  {ways}  (limit {LIMITS[name]} ×)")
    gpumagic.virtual.disable()
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
