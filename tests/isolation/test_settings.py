"""Whatever code sets for the process or its thread is put back, however the code ends."""

import contextvars
import importlib.util
import logging
import os
import random
import sys
import warnings
from contextlib import suppress

import numpy
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpumagic.dryrun import dry_run
from gpumagic.errors import GpuError
from gpumagic.isolation.settings import kept
from gpumagic.timing import compare

pytestmark = pytest.mark.usefixtures("gpus")
VARIABLE = contextvars.ContextVar("variable")
MATMUL = torch.backends.cuda.matmul


# What code may do, and what tells that it was done.
CHANGES = {
    "torch.set_grad_enabled(False)": torch.is_grad_enabled,
    "torch.set_autocast_enabled('cpu', True)": lambda: torch.is_autocast_enabled("cpu"),
    "torch.set_autocast_enabled('cuda', True)": lambda: torch.is_autocast_enabled("cuda"),
    "torch.set_autocast_dtype('cpu', torch.float16)": lambda: torch.get_autocast_dtype("cpu"),
    "torch.set_autocast_dtype('cuda', torch.bfloat16)": lambda: torch.get_autocast_dtype("cuda"),
    "torch.autograd.set_detect_anomaly(True)": torch.is_anomaly_enabled,
    "torch.set_default_dtype(torch.float64)": torch.get_default_dtype,
    "torch.set_default_device('meta')": torch.get_default_device,
    "torch.set_num_threads(3)": torch.get_num_threads,
    "torch.use_deterministic_algorithms(True)": torch.get_deterministic_debug_mode,
    "torch.set_float32_matmul_precision('high')": torch.get_float32_matmul_precision,
    "torch.backends.cudnn.benchmark = True": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.enabled = False": lambda: torch.backends.cudnn.enabled,
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False": lambda: (
        MATMUL.allow_bf16_reduced_precision_reduction
    ),
    "torch.cuda.set_device(1)": torch.cuda.current_device,
    "torch.manual_seed(1)": lambda: torch.get_rng_state().tolist(),
    "torch.rand(1, device='cuda:0')": lambda: torch.cuda.get_rng_state(0).tolist(),
    "np.seterr(all='raise')": numpy.geterr,
    "np.random.seed(1)": lambda: str(numpy.random.get_state()),
    "random.seed(1)": random.getstate,
    "variable.set(5)": lambda: VARIABLE.get(None),
    "sys.path.append('nowhere')": lambda: list(sys.path),
    "sys.stdout = io.StringIO()": lambda: sys.stdout,
    "logging.basicConfig(level=10, force=True)": lambda: logging.root.level,
    "logging.getLogger().addHandler(logging.NullHandler())": lambda: list(logging.root.handlers),
    "os.environ['NEW'] = '1'": lambda: dict(os.environ),
    "os.environ.pop('PATH', None)": lambda: dict(os.environ),
    "os.chdir('/')": os.getcwd,
}
ENDS = ("", "raise ValueError('at the end')", "raise KeyboardInterrupt")
IMPORTS = "contextvars io logging os random sys"


def states():
    return {change: read() for change, read in CHANGES.items()}


def namespace():
    space = {name: importlib.import_module(name) for name in IMPORTS.split()}
    return {**space, "__name__": "__main__", "torch": torch, "np": numpy, "variable": VARIABLE}


def timed(code, shell):
    compare(code, ["cpu", 0], namespace=namespace(), max_time=0.004)


def timed_in_a_cell(code, shell):
    shell.ns.update(namespace())
    done = shell.run(f"%%gputime cpu --max-time 0.004\n{code}")
    if done.error is not None:
        raise done.error


def dry(code, shell):
    space = namespace()
    with suppress(GpuError):  # of the forked copy, which such a program may end
        dry_run(lambda: exec(code, space), on=0)


@pytest.fixture
def unprinted():
    """A logger of the test, and nothing that a statement's own words would show."""
    before = logging.root.level, logging.root.handlers[:]
    with warnings.catch_warnings():
        yield
    logging.root.level, logging.root.handlers[:] = before


@pytest.mark.parametrize("go", [timed, timed_in_a_cell, dry])
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=12),
    end=st.sampled_from(ENDS),
)
@example(changes=sorted(CHANGES), end="")
@example(changes=sorted(CHANGES), end="raise KeyboardInterrupt")
@example(changes=sorted(CHANGES, reverse=True), end="raise ValueError('at the end')")
def test_all_settings_are_as_before(go, changes, end, unprinted, shell):
    before = states()
    code = "\n".join(f"try: {change}\nexcept Exception: pass" for change in changes)
    with suppress(ValueError, KeyboardInterrupt):
        go(f"{code}\n{end}", shell)
    after = states()
    assert [change for change in before if after[change] != before[change]] == []


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_one(change, unprinted):
    """Or the test above would hold for nothing."""
    before = CHANGES[change]()
    with kept():
        space = namespace()
        for _ in range(2):
            exec(change, space)
        changed = CHANGES[change]() != before or "PATH" in change
        space.clear()
    assert changed
    if "variable" not in change:  # it ends with the context that a comparison runs in
        assert CHANGES[change]() == before


def test_what_the_setup_sets_holds_while_it_is_timed():
    made = compare(
        "assert 'mine' in sys.path",
        ["cpu"],
        setup="sys.path.append('mine')",
        namespace={"sys": sys},
        max_time=0.02,
    )
    assert made.timings[0].error is None
    assert "mine" not in sys.path


def test_a_folder_that_is_gone_keeps_nothing_else_from_being_put_back(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    threads = torch.get_num_threads()

    def change():
        os.chdir(tmp_path)
        folder.rmdir()
        torch.set_num_threads(threads + 1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), kept():
        change()
    assert torch.get_num_threads() == threads
