"""What only a real NVIDIA GPU can show: `make hardware` runs it."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hardware import nvidia_smi, on_device
from hardware.programs import MODELS, NOTEBOOK, PROGRAMS, runner
from hardware.rows import (
    Row,
    Traffic,
    at_least,
    crossover_row,
    ledger_rows,
    near,
    report_rows,
    skipped,
    timing_rows,
)
from kernels import Kernel

import gpumagic

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
TRIES = 5  # of readings that change between ours and nvidia-smi's


def asked():
    """A snapshot, and what nvidia-smi says of the GPU that is cuda:0 here."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not installed")
    snapshot = gpumagic.snapshot()
    told = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, check=True)
    sample = next(gpu for gpu in snapshot.gpus if gpu.ordinal == 0)
    return snapshot, sample, nvidia_smi.by_uuid(told.stdout)[sample.uuid]


def of_some_tries(rows_of):
    """The rows of the try in which fewest differ: readings change from one moment to the next."""
    tries = []
    for _ in range(TRIES):
        tries.append(list(rows_of()))
        if all(row.ok is not False for row in tries[-1]):
            break
    return min(tries, key=lambda rows: sum(row.ok is False for row in rows))


@pytest.mark.usefixtures("real_gpu")
def test_nvml_s_fields(judge):
    torch.ones(1, device=DEVICE)

    def rows():
        _, sample, told = asked()
        return nvidia_smi.smi_rows(sample, told)

    judge(of_some_tries(rows))


@pytest.mark.usefixtures("real_gpu")
def test_owners_of_memory(judge):
    held = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE)

    def rows():
        snapshot, sample, told = asked()
        there = [p for p in snapshot.processes if p.uuid == sample.uuid]
        mine = [p for p in there if p.mine]
        if not mine:
            yield skipped("this process", "the driver lists none of this container's processes")
        elif mine[0].memory is None:
            yield skipped("this process's memory", "the driver does not tell it")
        else:
            reserved = torch.cuda.memory_reserved(DEVICE)
            yield at_least("this process's bytes", mine[0].memory, reserved, reserved)
        yield from nvidia_smi.process_rows(there, told)

    judge(of_some_tries(rows))
    del held


@pytest.mark.usefixtures("real_gpu")
def test_utilization_and_clocks(judge):
    # Large, for the queue holds about a thousand kernels: a fuller one would stop us here.
    a = torch.randn(16384, 16384, device=DEVICE, dtype=torch.bfloat16)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (begun, ended):  # the first product is the warm-up
        a @ a
        event.record()
    torch.cuda.synchronize()
    for _ in range(min(900, int(5000 / begun.elapsed_time(ended)))):
        b = a @ a
    done = torch.cuda.Event()
    done.record()
    seen = []
    while not done.query():
        sample = next(gpu for gpu in gpumagic.snapshot().gpus if gpu.ordinal == 0)
        seen.append(sample)
        time.sleep(0.25)
    del b
    judge(_load_rows(seen[1:]))


def _load_rows(samples):
    """What the samples say of a GPU that multiplies all the time."""
    if len(samples) < 4:
        yield skipped("all", "the GPU had done its work before four samples were taken")
        return
    known = [sample.utilization for sample in samples if sample.utilization is not None]
    if known:
        yield at_least("utilization under load, %", max(known), 90)
    else:
        yield skipped("utilization", "this GPU does not tell it")
    last = samples[-1]
    for clock in ("sm_clock", "memory_clock"):
        now, most = getattr(last, clock), getattr(last, f"{clock}_limit")
        if now is None or most is None:
            yield skipped(clock, "this GPU does not tell it")
        else:
            yield Row(f"{clock} under load, MHz", now, most, "0 … the most", 0 < now <= most)


def test_placing_and_moving(judge, shell):
    judge(on_device.placing_rows(shell, DEVICE))


def test_peaks(judge):
    judge(on_device.peak_rows(DEVICE))


def test_memory(judge, shell):
    judge(on_device.memory_rows(shell, DEVICE))


def test_out_of_memory(judge, shell):
    judge(on_device.out_of_memory_rows(shell, DEVICE))


def test_fit(judge, little):
    judge(on_device.fit_rows(DEVICE, 2**25 if little else 2**31))


def test_two_streams(judge, little):
    size = 64 if little else 4096
    judge(on_device.stream_rows(DEVICE, size))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_ledger(judge, benchmark_file, traced, real_gpu, name):
    profiler, run = benchmark_file("ledger_vs_profiler"), runner(name, DEVICE)
    run()  # what is loaded and allocated once is so now
    with gpumagic.watch(warn=False) as w:
        run()
    events = traced(run)
    own = profiler.waits_of(traced(lambda: None))
    true = Traffic(profiler.bytes_of(events), profiler.waits_of(events) - own)
    judge(ledger_rows(name, w.ledger, true, blocking=True))


