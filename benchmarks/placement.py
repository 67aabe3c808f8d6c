"""What does `%%ongpu` cost? Against the bare cell, and against `with torch.device(d)`.

Run it with `python benchmarks/placement.py`. Everything is measured on the CPU in one process and
one thread, in rounds that alternate between the ways, so that a slow minute slows all of them; each
figure is the median over the rounds, each ratio the median of the rounds' ratios. The CPU is the
hard case: there is no device whose own latency could hide the cost. Exits 1 over a limit.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from torch.utils.benchmark import Timer

from gpumagic.placement.swap import enter, leave

CPU = torch.device("cpu")
ROUNDS = 15
LIMITS = {"add": 1.05, "zeros": 1.5, "tensor": 1.5, "MLP step": 1.02}


@contextlib.contextmanager
def placed():
    place = enter(CPU, namespace=globals())
    try:
        yield
    finally:
        leave(place)


def step_of_an_mlp() -> Callable[[], None]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs, labels = torch.randn(256, 64), torch.randint(10, (256,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()

    return step


def main() -> int:
    torch.set_num_threads(1)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    names = {"torch": torch, "x": x, "y": y, "step": step_of_an_mlp()}
    statements = {
        "add": "x + y",
        "zeros": "torch.zeros(8, 8)",
        "tensor": "torch.tensor([1.0, 2.0])",
        "MLP step": "step()",
    }
    ways = {"bare": contextlib.nullcontext, "%%ongpu": placed, "torch.device": lambda: CPU}
    took: dict[tuple[str, str], list[float]] = {}
    for what, statement in statements.items():
        timer = Timer(statement, globals=names)
        for way in ways.values():  # warm-up
            with way():
                timer.timeit(20)
        runs = timer.blocked_autorange(min_run_time=0.02).number_per_run
        for round_ in range(ROUNDS):
            order = list(ways.items())
            for name, way in order[round_ % 3 :] + order[: round_ % 3]:
                with way():
                    took.setdefault((what, name), []).append(timer.timeit(runs).mean)

    print(f"{'':10}{'bare':>12}{'%%ongpu':>12}{'ratio':>8}{'limit':>7}   torch.device ratio")
    failed = False
    for what in statements:
        bare = took[what, "bare"]
        ratios = {
            way: statistics.median(a / b for a, b in zip(took[what, way], bare, strict=True))
            for way in ("%%ongpu", "torch.device")
        }
        over = ratios["%%ongpu"] > LIMITS[what]
        failed |= over
        print(
            f"{what:10}{statistics.median(bare) * 1e6:9.2f} µs"
            f"{statistics.median(took[what, '%%ongpu']) * 1e6:9.2f} µs"
            f"{ratios['%%ongpu']:8.2f}{LIMITS[what]:7.2f}   {ratios['torch.device']:.2f}"
            f"{'   OVER' if over else ''}"
        )

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpumagic")
    shell.run_cell("%%ongpu cpu --quiet\npass")
    cost = []
    for _ in range(200):
        times = []
        for cell in ("pass", "%%ongpu cpu --quiet\npass"):
            start = time.perf_counter()
            shell.run_cell(cell)
            times.append(time.perf_counter() - start)
        cost.append(times[1] - times[0])
    median = statistics.median(cost) * 1e3
    failed |= median > 0.4
    print(
        f"\nentering and leaving an empty %%ongpu: {median:.2f} ms more than `pass` (limit 0.4 ms)"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
