"""The checks of a real GPU themselves: right on virtual ones, and planted errors are found."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hardware import on_device
from hardware.programs import runner
from hardware.results import keep
from hardware.rows import (
    Row,
    Traffic,
    crossover_row,
    ledger_rows,
    ledger_traffic,
    report_rows,
    skipped,
    table_of,
    timing_rows,
)

import gpumagic

ROOT = Path(__file__).parents[2]
DEVICE = "cuda:0"
TABLE = [("peaks", Row("MLP", 11, 10, "± 5%", False)), ("energy", skipped("all", "no counter"))]
COPIES = ("to the host", "strided", "a module", "item", "training, a loss read each step")


def wrong(rows):
    return [row.what for row in rows if row.ok is False]


def watched(name):
    run = runner(name, DEVICE)
    with gpumagic.watch(warn=False) as w:
        run()
    entries = [*w.ledger]
    return entries, ledger_traffic(entries, blocking=False)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", COPIES)
def test_a_planted_byte_and_a_planted_wait_are_found(name):
    ledger, true = watched(name)
    assert wrong(ledger_rows(name, ledger, true, blocking=False)) == []
    for way, nbytes in true.nbytes.items():
        planted = Traffic({**true.nbytes, way: nbytes + 1}, true.waits)
        found = ledger_rows(name, ledger, planted, blocking=False)
        assert wrong(found) == [f"{name}: {way}, bytes"]
    planted = Traffic(true.nbytes, true.waits + 1)
    assert wrong(ledger_rows(name, ledger, planted, blocking=False)) == [f"{name}: waits"]


def test_the_profiler_s_events_are_read_as_bytes_and_waits(benchmark_file):
    profiler = benchmark_file("ledger_vs_profiler")

    def copied(name, nbytes):
        return {"cat": "gpu_memcpy", "name": name, "args": {"bytes": nbytes}}

    events = [
        copied("Memcpy HtoD (Pageable -> Device)", 100),
        copied("Memcpy HtoD (Pinned -> Device)", 20),
        copied("Memcpy DtoH (Device -> Pageable)", 8),
        copied("Memcpy DtoD (Device -> Device)", 4096),
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize"},
        {"cat": "cuda_runtime", "name": "cudaMemcpyAsync"},
        {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize"},
        {"ph": "M", "name": "process_name"},
    ]
    nbytes = {"host_to_device": 120, "device_to_host": 8, "device_to_device": 0}
    assert profiler.bytes_of(events) == nbytes
    assert profiler.waits_of(events) == 2


@pytest.mark.parametrize(("factor", "found"), [(1.0, 0), (1.01, 0), (1.1, 2), (0.9, 2)])
def test_a_planted_tenth_of_a_time_is_found(benchmark_file, factor, found):
    measured = {"dtype": "fp32", "n": 64, "vs Timer": factor, "vs CuPy": factor}
    limit = benchmark_file("timing_vs_cupy").LIMIT
    assert len(wrong(timing_rows(measured, limit))) == found


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_the_device_s_checks_hold_on_a_virtual_gpu(shell):
    for rows in (
        on_device.placing_rows(shell, DEVICE),
        on_device.memory_rows(shell, DEVICE),
        on_device.out_of_memory_rows(shell, DEVICE),
        on_device.fit_rows(DEVICE, 2**24),
        on_device.stream_rows(DEVICE, 8),
        [on_device.dry_run_row("MLP", DEVICE, 8)],
    ):
        assert wrong(rows) == []


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("planted", [0, 1])
def test_a_planted_byte_of_a_peak_is_found(monkeypatch, planted):
    real = torch.cuda.max_memory_allocated
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: real(device) + planted)
    assert len(wrong(on_device.peak_rows(DEVICE))) == planted


@pytest.mark.usefixtures("gpus")
def test_a_planted_tenth_of_a_predicted_peak_is_found(monkeypatch):
    real = gpumagic.dry_run

    def planted(*args, **options):
        result = real(*args, **options)
        peak = result.peak[DEVICE]
        return replace(result, peak={DEVICE: replace(peak, peak=int(peak.peak * 1.1))})

    monkeypatch.setattr(gpumagic, "dry_run", planted)
    assert wrong([on_device.dry_run_row("MLP", DEVICE, 8)]) == ["MLP: peak, bytes"]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("value", "found"), [(700, ["a fifth more"]), (1000, []), (1300, ["it"])])
def test_a_planted_third_of_the_largest_value_is_found(monkeypatch, value, found):
    """It is 1,023 with 16 MiB."""
    planted = SimpleNamespace(confirmed=True, value=value)
    monkeypatch.setattr(gpumagic, "fit", lambda *args, **options: planted)
    rows = on_device.fit_rows(DEVICE, 2**24)
    assert wrong(rows) == [f"fit: what {what} ends in" for what in found]


@pytest.mark.parametrize(("placed_s", "ok"), [(1.0, True), (1.01, True), (1.1, False)])
def test_a_planted_tenth_of_a_cell_s_cost_is_found(monkeypatch, placed_s, ok):
    now = [0.0]

    def run(cell):
        now[0] += placed_s if cell.startswith("%%ongpu") else 1.0
        return SimpleNamespace(error=None)

    monkeypatch.setattr(on_device.time, "perf_counter", lambda: now[0])
    shell = SimpleNamespace(run=run)
    assert on_device.cost_row(shell, "a step", "step()", DEVICE, 1.02).ok is ok


def test_reports_are_equal_but_for_times():
    real = "cuda:0 · 3.1 ms · moved X: 5.9 KiB from cpu in 40 µs\n  2  x.item()  3  12 B   9 µs\n"
    virtual = (
        "cuda:0 (virtual) · 29 ms · moved X: 5.9 KiB from cpu in 3.0 ms\n"
        "  2  x.item()  3  12 B  101 µs\nTimes on virtual GPUs are the CPU's.\n"
    )
    (row,) = report_rows({"train": real}, {"train": virtual})
    assert row.ok
    (row,) = report_rows({"train": real}, {"train": virtual.replace("12 B", "13 B")})
    assert (row.ok, row.measured, row.true) == (False, "2 x.item() 3 12 B", "2 x.item() 3 13 B")
    (row,) = report_rows({"train": real}, {})
    assert not row.ok
    both = {"a": "cuda:0 · 1 ms · peak 32.2 MiB"}, {"a": "cuda:0 · 9 ms · peak 32.3 MiB"}
    assert wrong(report_rows(*both)) == []
    assert wrong(report_rows(both[0], {"a": "cuda:0 · 1 ms · peak 35.4 MiB"})) == [
        "notebook: a: peak, bytes"
    ]


def test_advice_and_the_sentence_on_savings_may_wrap():
    real = (
        "   5  loss.item()  waits for cuda:0 (item, implicit)  3  12 B  270 µs\n"
        "      → leave loss.detach().clone() on the device, and read it once after the\n"
        "        loop; saves 2 of 3 waits, ≈ 180 µs\n"
        "Savings are estimated from the measured times, without the GPU's idle time after a\n"
        "wait.\n"
    )
    virtual = (
        "   5  loss.item()  waits for cuda:0 (item, implicit)  3  12 B  9 µs\n"
        "      → leave loss.detach().clone() on the device, and read it once after the\n"
        "        loop; saves 2 of 3 waits\n"
        "Times on virtual GPUs are the CPU's and say nothing about a GPU: savings\n"
        "are in calls.\n"
    )
    (row,) = report_rows({"train": real}, {"train": virtual})
    assert row.ok
    (row,) = report_rows({"train": real.replace("read it once", "look")}, {"train": virtual})
    assert not row.ok


@pytest.mark.parametrize(("told", "ok"), [(96.0, True), (140.8, False), (None, False)])
def test_a_crossover_lies_where_the_times_cross(told, ok):
    cpu, gpu = {64: 1.0, 128: 4.0, 256: 16.0}, {64: 2.0, 128: 2.0, 256: 2.0}
    assert crossover_row("n", told, cpu, gpu).ok is ok
    assert crossover_row("n", told, gpu, cpu).ok is None


def test_the_table_says_what_is_wrong_and_why_something_was_skipped():
    lines = table_of(TABLE).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["peaks", "MLP", "11", "10", "±", "5%", "WRONG"],
        ["energy", "all", "skipped:", "no", "counter"],
    ]


@pytest.mark.usefixtures("gpus")
def test_the_table_is_kept_with_versions(tmp_path):
    path = keep(tmp_path / "results", TABLE, 12.3)
    kept = json.loads(path.read_text())
    assert path.name == "virtual-gpu.json"
    assert kept["versions"]["torch"] == torch.__version__
    assert kept["rows"] == [
        {"check": "peaks", "what": "MLP", "measured": 11, "true": 10, "limit": "± 5%", "ok": False}
        | {"note": ""}
    ]
    assert kept["skipped"] == ["energy, all: no counter"]


@pytest.mark.slow  # four seconds, of a second pytest
def test_without_a_gpu_all_is_skipped_for_that_one_reason():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/hardware"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "sees no GPU. They are: nvml s fields, owners of memory" in done.stdout
    assert "passed" not in done.stdout
