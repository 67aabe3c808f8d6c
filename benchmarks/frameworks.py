"""Are our medians of JAX those of `timeit` with `jax.block_until_ready`?

Run it with `python benchmarks/frameworks.py`. Four workloads on the CPU, from 10 µs to 10 ms, in
short rounds: timeit, `gpumagic.compare` of the very statement, compare of the statement without a
wait of its own, timeit again; so that what else the machine does slows all of them. Each ratio is
of the least medians of all rounds: of those that were left alone most. A statement without a wait
is waited for at the end of each block of runs, so that Python is ahead of the device, and what it
saves is shown as it is; it is not judged. Compile time is none of any. `--processor`
measures with the processor's time, for all: what others do does not count then. A workload is not
judged where timeit differs from itself, in its least, by more than the limit. Exits 1 where a
ratio is outside of 1 ± 0.05, 2 where one could not be judged.
"""

import argparse
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gpumagic.frameworks.known import imported
from gpumagic.timing import compare
from gpumagic.timing.measure.stopwatch import Stopwatch

Clock = Callable[[], float]

LIMIT = 0.05
ROUNDS = 9
SECONDS = 0.3


def workloads() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → an expression, and the variables that it reads."""
    keys = jax.random.split(jax.random.key(0), 6)
    tiny, square, batch = jnp.ones(8), jax.random.normal(keys[0], (512, 512)), jnp.ones((128, 256))
    layers = [jax.random.normal(keys[1], (256, 256)), jax.random.normal(keys[2], (256, 10))]

    @jax.jit
    def step(layers: Any, x: Any) -> Any:
        def loss(layers: Any) -> Any:
            return ((jnp.tanh(x @ layers[0]) @ layers[1]) ** 2).mean()

        slopes = jax.grad(loss)(layers)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, layers, slopes)

    @jax.jit
    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ c) * 1e-3, None), x, None, length=20)[0]

    return {
        "tiny add": ("a + 1", {"a": tiny}),
        "matmul 512": ("a @ a", {"a": square}),
        "step of an MLP": ("step(layers, x)", {"step": step, "layers": layers, "x": batch}),
        "scan": ("scanned(a)", {"scanned": scanned, "a": square[:128, :128]}),
    }


def by_timeit(code: str, names: dict[str, Any], clock: Clock) -> float:
    """The median over blocks of runs, as `%timeit` makes them, on copies of its own."""
    # As compare has it: a product's time differs by a tenth by where in memory its operands lie.
    names = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, names)
    timer = timeit.Timer(code, timer=clock, globals=names)
    number, once = timer.autorange()
    number = max(1, int(number * 0.02 / once))
    return statistics.median(t / number for t in timer.repeat(15, number))


def by_compare(code: str, names: dict[str, Any], clock: Clock) -> tuple[float, float]:
    """The median, and how long it compiled."""
    watch = Stopwatch(clock=clock, others=imported())
    made = compare(code, ["cpu"], namespace=dict(names), max_time=SECONDS, stopwatch=watch)
    (timing,) = made.timings
    assert timing.median is not None
    return timing.median, timing.compiled or 0.0


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("--processor", action="store_true")
    processor = asked.parse_args().processor
    clock = time.process_time if processor else time.perf_counter
    kind = "processor time" if processor else "wall clock"
    print(f"JAX {jax.__version__}, {kind}, {ROUNDS} rounds")
    heads = ("timeit", "compare", "no wait", "ratio", "no wait", "itself", "compiled")
    print(f"{'':16}" + "".join(f"{head:>12}" for head in heads))
    failed = unjudged = 0
    for name, (code, names) in workloads().items():
        blocked, names = f"jax.block_until_ready({code})", {**names, "jax": jax}
        by_timeit(blocked, names, clock)
        rounds, compiled = [], 0.0
        for _ in range(ROUNDS):
            one = by_timeit(blocked, names, clock)
            (ours, took), (bare, _) = (
                by_compare(blocked, names, clock),
                by_compare(code, names, clock),
            )
            rounds.append((one, ours, bare, by_timeit(blocked, names, clock)))
            compiled = max(compiled, took)
        least = [min(times) for times in zip(*rounds, strict=True)]
        ratios = [least[n] / min(least[0], least[3]) for n in (1, 2)]
        itself = abs(least[3] / least[0] - 1)
        known = itself <= LIMIT
        outside = known and abs(ratios[0] - 1) > LIMIT
        unjudged += not known
        failed += outside
        verdict = "OUTSIDE" if outside else "" if known else "not judged"
        cells = "".join(f"{seconds * 1e6:9.1f} µs" for seconds in least[:3])
        shown = f"{ratios[0]:12.3f}{ratios[1]:12.3f}{itself:12.1%}{compiled * 1e3:9.0f} ms"
        print(f"{name:16}{cells}{shown}  {verdict}", flush=True)
    return 1 if failed else 2 if unjudged else 0


if __name__ == "__main__":
    sys.exit(main())