def test_a_profile(judge, shell, little):
    size = 64 if little else 4096
    shell.run(f"import torch\na = torch.randn({size}, {size}, device='{DEVICE}')\nb = a @ a")
    products = "for _ in range(20):\n    b = a @ a"
    timed = shell.run(
        "start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\nstart.record()\n"
        f"{products}\nend.record()\ntorch.cuda.synchronize()\nstart.elapsed_time(end) / 1e3"
    ).result
    shell.run(f"%%ongpu {DEVICE} --profile\n{products}")
    found = gpumagic.last_report().profile
    if found.busy is None:
        judge([skipped("profile", "torch's profiler reports no events of this GPU")])
        return
    line = next(line for line in found.lines if line.where.line == 3)
    judge(
        [
            at_least("launches of 20 products", line.launches, 20),
            near("s of their kernels, by events", line.device, timed, rel=0.1),
            at_least("share of the time with a kernel", found.busy / found.seconds, 0.5),
        ]
    )


@pytest.mark.parametrize("name", MODELS)
def test_peaks_of_dry_runs(judge, name, little):
    batch = 8 if little else 2048
    judge([on_device.dry_run_row(name, DEVICE, batch)])


def test_the_cost_of_a_cell(judge, shell, rehearsal):
    shell.run(
        "import torch\nfrom torch import nn\n"
        f"a, b = torch.randn(2, 8, 8, device='{DEVICE}')\n"
        f"m = torch.randn(2048, 2048, device='{DEVICE}')\n"
        f"X = torch.randn(256, 64, device='{DEVICE}')\n"
        f"y = torch.randint(10, (256,), device='{DEVICE}')\n"
        "net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))\n"
        f"net.to('{DEVICE}'); sgd = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "def step():\n    sgd.zero_grad()\n"
        "    nn.functional.cross_entropy(net(X), y).backward()\n    sgd.step()"
    )
    shell.run("c = m @ m\ntorch.cuda.synchronize()")
    begun = time.perf_counter()
    shell.run("for _ in range(10): c = m @ m\ntorch.cuda.synchronize()")
    products = max(1, round(1.0 / (time.perf_counter() - begun)))
    adds, steps = (1000, 10) if rehearsal else (20_000, 200)
    bodies = {
        "8 × 8 add": (f"for _ in range({adds}): c = a + b", 1.05),
        "step of an MLP": (f"for _ in range({steps}): step()", 1.02),
        "100 ms": (f"for _ in range({products}): c = m @ m", 1.02),
    }
    rows = (on_device.cost_row(shell, n, body, DEVICE, most) for n, (body, most) in bodies.items())
    judge([on_device.entering_row(shell, 1.0, DEVICE), *rows], times=True)


@pytest.fixture(scope="module")
def by_timer():
    """Seconds of each product by torch's Timer, by dtype and size, as they are measured."""
    return {}


@pytest.mark.parametrize("size", [2**n for n in range(6, 14)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_times(judge, benchmark_file, by_timer, dtype, size, rehearsal):
    try:
        from cupyx.profiler import benchmark as cupy
    except ImportError:
        cupy = None
    bench = benchmark_file("timing_vs_cupy")
    if rehearsal and size > 64:
        pytest.skip("one is enough for a rehearsal")
    found = bench.row(size, dtype, cupy, rounds=3, seconds=0.2)
    by_timer[dtype, size] = found["Timer"]
    rows = timing_rows(found, bench.LIMIT)
    if cupy is None:
        rows.append(skipped(f"{dtype} {size} vs CuPy", "CuPy is not installed"))
    judge(rows, times=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_crossover(judge, benchmark_file, real_gpu, by_timer, dtype):
    bench = benchmark_file("timing_vs_cupy")
    cpu = {}
    for n in bench.ON_THE_CPU:
        names = {"a": torch.randn(n, n).to(bench.DTYPES[dtype])}
        timer = bench.Timer("c = a @ a", globals=names, num_threads=torch.get_num_threads())
        cpu[n] = timer.blocked_autorange(min_run_time=0.2).median
    gpu = {n: seconds for (kind, n), seconds in by_timer.items() if kind == dtype}
    told = bench.crossover(dtype, max_time=1.0)["n"]
    judge([crossover_row(f"n from which the GPU wins, {dtype}", told, cpu, gpu)])


def test_a_notebook_here_and_on_virtual_gpus(judge, child_environment):
    # cuBLAS's workspaces lie in torch's memory; a virtual GPU has none.
    none = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
    own = child_environment | none
    virtual = {"CUDA_VISIBLE_DEVICES": "", "GPUMAGIC_VIRTUAL": "1", "STANDIN_CUDA_DEVICES": ""}
    shown = []
    for more in ({}, virtual):
        command = [sys.executable, str(Path(__file__).with_name("run_notebook.py"))]
        done = subprocess.run(
            command, env=own | more, capture_output=True, text=True, timeout=50, check=False
        )
        assert done.returncode == 0, done.stderr
        shown.append(json.loads(done.stdout))
    assert list(shown[0]) == list(NOTEBOOK)
    judge(report_rows(*shown))


def test_ctrl_c_in_a_queue_of_kernels(judge, child_environment, little):
    kernel = Kernel(**child_environment)
    try:
        size = 256 if little else 4096
        judge(on_device.interrupt_rows(kernel, DEVICE, size))
    finally:
        kernel.stop()
