"""Run the checks of a real GPU, print their table and keep it in benchmarks/results/.

Guarantees: without a GPU all of them are skipped for that reason; what is skipped is in the table
with why; no check begins after seven minutes.
"""

import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hardware.results import keep
from hardware.rows import Row, skipped, table_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LAST_BEGIN_S, EACH_S = 420, 60


class WrongRows(AssertionError):
    """Rows of the table say what is wrong."""


_table: list[tuple[str, Row]] = []
_begun = time.monotonic()


def pytest_addoption(parser):
    parser.addoption(
        "--rehearse",
        action="store_true",
        help="the checks of a real GPU on a virtual one: what needs a driver is skipped, "
        "nothing is saved, and no time means anything",
    )


def rehearsing(config):
    return config.getoption("rehearse", default=False)


def pytest_ignore_collect(collection_path, config):
    """Whoever does not ask for `-m gpu` does not even import its tests."""
    is_asked = re.search(r"\bgpu\b", config.option.markexpr)
    return True if collection_path.name == "test_gpu.py" and not is_asked else None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.timeout(EACH_S))
            if not torch.cuda.is_available() and not rehearsing(config):
                item.add_marker(pytest.mark.skip(f"torch {torch.__version__} sees no GPU"))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and time.monotonic() - _begun > LAST_BEGIN_S:
        pytest.skip(f"{LAST_BEGIN_S // 60} minutes were over")


def stand_in(config):
    """The plugin of the stand-in CUDA runtime (tests/stand_in/cuda), or None."""
    return config.pluginmanager.get_plugin("standin_gpus")


@pytest.fixture(scope="session")
def rehearsal(request):
    """Whether this is a rehearsal, on a virtual GPU."""
    return rehearsing(request.config)


@pytest.fixture(scope="session")
def little(request):
    """Whether the CPU computes what the GPU is to compute, so that small sizes are enough."""
    return rehearsing(request.config) or stand_in(request.config) is not None


@pytest.fixture(scope="session", autouse=True)
def _virtual(rehearsal):
    """The GPU of a rehearsal."""
    from gpumagic import virtual

    if rehearsal:
        virtual.enable(1, 2**30)
    yield
    if rehearsal:
        virtual.disable()


@pytest.fixture
def judge(request, rehearsal):
    """Put rows into the table; fail with those that are wrong."""
    name = request.node.originalname.removeprefix("test_").replace("_", " ")

    def told(rows, *, times=False):
        seen = []
        for row in rows:  # each at once: what ends early has shown what it had
            seen.append(row)
            _table.append((name, row))
        if times and rehearsal:
            return
        wrong = [row for row in seen if row.ok is False]
        if wrong:
            raise WrongRows("\n".join(map(str, wrong)))

    return told


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A check that was skipped or broke off has its row too."""
    report = yield
    if item.get_closest_marker("gpu"):
        name = item.name.removeprefix("test_").replace("_", " ")
        if report.skipped:
            _table.append((name, skipped("all", report.longrepr[2].removeprefix("Skipped: "))))
        elif report.failed and not isinstance(call.excinfo.value, WrongRows):
            why = call.excinfo.exconly().partition("\n")[0]
            _table.append((name, Row("broke off", ok=False, note=why)))
    return report


def pytest_terminal_summary(terminalreporter, config):
    if not _table:
        return
    reasons = {row.note for _, row in _table}
    if len(reasons) == 1 and all(row.ok is None for _, row in _table):
        counts = Counter(name.partition("[")[0] for name, _ in _table)
        names = ", ".join(name if n == 1 else f"{name} ({n})" for name, n in counts.items())
        terminalreporter.write_line(
            f"\nAll {len(_table)} checks were skipped: {reasons.pop()}. They are: {names}"
        )
        return
    terminalreporter.write_line("\n" + table_of(_table))
    counts = {ok: sum(row.ok is ok for _, row in _table) for ok in (True, False, None)}
    seconds = time.monotonic() - _begun
    terminalreporter.write_line(
        f"{counts[True]} ok, {counts[False]} wrong, {counts[None]} skipped, in {seconds:.0f} s"
    )
    if rehearsing(config) or stand_in(config) or config.option.keyword:
        terminalreporter.write_line("not kept: no real GPU, or a part of the checks")
    else:
        path = keep(RESULTS, _table, seconds)
        terminalreporter.write_line(f"kept in {path.relative_to(ROOT)}")


@pytest.fixture
def traced(request, benchmark_file):
    """Run a function; return its copies and waits as torch's profiler lists them."""
    return (stand_in(request.config) or benchmark_file("ledger_vs_profiler")).traced


@pytest.fixture
def real_gpu(rehearsal):
    """Skip what only a driver can answer."""
    if rehearsal:
        pytest.skip("a virtual GPU has no driver")


@pytest.fixture
def child_environment(rehearsal):
    """For processes that are to have the GPU that this one has."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    own = {**os.environ, "PYTHONPATH": path}
    return own | ({"GPUMAGIC_VIRTUAL": "1"} if rehearsal else {})
