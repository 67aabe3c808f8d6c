"""Are our medians of JAX those of `timeit` with `jax.block_until_ready`?

Run it with `python benchmarks/frameworks.py`. Four workloads on the CPU, from 10 µs to 10 ms, in
short rounds: timeit, `gpumagic.compare` of the very statement, compare of the statement without a
wait of its own, timeit again; so that what else the machine does slows all of them. Each ratio is
the median over the rounds of compare against the mean of the timeits beside it. A statement without
a wait is waited for at the end of each block of runs, so that Python is ahead of the device, and
what it saves is shown as it is; it is not judged. Compile time is none of any. A workload is not
judged where timeit differs from itself, within a round, by more than the limit. Exits 1 where a
ratio is outside of 1 ± 0.05, 2 where one could not be judged.
"""

import statistics
import sys
import timeit
from typing import Any

import jax
import jax.numpy as jnp

from gpumagic.timing import compare

LIMIT = 0.05
ROUNDS = 9
SECONDS = 0.5


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


def by_timeit(code: str, names: dict[str, Any]) -> float:
    """The median over blocks of runs, as `%timeit` makes them."""
    timer = timeit.Timer(code, globals=names)
    number, once = timer.autorange()
    number = max(1, int(number * 0.02 / once))
    return statistics.median(t / number for t in timer.repeat(15, number))


def by_compare(code: str, names: dict[str, Any]) -> tuple[float, float]:
    """The median, and how long it compiled."""
    (timing,) = compare(code, ["cpu"], namespace=dict(names), max_time=SECONDS).timings
    assert timing.median is not None
    return timing.median, timing.compiled or 0.0


def main() -> int:
    print(f"JAX {jax.__version__}, {ROUNDS} rounds")
    heads = ("timeit", "compare", "no wait", "ratio", "no wait", "itself", "compiled")
    print(f"{'':16}" + "".join(f"{head:>12}" for head in heads))
    failed = unjudged = 0
    for name, (code, names) in workloads().items():
        blocked, names = f"jax.block_until_ready({code})", {**names, "jax": jax}
        by_timeit(blocked, names)
        rounds, compiled = [], 0.0
        for _ in range(ROUNDS):
            one = by_timeit(blocked, names)
            (ours, took), (bare, _) = by_compare(blocked, names), by_compare(code, names)
            rounds.append((one, ours, bare, by_timeit(blocked, names)))
            compiled = max(compiled, took)
        ratios = [
            statistics.median(2 * times[n] / (times[0] + times[3]) for times in rounds)
            for n in (1, 2)
        ]
        itself = statistics.median(abs(times[3] / times[0] - 1) for times in rounds)
        known = itself <= LIMIT
        outside = known and abs(ratios[0] - 1) > LIMIT
        unjudged += not known
        failed += outside
        verdict = "OUTSIDE" if outside else "" if known else "not judged"
        medians = [statistics.median(times) for times in zip(*rounds, strict=True)][:3]
        cells = "".join(f"{median * 1e6:9.1f} µs" for median in medians)
        shown = f"{ratios[0]:12.3f}{ratios[1]:12.3f}{itself:12.1%}{compiled * 1e3:9.0f} ms"
        print(f"{name:16}{cells}{shown}  {verdict}", flush=True)
    return 1 if failed else 2 if unjudged else 0


if __name__ == "__main__":
    sys.exit(main())
