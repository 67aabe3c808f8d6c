"""Fixtures for all tests: two virtual GPUs, and an IPython shell with the extension loaded.

They guarantee that Ctrl-C works in every test and what it starts, and that no test leaves anything
of gpumagic in force.
"""

import gc
import importlib.util
import io
import signal
import sys
import threading
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import settings
from scheduling import make_scheduler, turn
from traitlets.config import Config

from gpumagic import faults

# How long an example takes says nothing on a busy machine.
settings.register_profile("tests", deadline=None, max_examples=25)
# Minutes to hours: pytest --hypothesis-profile=thorough
settings.register_profile("thorough", deadline=None, max_examples=3000)
settings.load_profile("tests")

GIB = 2**30
SLOW_S = 3600
# After so many tests, or modules more (torch imports 800 for the first optimizer), what there is
# is worth freezing again.
MANY_TESTS, MANY_MODULES = 20, 100
_modules_frozen = _tests_since = 0


def pytest_collection_finish():
    _freeze()


def _freeze():
    """Leave what is there now out of every collection of garbage from now on.

    What was imported is a million objects, which each `gc.collect` in a test would go through; so
    it would through what pytest notes of each test.
    """
    global _modules_frozen, _tests_since
    sys.last_value = sys.last_traceback = None  # a failed test's frames are not to stay
    gc.collect()
    gc.freeze()
    _modules_frozen, _tests_since = len(sys.modules), 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Where tests run in several processes."""
    return make_scheduler(config, log)


def pytest_collection_modifyitems(items):
    """What takes long comes first, and a slow test may take longer than the limit of all others."""
    items.sort(key=lambda item: turn(item.nodeid))
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_interrupts():
    """Set Python's own handler: in a shell's background SIGINT is ignored, by children too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    """After each test nothing is placed, patched, watched, measured or timed any more."""
    global _tests_since
    collects = gc.isenabled()
    yield
    assert gc.isenabled() == collects
    # Else the next test's first cell tells of a fault that this one made on purpose.
    faults.forget()
    _tests_since += 1
    if _tests_since >= MANY_TESTS or len(sys.modules) > _modules_frozen + MANY_MODULES:
        _freeze()
    if sys.modules.get("torch") is None:
        return
    # Beside its threads no test may fork: what uses it runs in a process of its own.
    assert "jax" not in sys.modules or not hasattr(request.config, "workerinput")
    import torch

    from gpumagic.ledger import attribute, dispatch
    from gpumagic.placement import placement, swap

    assert torch.is_grad_enabled()
    assert not swap.installed()
    assert placement() is None
    assert not dispatch.meters
    assert attribute.running == ()
    ours = [t for t in threading.enumerate() if t.name.startswith("gputime")]
    for thread in ours:
        thread.join(10)
    assert not any(thread.is_alive() for thread in ours)


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path_factory, monkeypatch):
    """State files of parallel tests must not meet."""
    monkeypatch.setenv("GPUMAGIC_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))


@pytest.fixture
def benchmark_file():
    """Load a file of benchmarks/ as a module, by its name."""

    def loaded(name):
        path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.fixture
def as_in_a_notebook(request, monkeypatch):
    """Hide the modules of other tests: to look through all that they hold takes a second a time."""
    tests = str(Path(__file__).parent)
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if file.startswith(tests) and module is not request.module:
            monkeypatch.delitem(sys.modules, name)


_kept = ExitStack()
_kept_kernels = []


@pytest.fixture
def kept_kernels(monkeypatch):
    """Register the kernels of virtual GPUs once for tests in a row: it takes a tenth of a second.

    All else of virtual GPUs is made anew for each test.
    """
    from gpumagic.virtual import switch

    register = switch.register

    def register_once(stack):
        if not _kept_kernels:
            with ExitStack() as made:
                register(made)
                _kept.push(made.pop_all())
            _kept_kernels.append(True)

    monkeypatch.setattr(switch, "register", register_once)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem):
    """What has no virtual GPUs meets torch as it is."""
    try:
        return (yield)
    finally:
        if nextitem is None or "kept_kernels" not in nextitem.fixturenames:
            _kept_kernels.clear()
            _kept.close()


@pytest.fixture
def gpus(_own_runtime_folder, kept_kernels):
    """Two virtual GPUs of 1 GiB."""
    import torch

    from gpumagic import virtual

    virtual.enable(2, GIB)
    yield
    torch.set_default_device(None)
    virtual.disable()


class Shell:
    """An IPython shell in this process, whose cells' output is caught."""

    def __init__(self):
        from IPython.core.interactiveshell import InteractiveShell

        config = Config()
        config.HistoryManager.hist_file = ":memory:"
        config.InteractiveShell.colors = "nocolor"
        config.InteractiveShell.xmode = "Plain"
        self.ip = InteractiveShell.instance(config=config)
        self.ns = self.ip.user_ns

    def run(self, cell, **options):
        """Run a cell; the result has `.text`, what it showed, and `.error`."""
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            result = self.ip.run_cell(cell, **({"store_history": True} | options))
        result.text = out.getvalue()
        result.error = result.error_in_exec or result.error_before_exec
        if isinstance(result.error, pytest.fail.Exception):
            raise result.error  # the test's limit of time, which IPython has taken for the cell's
        return result


def forget_origins():
    """Moved variables of one test's notebook would be known in the next one."""
    for room in ("moving.move", "frameworks.array_framework"):
        getattr(sys.modules.get(f"gpumagic.{room}"), "_origins", {}).clear()


@pytest.fixture
def empty_shell():
    """As a notebook begins: the extension is not loaded."""
    from IPython.core.interactiveshell import InteractiveShell

    made = Shell()
    yield made
    made.run("%unload_ext gpumagic")
    forget_origins()
    made.ip.history_manager.end_session()
    made.ip.reset(new_session=False)
    # A thread may keep the shell, and that an error's frames, which may keep the thread.
    made.ip.last_execution_result = None
    vars(made.ip.InteractiveTB).pop("tb", None)
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        vars(sys).pop(name, None)
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(empty_shell):
    empty_shell.ip.run_line_magic("load_ext", "gpumagic")
    return empty_shell


@pytest.fixture
def ip(gpus, shell, as_in_a_notebook):
    """The shell with torch imported; afterwards the first GPU must be the current one."""
    import torch

    # In a failed loader's iterator that garbage collection deletes, torch waits for its workers.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    shell.run("import torch\nfrom torch import nn, zeros")
    yield shell
    assert torch.cuda.current_device() == 0
