"""Comparisons for tests, made of times that are known: no clock, no device."""

from gpumagic.timing.comparison import Agreement, Comparison, Timing

SIZES = (64, 128, 256, 512, 1024)


def around(median, spread=0.01, count=21):
    """Seconds whose median is exact, and whose quartiles are `spread` apart."""
    half = count // 2
    return tuple(median * (1 + spread * (n - half) / half) for n in range(count))


def timing(where, median, spread=0.01, count=21, **more):
    seconds = around(median, spread, count)
    return Timing(where, seconds, host=seconds, **more)


def comparison(*timings, **more):
    given = {"code": "A @ B\n", "agreements": (), "time": 1.7e9} | more
    return Comparison(timings=timings, **given)


def two(**more):
    """The GPU is eight times as fast."""
    same = Agreement("cuda:0", "cpu", True, 3e-7, "_")
    gpu = timing("cuda:0", 1e-3, name="H200")
    return comparison(timing("cpu", 8e-3), gpu, **{"agreements": (same,)} | more)


def cubes(sizes=SIZES, fails=None, **more):
    """The CPU's time grows with n³; the GPU's is that of a launch, as long as it can."""
    timings = []
    for n in sizes:
        timings.append(timing("cpu", 1e-6 * (n / 64) ** 3, values={"n": n}))
        if fails is None or n < fails:
            timings.append(timing("cuda:0", 3e-5, values={"n": n}, name="H200"))
        elif n == fails:
            timings.append(Timing("cuda:0", values={"n": n}, error="out of memory"))
    return comparison(*timings, **{"sweep": {"n": tuple(sizes)}} | more)
