"""What does `gpumagic.memory()` cost with a hundred thousand tensors, and what does recording?

Run it with `python benchmarks/memory.py`. On a virtual GPU where there is no real one; processor
time, the best of some rounds, so that other programs do not count. Tensors lie in a list, in
modules, and in objects of a class; a report has its text and its HTML. What it adds to the step of
an MLP that the line of each allocation is known is the median of rounds in which steps with it and
without it alternate: on a real GPU what `%gpumem --record on` adds; on a virtual one, where it is
always on, what it costs to find the line. Exits 1 over a limit.
"""

import sys
from statistics import median
from time import process_time

import torch
from torch import nn

import gpumagic
from gpumagic import virtual
from gpumagic.memory.allocator import record
from gpumagic.virtual import memory_account

TENSORS, ROUNDS, LIMIT = 100_000, 5, 1.0  # the last in seconds
STEPS, PAIRS, MOST = 20, 41, 0.03


class Sample:
    def __init__(self, tensor):
        self.tensor = tensor


def small():
    return torch.empty(1, device="cuda")


def modules():
    return nn.ModuleList(
        nn.ParameterList(small() for _ in range(100)) for _ in range(TENSORS // 100)
    )


def measured(held):
    """Seconds of one report, whose rows add up."""
    globals()["held"] = held
    times = []
    for _ in range(ROUNDS):
        start = process_time()
        report = gpumagic.memory()
        assert str(report)
        assert report._repr_html_()
        times.append(process_time() - start)
        assert sum(row.count for row in report.holders) == TENSORS
        assert sum(row.nbytes for row in report.holders) == report.allocated
    globals().pop("held")
    return min(times)


def step_of_an_mlp():
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    X, y = torch.randn(256, 64, device="cuda"), torch.randint(10, (256,), device="cuda")

    def step():
        sgd.zero_grad()
        nn.functional.cross_entropy(net(X), y).backward()
        sgd.step()

    return step


def line_known(on):
    """Let the line of each allocation be known, or not."""
    if not virtual.enabled():
        record(on)
    else:  # the innermost frame is always the user's
        here = sys._getframe()
        memory_account._getframe = sys._getframe if on else lambda depth: here


def recording(step):
    """What that adds to some steps, as a part of what they take without it."""
    ratios = []
    for pair in range(PAIRS + 1):
        took = {}
        for on in (False, True) if pair % 2 else (True, False):
            line_known(on)
            start = process_time()
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
            took[on] = process_time() - start
        ratios.append(took[True] / took[False])
    line_known(virtual.enabled())
    return median(ratios[1:]) - 1  # the first pair warms up


def main():
    if not torch.cuda.is_available():
        virtual.enable(1, "1GiB")
    slow = []
    for name, make in (
        ("in a list", lambda: [small() for _ in range(TENSORS)]),
        ("in objects", lambda: {n: Sample(small()) for n in range(TENSORS)}),
        ("in modules", modules),
    ):
        seconds = measured(make())
        print(f"{TENSORS:,} tensors {name}: {seconds:.2f} s of processor time")
        slow += [name] if seconds > LIMIT else []
    adds = recording(step_of_an_mlp())
    print(f"that lines are known adds {adds:.1%} to the step of an MLP")
    if slow or adds > MOST:
        sys.exit(f"over {LIMIT} s: {', '.join(slow) or 'none'}; over {MOST:.0%}: {adds > MOST}")


if __name__ == "__main__":
    main()
