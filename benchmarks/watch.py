"""What does the ledger cost? Against bare torch, and against the other ways to see transfers.

Run it with `python benchmarks/watch.py`. On the CPU, and on a virtual GPU where there is no real
one; in one process and one thread, in rounds that alternate between the ways, so that a slow minute
slows all of them; processor time, so that other programs do not count. Each figure is the median
over the rounds, each ratio the median of the rounds' ratios. Exits 1 over a limit.

A copy within one GPU and an index of the GPU's own are no transfers, but go through operators that
are watched, which must ask each tensor where it is: some tenths of a microsecond. Where that is
more than 3 % (short operators, and a real GPU's) the last column says so, with the nanoseconds, and
it is no failure. What was registered at the first watch passes calls on while nothing watches: what
that costs is told too, with the same limits.
"""

import contextlib
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from time import thread_time

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gpumagic
from gpumagic import virtual
from gpumagic.ledger import dispatch

ROUNDS = 15
NO_TRANSFER, STEP, TRANSFER = 1.03, 1.05, 5.0  # ratio, ratio, µs for each
ASKED = ("clone, GPU", "copy_ within a GPU", "index, GPU", "assign by index, GPU")


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def bare():
    """As before the first watch of the process."""
    dispatch.uninstall()
    yield


@contextlib.contextmanager
def passing():
    """After a watch, while nothing watches."""
    with gpumagic.watch():
        pass
    yield


WAYS = {
    "bare": bare,
    "not watched": passing,
    "watch": gpumagic.watch,
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


def step_of_an_mlp(device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs, labels = torch.randn(256, 64).to(device), torch.randint(10, (256,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()

    return step


def cases(gpu: str) -> dict[str, tuple[Callable[[], object], str, float]]:
    """Name → what to run, the kind of limit, and the limit."""
    c, g = torch.randn(8, 8), torch.randn(8, 8, device=gpu)
    one, small, target = g[0, 0], torch.randn(4), torch.empty_like(g)
    rows = torch.tensor([1, 3], device=gpu)
    return {
        "add, CPU": (lambda: c + c, "ratio", NO_TRANSFER),
        "mul by number, CPU": (lambda: c * 2.0, "ratio", NO_TRANSFER),
        "clone, CPU": (c.clone, "ratio", NO_TRANSFER),
        "item, CPU": (c[0, 0].item, "ratio", NO_TRANSFER),
        "view, CPU": (lambda: c.view(64), "ratio", NO_TRANSFER),
        "add, GPU": (lambda: g + g, "ratio", NO_TRANSFER),
        "matmul, GPU": (lambda: g @ g, "ratio", NO_TRANSFER),
        "view, GPU": (lambda: g.view(64), "ratio", NO_TRANSFER),
        "zeros, GPU": (lambda: torch.zeros(8, 8, device=gpu), "ratio", NO_TRANSFER),
        "clone, GPU": (g.clone, "ratio", NO_TRANSFER),
        "copy_ within a GPU": (lambda: target.copy_(g), "ratio", NO_TRANSFER),
        "index, GPU": (lambda: g[rows], "ratio", NO_TRANSFER),
        "assign by index, GPU": (lambda: target.__setitem__(rows, 1.0), "ratio", NO_TRANSFER),
        "MLP step, CPU": (step_of_an_mlp("cpu"), "ratio", STEP),
        "MLP step, GPU": (step_of_an_mlp(gpu), "ratio", STEP),
        "item, GPU": (one.item, "extra", TRANSFER),
        "to the CPU": (lambda: g.cpu(), "extra", TRANSFER),
        "to the GPU": (lambda: small.to(gpu), "extra", TRANSFER),
    }


@contextlib.contextmanager
def silence():
    """torch's profiler writes lines to the process's own stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def measure(run: Callable[[], object], runs: int) -> float:
    start = thread_time()
    for _ in range(runs):
        run()
    return (thread_time() - start) / runs


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        virtual.enable(1, "1GiB")
    gpu = "cuda:0"
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    print(f"{'':22}{'bare':>11}" + "".join(f"{way:>15}" for way in list(WAYS)[1:]) + "   limit")
    failed = False
    for name, (run, kind, limit) in cases(gpu).items():
        once = max(min(measure(run, 20), 1e-2), 1e-7)
        runs = max(int(0.01 / once), 10)
        took: dict[str, list[float]] = {way: [] for way in WAYS}
        for round_ in range(ROUNDS):
            order = list(WAYS.items())
            shift = round_ % len(order)
            for way, enter in order[shift:] + order[:shift]:
                # A profiler keeps what it sees: a few calls are enough of it.
                count = min(runs, 300) if way == "profiler" else runs
                with silence(), enter():
                    run()
                    took[way].append(measure(run, count))
        bare = took["bare"]
        notes: list[str] = []
        shown = [f"{name:22}{statistics.median(bare) * 1e6:8.2f} µs"]
        for way in list(WAYS)[1:]:
            pairs = list(zip(took[way], bare, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            extra = statistics.median(a - b for a, b in pairs) * 1e6
            shown.append(f"{ratio:12.3f} ×" if kind == "ratio" else f"{extra:+11.2f} µs")
            over = (ratio if kind == "ratio" else extra) > limit
            if over and way in ("watch", "not watched"):
                notes.append(f"{way}: {extra * 1e3:+.0f} ns" if name in ASKED else f"{way} OVER")
                failed |= name not in ASKED
        shown += [f"{limit:g}{' µs' * (kind == 'extra')}", *notes]
        print("  ".join(shown), flush=True)
    start = thread_time()
    for _ in range(100):
        with gpumagic.watch():
            pass
    print(f"\nto begin and end a watch: {(thread_time() - start) * 10:.2f} ms")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
