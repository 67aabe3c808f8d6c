"""Loading, unloading, and hundreds of cells: nothing is left behind or doubled."""

import builtins
import contextlib
import gc
import importlib
import io
import signal
import sys
import threading
import warnings

import pytest
import torch

from gpumagic.magics import loading


def state(ip):
    """What an extension could leave behind in a shell."""
    return (
        list(ip.input_transformers_cleanup),
        list(ip.ast_transformers),
        {k: list(v) for k, v in ip.events.callbacks.items()},
        {k: sorted(v) for k, v in ip.magics_manager.magics.items()},
        sorted(ip.magics_manager.registry),
        list(ip.Completer.custom_matchers),
        {m: len(f.type_printers) for m, f in ip.display_formatter.formatters.items()},
        {m: len(f.deferred_printers) for m, f in ip.display_formatter.formatters.items()},
    )


def test_unload_and_reload_leave_nothing_doubled(gpus, shell):
    ip = shell.ip
    ip.run_line_magic("unload_ext", "gpumagic")
    without = state(ip)
    ip.run_line_magic("load_ext", "gpumagic")
    sizes = [len(part) for part in state(ip)]
    ip.run_line_magic("reload_ext", "gpumagic")
    ip.run_line_magic("reload_ext", "gpumagic")
    assert [len(part) for part in state(ip)] == sizes
    assert shell.run("%%ongpu 1\nimport torch; torch.zeros(1)").text.count("cuda:1 (virtual") == 1
    shell.run("%gpus")  # fills the deferred printers
    shell.run("%ongpu 1")
    ip.run_line_magic("unload_ext", "gpumagic")
    assert state(ip) == without
    assert shell.run("torch.zeros(1)").result.device.type == "cpu"
    ip.run_line_magic("load_ext", "gpumagic")


def test_a_reload_remembers_what_cells_have_moved(ip):
    ip.run("net = torch.nn.Linear(8, 3)")
    ip.run("%%ongpu 0\nnet(torch.zeros(2, 8)).shape")
    ip.run("%reload_ext gpumagic")
    assert "moved back net: " in ip.run("%ongpu home").text
    assert ip.ns["net"].weight.device.type == "cpu"


@pytest.mark.parametrize("position", range(20))
def test_a_hook_that_fails_leaves_nothing_installed(shell, monkeypatch, position):
    class Fails:
        def install(self):
            raise ZeroDivisionError

    hooks = loading.hooks
    shell.ip.run_line_magic("unload_ext", "gpumagic")
    without, names = state(shell.ip), set(vars(shell.ip))
    monkeypatch.setattr(
        loading, "hooks", lambda ip: (*(all_ := hooks(ip))[:position], Fails(), *all_[position:])
    )
    with pytest.raises(ZeroDivisionError):
        loading.load(shell.ip)
    assert state(shell.ip) == without
    assert set(vars(shell.ip)) == names
    monkeypatch.undo()
    shell.ip.run_line_magic("load_ext", "gpumagic")


@pytest.mark.parametrize(("name", "function"), loading.FORGET)
def test_what_unloading_calls_is_there(name, function):
    assert callable(getattr(importlib.import_module(name), function))


def of_the_process():
    """What an extension could leave behind in the process, by identity."""
    from torch.jit import _builtins
    from torch.overrides import _get_current_function_mode_stack

    return {
        "meta_path": list(sys.meta_path),
        "path_hooks": list(sys.path_hooks),
        "builtins": dict(vars(builtins)),
        "hooks": (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook),
        "warnings": (warnings.showwarning, warnings.formatwarning),
        "trace": (sys.gettrace(), sys.getprofile(), threading.gettrace()),
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "torch": {k: v for k, v in vars(torch).items() if callable(v)},
        "tensor": {k: v for k, v in vars(torch.Tensor).items() if callable(v)},
        "loader": dict(vars(torch.utils.data.DataLoader)),
        "scripted": len(_builtins._get_builtin_table()),
        "modes": list(_get_current_function_mode_stack()),
    }


