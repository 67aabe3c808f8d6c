"""On a GPU: do we say what CuPy's benchmark and torch's Timer say, and where is the CPU left?

Run it with `python benchmarks/timing_vs_cupy.py` where there is a GPU; CuPy is compared where it is
installed. Square matrix products 64 … 8192 in bf16 and fp32, by each tool in turn, in rounds, so
that the GPU's clock is the same for all. CuPy runs as many products in each of its repeats as
compare does in a block, by events; a block's launches and its wait are in compare's time. The
crossover against the CPU is a sweep. All of it goes into `benchmarks/results/<GPU>-timing.json`.
Exits 1 where a ratio is outside of 1 ± 0.02, 2 where there is no GPU. `make hardware` has fewer
rounds.
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from gpumagic.timing import compare

LIMIT = 0.02
ROUNDS = 5
SIZES = [2**n for n in range(6, 14)]
ON_THE_CPU = [n for n in SIZES if n <= 2048]  # beyond, it takes minutes and tells nothing new
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CODE = "c = a @ b"
RESULTS = Path(__file__).parent / "results"


def by_cupy(benchmark: Any, names: dict[str, Any], number: int, seconds: float) -> float:
    a, b = names["a"], names["b"]

    def products() -> None:
        for _ in range(number):
            a @ b

    done = benchmark(products, n_repeat=10**6, n_warmup=3, max_duration=seconds)
    return float(statistics.median(done.gpu_times[0])) / number


def one_round(names: dict[str, Any], cupy: Any, seconds: float) -> dict[str, float]:
    timer = Timer(CODE, globals=dict(names), num_threads=torch.get_num_threads())
    by_timer = timer.blocked_autorange(min_run_time=seconds).median
    (timing,) = compare(CODE, ["cuda:0"], namespace=dict(names), max_time=3 * seconds).timings
    assert timing.median is not None
    took = {"Timer": by_timer, "compare": timing.median}
    if cupy is not None:
        took["CuPy"] = by_cupy(cupy, names, timing.number, seconds)
    return took


def row(
    size: int, dtype: str, cupy: Any, rounds: int = ROUNDS, seconds: float = 0.5
) -> dict[str, Any]:
    """One product by each tool, so many `seconds` (ours: three times that) in each round."""
    a, b = (torch.randn(size, size, device="cuda:0").to(DTYPES[dtype]) for _ in range(2))
    done = [one_round({"a": a, "b": b}, cupy, seconds) for _ in range(rounds)]
    found: dict[str, Any] = {"n": size, "dtype": dtype}
    found |= {way: statistics.median(r[way] for r in done) for way in done[0]}
    ratios = {"vs Timer": ("compare", "Timer"), "vs CuPy": ("compare", "CuPy")}
    for name, (ours, theirs) in ratios.items():
        if theirs in done[0]:
            found[name] = statistics.median(r[ours] / r[theirs] for r in done)
    return found


def crossover(dtype: str, max_time: float = 2.0) -> dict[str, Any]:
    made = compare(
        CODE,
        ["cpu", "cuda:0"],
        setup=f"a, b = (torch.randn(n, n).to(torch.{str(DTYPES[dtype])[6:]}) for _ in range(2))",
        sweep={"n": ON_THE_CPU},
        namespace={"torch": torch},
        max_time=max_time,
    )
    print(made)
    return {
        "dtype": dtype,
        "n": made.crossover("cpu", "cuda:0"),
        "sweep": made.to_pandas().to_dict("records"),
    }


def main() -> int:
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: nothing was measured, nothing is saved")
        return 2
    try:
        from cupyx.profiler import benchmark as cupy
    except ImportError:
        cupy = None
        print("CuPy is not installed (pip install cupy-cuda12x): compared with torch's Timer only")
    gpu = torch.cuda.get_device_name(0)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {gpu}, {ROUNDS} rounds")
    rows, failed = [], False
    for dtype in DTYPES:
        for size in SIZES:
            found = row(size, dtype, cupy)
            rows.append(found)
            ratios = {name: found[name] for name in ("vs Timer", "vs CuPy") if name in found}
            outside = any(abs(ratio - 1) > LIMIT for ratio in ratios.values())
            failed |= outside
            shown = "  ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
            took = f"{found['compare'] * 1e6:10.1f} µs"
            print(f"{dtype} {size:5} {took}  {shown}{'  OUTSIDE' * outside}", flush=True)
    crossovers = [crossover(dtype) for dtype in DTYPES]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}-timing.json"
    kept = {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cupy": cupy is not None,
        "limit": LIMIT,
        "rows": rows,
        "crossovers": crossovers,
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"saved in {path.relative_to(Path(__file__).parents[1])}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
