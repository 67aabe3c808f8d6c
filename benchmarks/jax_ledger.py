"""What does counting JAX's copies cost? A placed cell's calls against the same calls uncounted.

Run it with `python benchmarks/jax_ledger.py`. One process and one thread of the CPU, which has
three devices; rounds alternate between the ways, and each figure is the median over the rounds, in
seconds of processor. The first call after counting has begun goes by Python, and is told apart: it
is no part of the others. Exits 1 over a limit.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np

from gpumagic import device
from gpumagic.device import Device
from gpumagic.frameworks.jax_framework import Jax
from gpumagic.ledger.entry import Tally

ROUNDS, CALLS = 21, 300
# What nothing moves in costs what it costs uncounted, within noise; what moves may cost more.
LIMITS = {"add": 1.1, "MLP step": 1.05}


def statements() -> dict[str, Callable[[], object]]:
    """What is timed; the first two move nothing, and wait for nothing."""
    gpu = jax.devices("gpu")
    with jax.default_device(gpu[1]):
        elsewhere = jax.numpy.ones((8, 8))
    x = jax.device_put(np.ones((8, 8), np.float32), gpu[0])
    host = np.ones((8, 8), np.float32)
    weights = [jax.device_put(np.ones(s, np.float32), gpu[0]) for s in ((64, 256), (256, 10))]
    inputs = jax.device_put(np.ones((256, 64), np.float32), gpu[0])

    @jax.jit
    def step(w: list[jax.Array], batch: jax.Array) -> list[jax.Array]:
        def loss(w: list[jax.Array]) -> jax.Array:
            return (jax.nn.relu(batch @ w[0]) @ w[1]).mean()

        return [p - 0.1 * g for p, g in zip(w, jax.grad(loss)(w), strict=True)]

    return {
        "add": lambda: x + x,
        "MLP step": lambda: step(weights, inputs),
        "wait": lambda: jax.block_until_ready(x),
        "read of a number": lambda: float(x[0, 0]),
        "add of NumPy's": lambda: x + host,
        "add of another GPU's": lambda: x + elsewhere,
    }


def seconds(call: Callable[[], object], calls: int) -> float:
    """For one of so many calls, which are waited for together."""
    start = time.process_time()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.process_time() - start) / calls


def main() -> int:
    """Measure, print and judge."""
    framework = Jax()
    framework.make_virtual(2)
    gpus = [Device("cuda", k, f"GPU-{k}", virtual=True) for k in range(2)]
    device.set_virtual(lambda: gpus)
    worst = 0
    print(f"{'':22}{'uncounted':>12}{'counted':>12}{'ratio':>8}{'first call':>12}")
    for name, call in statements().items():
        found: dict[bool, list[float]] = {True: [], False: []}
        ratios, firsts = [], []
        for _ in range(ROUNDS):
            for counted in (False, True):
                ways = framework.count(Tally(), False) if counted else contextlib.nullcontext()
                with ways:
                    first = seconds(call, 1)
                    found[counted].append(seconds(call, CALLS))
                if counted:
                    firsts.append(first)
            ratios.append(found[True][-1] / found[False][-1])
        plain, ours = (statistics.median(found[way]) for way in (False, True))
        ratio, first = statistics.median(ratios), statistics.median(firsts)
        over = ratio > LIMITS.get(name, float("inf"))
        worst = worst or over
        times = f"{plain * 1e6:10.1f} µs{ours * 1e6:10.1f} µs{ratio:8.2f}{first * 1e6:10.0f} µs"
        print(f"{name:22}{times}{' over the limit' if over else ''}")
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())