CELLS = (
    "X = torch.ones(4)",
    "%gpus",
    "%ongpu 1",
    "X + torch.zeros(4)",
    "%ongpu off",
    "%gpuwatch on",
    "X.cpu()",
    "%%ongpu 0 --fix --report\nX.cpu() + X.cuda(1)",
    "torch.ones(2, device='cuda:0') + torch.ones(2, device='cuda:1')",
    "%%ongpu 1 --dry-run\nY = X * 2",
    "%gputime cpu --max-time 0.05 -- X + 1",
)


@pytest.mark.filterwarnings("ignore")
def test_nothing_of_ours_lives_on_in_the_process(gpus, shell, monkeypatch):
    audited = []
    monkeypatch.setattr(sys, "addaudithook", audited.append)
    # torch's and IPython's own late imports, which change torch
    shell.run("import torch, torch._dynamo\nX = torch.ones(1)")
    shell.run(CELLS[8])
    shell.ip.run_line_magic("unload_ext", "gpumagic")
    threads, traceback = set(threading.enumerate()), shell.ip.showtraceback
    before = of_the_process()
    shell.ip.run_line_magic("load_ext", "gpumagic")
    for cell in CELLS:
        shell.run(cell)
    shell.ip.run_line_magic("unload_ext", "gpumagic")
    after = of_the_process()
    for what, value in before.items():
        assert after[what] == value, what
    assert shell.ip.showtraceback == traceback
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()
    assert audited == []
    shell.ip.run_line_magic("load_ext", "gpumagic")


def test_two_shells(ip):
    from IPython.core.interactiveshell import InteractiveShell

    second = InteractiveShell(config=ip.ip.config)
    second.run_line_magic("load_ext", "gpumagic")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        done = second.run_cell("%%ongpu 1\nimport torch; where = torch.zeros(1).device.index")
    assert done.success
    assert out.getvalue().count("cuda:1 (virtual") == 1
    assert second.user_ns["where"] == 1
    second.run_line_magic("unload_ext", "gpumagic")
    assert ip.run("%%ongpu 1\nzeros(1)").result.device.index == 1
    second.history_manager.end_session()


def test_unload_inside_a_placed_cell(ip):
    done = ip.run("%%ongpu 1\n%unload_ext gpumagic\nx = torch.zeros(1)")
    assert done.success, done.text
    assert ip.ns["x"].device.type == "cpu"
    ip.run("%load_ext gpumagic")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_hundreds_of_cells_leave_nothing_behind(ip):
    ip.run("X = torch.ones(10)")
    names = dict(vars(torch))
    threads = threading.active_count()

    def count_objects():
        # IPython's own history keeps everything that is displayed, by whomever.
        getattr(ip.ip.history_manager, "outputs", {}).clear()
        gc.collect()
        return len(gc.get_objects())

    def cells(count):
        for n in range(count):
            end = "1 / 0" if n % 2 else "None"
            ip.run(f"%%ongpu {n % 3 % 2}\nY = X + zeros(10)\n{end}", store_history=False)

    cells(50)
    gc.collect()
    objects, modes = count_objects(), len(torch.overrides._get_current_function_mode_stack())
    cells(300)
    # Less than one object for ten cells: nothing that a cell makes survives it.
    assert count_objects() - objects < 30
    assert dict(vars(torch)) == names
    assert threading.active_count() == threads
    assert len(torch.overrides._get_current_function_mode_stack()) == modes
    assert torch.cuda.memory_allocated(0) + torch.cuda.memory_allocated(1) <= 4 * 512


def test_a_placement_that_begins_with_the_extension_can_be_ended(gpus, shell):
    shell.ip.run_line_magic("unload_ext", "gpumagic")
    shell.run("import torch\n%load_ext gpumagic\n%ongpu 1\nx = torch.zeros(1)")
    assert shell.ns["x"].device.index == 1
    shell.run("%ongpu off")
    assert shell.run("torch.zeros(1).device.type").result == "cpu"


def test_in_a_browser_it_says_in_one_line_what_is_missing(empty_shell, monkeypatch):
    monkeypatch.setattr("sys.platform", "emscripten")
    done = empty_shell.run("%load_ext gpumagic")
    assert done.text == (
        "gpumagic needs a server: Python in the browser has no GPUs, no torch, no processes\n"
    )
    assert "gpus" not in empty_shell.ip.magics_manager.magics["line"]
