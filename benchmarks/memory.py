"""What does `gpumagic.memory()` cost where a notebook holds a hundred thousand tensors?

Run it with `python benchmarks/memory.py`. On a virtual GPU where there is no real one; processor
time, the best of some rounds, so that other programs do not count. Tensors lie in a list, in
modules, and in objects of a class. Exits 1 over a limit.
"""

import sys
from time import process_time

import torch
from torch import nn

import gpumagic
from gpumagic import virtual

TENSORS, ROUNDS, LIMIT = 100_000, 5, 1.0  # the last in seconds


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
        times.append(process_time() - start)
        assert sum(row.count for row in report.holders) == TENSORS
        assert sum(row.nbytes for row in report.holders) == report.allocated
    globals().pop("held")
    return min(times)


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
    if slow:
        sys.exit(f"over {LIMIT} s: {', '.join(slow)}")


if __name__ == "__main__":
    main()
