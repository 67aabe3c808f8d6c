"""Are our medians of JAX those of `timeit` with `jax.block_until_ready`?

Run it with `python benchmarks/frameworks.py`. Four workloads on the CPU, from 10 µs to 10 ms. Each
block of runs that `gpumagic.compare` times is followed, or preceded, by one that `timeit` times, of
as many runs: so both medians are of the same moments, and what else the machine does meets both.
They were measured one after the other before, for a second each, and the least of each compared:
JAX computes on several threads, and timeit itself differed by a third from one second to the next.
The operands lie elsewhere in each round, which alone makes a product differ by a tenth; a ratio is
the median of all rounds. Beside it stands that of the statement without a wait of its own: it is
waited for at the end of each block, so that Python is ahead of the device; what that saves is shown
as it is, and not judged. Compile time is none of any. `--processor` measures with the processor's
time, for all: what others do does not count then. A workload is not judged where every other block
of timeit's differs from the rest by more than the limit. Exits 1 where a ratio is outside of
1 ± 0.05, 2 where one could not be judged.
"""

import argparse
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gpumagic.frameworks.known import imported
from gpumagic.timing import compare
from gpumagic.timing.runner import Lap, Stopwatch

Clock = Callable[[], float]

LIMIT = 0.05
ROUNDS = 7
SECONDS = 1.5


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


class Alternating(Stopwatch):
    """Beside each block of compare's it has `timeit` time one of as many runs of `code`."""

    def __init__(self, code: str, names: dict[str, Any], clock: Clock) -> None:
        super().__init__(imported(), clock)
        # On copies of its own, as compare has them.
        own = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, names)
        self._timer = timeit.Timer(code, timer=clock, globals=own)
        self._timer.timeit(1)
        self.blocks: list[float] = []  # seconds of one run

    def lap(self, run: Any, number: int) -> Lap:
        if not number:
            return super().lap(run, number)
        ours = super().lap(run, number) if len(self.blocks) % 2 else None
        self.blocks.append(self._timer.timeit(number) / number)
        return ours or super().lap(run, number)


@dataclass(frozen=True)
class Round:
    """Seconds of one run: by compare, by timeit, and by every other block of timeit's."""

    ours: float
    theirs: float
    halves: tuple[float, float]
    first: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def one_round(code: str, blocked: str, names: dict[str, Any], clock: Clock) -> Round:
    """`code` by compare, and `blocked` by timeit at the same time."""
    watch = Alternating(blocked, names, clock)
    made = compare(code, ["cpu"], namespace=dict(names), max_time=SECONDS, stopwatch=watch)
    (timing,) = made.timings
    assert timing.median is not None
    blocks = watch.blocks[-len(timing.seconds) :]  # those before were for warm-up
    halves = statistics.median(blocks[::2]), statistics.median(blocks[1::2])
    return Round(timing.median, statistics.median(blocks), halves, timing.first or 0.0)


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("--processor", action="store_true")
    processor = asked.parse_args().processor
    clock = time.process_time if processor else time.perf_counter
    kind = "processor time" if processor else "wall clock"
    print(f"JAX {jax.__version__}, {kind}, {ROUNDS} rounds")
    heads = ("timeit", "compare", "ratio", "least", "most", "no wait", "itself", "first run")
    print(f"{'':16}" + "".join(f"{head:>12}" for head in heads))
    failed = unjudged = 0
    for name, (code, names) in workloads().items():
        blocked, names = f"jax.block_until_ready({code})", {**names, "jax": jax}
        rounds = [one_round(blocked, blocked, names, clock) for _ in range(ROUNDS)]
        bare = [one_round(code, blocked, names, clock) for _ in range(2)]
        ratios = sorted(one.ratio for one in rounds)
        ratio = statistics.median(ratios)
        itself = abs(statistics.median(one.halves[1] / one.halves[0] for one in rounds) - 1)
        known = itself <= LIMIT
        outside = known and abs(ratio - 1) > LIMIT
        unjudged += not known
        failed += outside
        verdict = "OUTSIDE" if outside else "" if known else "not judged"
        seconds = (statistics.median(one.theirs for one in rounds),)
        seconds += (statistics.median(one.ours for one in rounds),)
        cells = "".join(f"{each * 1e6:9.1f} µs" for each in seconds)
        no_wait = statistics.median(one.ratio for one in bare)
        cells += f"{ratio:12.3f}{ratios[0]:12.3f}{ratios[-1]:12.3f}{no_wait:12.3f}{itself:12.1%}"
        first = max(one.first for one in rounds) * 1e3
        print(f"{name:16}{cells}{first:9.0f} ms  {verdict}", flush=True)
    return 1 if failed else 2 if unjudged else 0


if __name__ == "__main__":
    sys.exit(main())
