"""The copy of the process in which a dry run is followed: what it cannot change, how it ends."""

import ctypes
import decimal
import gc
import locale
import logging
import mmap
import os
import random
import signal
import sys
import threading
import time
import types
import warnings

import kernels
import numpy as np
import psutil
import pytest
import torch
import torch._dynamo  # what that sets is its own
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpumagic import GpuError, dry_run, faults
from gpumagic.dryrun import follow_code, forked
from gpumagic.dryrun.confined import held_by_the_kernel
from gpumagic.dryrun.forked import run_forked
from gpumagic.virtual import switch

SETTINGS = {
    "torch.set_autocast_enabled('cpu', True)": lambda: torch.is_autocast_enabled("cpu"),
    "torch.set_autocast_dtype('cuda', torch.float16)": lambda: torch.get_autocast_dtype("cuda"),
    "torch.set_default_dtype(torch.float64)": torch.get_default_dtype,
    "torch.set_default_device('meta')": torch.get_default_device,
    "torch.set_grad_enabled(False)": torch.is_grad_enabled,
    "torch.autograd.set_detect_anomaly(True)": torch.is_anomaly_enabled,
    "torch.use_deterministic_algorithms(True)": torch.are_deterministic_algorithms_enabled,
    "torch.set_num_threads(3)": torch.get_num_threads,
    "torch.set_printoptions(precision=2)": lambda: torch._tensor_str.PRINT_OPTS.precision,
    "torch.manual_seed(5)": lambda: torch.get_rng_state().tolist(),
    "random.seed(5)": random.getstate,
    "np.random.seed(5)": lambda: np.random.get_state()[1].tolist(),
    "np.seterr(all='raise')": np.geterr,
    "np.set_printoptions(precision=2)": np.get_printoptions,
    "sys.setrecursionlimit(5000)": sys.getrecursionlimit,
    "sys.setswitchinterval(0.5)": sys.getswitchinterval,
    "sys.path.append('nowhere')": lambda: list(sys.path),
    "sys.modules['config'].k = 2": lambda: sys.modules["config"].k,
    "gc.disable(); gc.set_threshold(1, 2, 3)": lambda: (gc.isenabled(), gc.get_threshold()),
    "decimal.getcontext().prec = 3": lambda: decimal.getcontext().prec,
    "locale.setlocale(locale.LC_ALL, 'C')": lambda: locale.setlocale(locale.LC_ALL),
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN)": lambda: signal.getsignal(signal.SIGUSR1),
    "os.environ['GM_LEAK'] = '1'": lambda: dict(os.environ),
    "os.chdir('/'); os.umask(0)": os.getcwd,
    "logging.getLogger('gm').setLevel(10)": lambda: logging.getLogger("gm").level,
    "logging.root.addHandler(logging.NullHandler())": lambda: list(logging.root.handlers),
    "warnings.simplefilter('error')": lambda: list(warnings.filters),
    "nn.Linear.mark = 1": lambda: hasattr(nn.Linear, "mark"),
    "nn.init.normal_ = None": lambda: nn.init.normal_,
    "lock.acquire()": lambda: LOCK.locked(),
    "data.append(1)": lambda: len(DATA),
    "threading.setprofile(print)": threading.getprofile,
}
LOCK, DATA = threading.Lock(), bytearray(b"abc")
ENDS = ["", "raise RuntimeError", "raise KeyboardInterrupt", "1 / 0", "sys.exit(3)"]


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setitem(sys.modules, "config", types.SimpleNamespace(k=1))


@pytest.mark.usefixtures("config")
def test_nothing_of_the_process_is_changed():
    _unchanged(list(SETTINGS), "")


@settings(max_examples=10)
@given(st.lists(st.sampled_from(list(SETTINGS)), min_size=1, max_size=8), st.sampled_from(ENDS))
def test_random_programs_leave_every_setting(statements, end):
    sys.modules["config"] = types.SimpleNamespace(k=1)
    _unchanged([s for s in statements if s != "lock.acquire()"], end)


def _unchanged(statements, end):
    code = "\n".join([*statements, end])
    names = {"lock": LOCK, "data": DATA, "done": []} | {
        name: globals()[name]
        for name in ("torch", "np", "nn", "sys", "os", "gc", "decimal", "locale", "signal")
    }
    names |= {"logging": logging, "warnings": warnings, "random": random, "threading": threading}
    before = {statement: SETTINGS[statement]() for statement in statements}
    result = dry_run(lambda: exec(code, names))
    after = {statement: SETTINGS[statement]() for statement in statements}
    for statement in statements:
        assert after[statement] == before[statement], statement
    assert result.complete == (not end), result


def test_files_that_are_open_are_neither_written_nor_read_on(tmp_path):
    log, data = tmp_path / "log", tmp_path / "data"
    log.write_text("begun\n")
    np.arange(4096, dtype=np.uint8).tofile(data)
    mapped = np.memmap(data, mode="r+")
    shared = torch.zeros(3).share_memory_()
    with log.open("a") as append, log.open() as read, data.open("rb") as binary:
        binary.read(5)

        def use():
            mapped[0] = 77
            shared.add_(1)
            return binary.read(2), read.read(), mapped[0]

        assert dry_run(use).complete
        (end,) = dry_run(lambda: (append.write("leak"), append.flush())).unknown
        assert end.ended
        assert end.reason.endswith("Bad file descriptor: a dry run writes no file")
        assert binary.read(1) == b"\x05"
        assert read.read() == "begun\n"
    assert log.read_text() == "begun\n"
    assert mapped[0] == 0
    assert shared.tolist() == [0, 0, 0]


@pytest.mark.skipif(not run_forked(held_by_the_kernel, 10), reason="a kernel without Landlock")
def test_a_writer_in_c_writes_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"kept")
    libc = ctypes.CDLL(None)

    def write():
        return libc.open(bytes(path), os.O_WRONLY | os.O_TRUNC), libc.unlink(bytes(path))

    assert dry_run(write).complete
    assert path.read_bytes() == b"kept"
    (end,) = dry_run(lambda: torch._C.PyTorchFileWriter(str(path))).unknown
    assert path.read_bytes() == b"kept"
    assert end.reason.endswith("a dry run writes no file")


def test_a_limit_is_a_kill():
    def forever():
        while True:
            pass

    started = time.monotonic()
    (end,) = dry_run(forever, limit=0.2).unknown
    assert end.ended
    assert end.where.function == "forever"
    assert run_forked(lambda: time.sleep(60), 0.2) is None
    assert time.monotonic() - started < 20


def test_ctrl_c_ends_the_copy_at_once():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = set(psutil.Process().children())  # the lab of the browser tests may be one
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            dry_run(lambda: time.sleep(60))
    finally:
        timer.cancel()  # it would interrupt pytest itself
    assert time.monotonic() - started < 20
    timer.join()
    assert set(psutil.Process().children()) <= before  # none is left


@pytest.mark.parametrize("call", ["fork", "waitpid"])
def test_an_interrupt_at_any_moment_leaves_no_zombie(monkeypatch, call):
    real, calls = getattr(os, call), []

    def interrupted(*args):
        calls.append(args)
        result = real(*args) if call == "fork" else None
        if len(calls) == 1 and result != 0:  # not in the copy
            signal.raise_signal(signal.SIGINT)
        return result or real(*args)

    before = {child.pid for child in psutil.Process().children()}
    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_forked(int, 60)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_limit_that_somebody_else_has_set_is_theirs():
    def ring(*_):
        raise TimeoutError("mine")

    def ring_after_the_fork():
        # Python ignores errors in its own hooks of a fork, so the signal comes after them.
        while not {*psutil.Process().children()} - known and not ended.wait(0.05):
            pass
        if not ended.wait(0.3):
            signal.raise_signal(signal.SIGUSR1)

    before, ended = signal.signal(signal.SIGUSR1, ring), threading.Event()
    known, thread = {*psutil.Process().children()}, threading.Thread(target=ring_after_the_fork)
    thread.start()
    try:
        with pytest.raises(TimeoutError, match="mine"):
            dry_run(lambda: time.sleep(60))
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_crash_is_said_in_a_line():
    with pytest.raises(GpuError, match="ended by signal 11; your variables have not changed"):
        dry_run(lambda: ctypes.string_at(0))
    with pytest.raises(GpuError, match="process exited; your variables have not changed"):
        dry_run(lambda: os._exit(3))


def test_shared_memory_that_is_garbage_ends_no_copy():
    """It was collected while the copy made its own of it."""
    at = 0

    def leave_garbage():
        if not at:
            return
        gc.disable()
        for _ in range(50):
            mapped = [mmap.mmap(-1, 2**14)]
            mapped.append(mapped)
            mapped[0][0:1] = b"x"
        gc.set_threshold(at)
        gc.enable()

    os.register_at_fork(after_in_child=leave_garbage)
    for at in (300, 600, 900):  # noqa: B007  it is read above
        assert run_forked(lambda: 1, 10) == 1
    at = 0


def test_where_there_is_no_fork_a_line_says_so(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(GpuError, match=r"needs os\.fork") as error:
        dry_run(lambda: 1)
    assert "\n" not in str(error.value)


def test_backward_runs_in_the_copy_after_it_ran_on_a_gpu(gpus):
    w = torch.ones(3, device="cuda:1", requires_grad=True)
    (w * 2).sum().backward()
    result = dry_run(lambda: (w * 3).sum().backward())
    assert result.complete, result
    assert w.grad.tolist() == [2, 2, 2]


def test_what_fork_has_set_is_known_and_set_in_the_copy_alone(gpus):
    torch.ones(3, device="cuda:1", requires_grad=True).sum().backward()
    assert run_forked(lambda: forked.refusal().value, 20) == 1
    assert forked.refusal().value == 0


@pytest.mark.parametrize(
    ("code", "start", "address"),
    [
        # torch 2.13.0+cpu, x86-64
        ("55 53 48 83 ec 08 80 3d 2b eb d8 0e 00 75 49 0f b6 05 da ea d8 0e", 0x1000, 0xED8FB38),
        # torch 2.13.0, AArch64
        (
            "fd 7b be a9 61 58 02 b0 fd 03 00 91 f3 53 01 a9 f3 03 00 aa 20 40 69 39 00 02 00 37",
            0x6686AA0,
            0xB193A50,
        ),
        ("fd 7b be a9 fd 03 00 91", 0x1000, None),
    ],
)
def test_the_address_of_a_variable_is_in_the_code_that_reads_it(code, start, address):
    assert forked.operand_of(bytes.fromhex(code), start) == address


def test_a_real_gpus_driver_is_not_called():
    facts = types.SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9)

    def use():
        switch.stand_in([(facts, 2**20), (facts, 0)])
        torch.cuda.set_device(1)
        return (
            torch.cuda.get_device_name(0),
            torch.cuda.memory_allocated(0),
            torch.cuda.get_device_capability(1),
            torch.cuda.current_device(),
            torch.cuda.device_count(),
        )

    assert run_forked(use, 20) == ("NVIDIA H100", 2**20, (9, 0), 1, 2)
    assert not torch.cuda.is_available()


def test_a_kernel_with_nine_threads_and_a_warm_pool():
    kernel = kernels.Kernel(OMP_NUM_THREADS="2")
    try:
        kernel.run(
            "%load_ext gpumagic\nimport torch, threading, time\nfrom torch import nn\n"
            "gpumagic = __import__('gpumagic'); gpumagic.virtual.enable(2)\n"
            "X = torch.randn(512, 784); net = nn.Linear(784, 4096); pool = (X @ X.T).sum()\n"
            "opt = torch.optim.Adam(net.parameters()); big = torch.randn(50_000_000)\n"
            "wait = threading.Event()\n"
            "for n in range(4): threading.Thread(target=wait.wait, daemon=True).start()\n"
            "import logging, sys; handler = logging.StreamHandler(sys.stdout)\n"
            "logging.getLogger('mine').addHandler(handler)"
        )
        cell = (
            "%%ongpu 1 --dry-run\nloss = net(X).sum(); loss.backward(); opt.step()\n"
            "print('not shown'); display('nor this'); torch.set_num_threads(1)\n"
            "logging.getLogger('mine').error('nor' + ' that'); handler.flush()"
        )
        for _ in range(3):
            shown = kernels.text(kernel.run(cell)[0])
            assert "nothing was computed" in shown
            assert "loss  float32[]  cuda:1" in shown
            assert "'not shown'" not in shown
            assert "nor this" not in shown.replace("display('nor this')", "")
            assert "nor that" not in shown
        after = (
            "print(net.weight.device, net.weight.grad, len(opt.state), (X @ X.T).isfinite().all())"
        )
        assert kernels.text(kernel.run(after)[0]) == "cpu None 0 tensor(True)\n"
    finally:
        kernel.stop()


def test_a_fault_of_ours_in_the_copy_is_kept_here(monkeypatch):
    monkeypatch.setattr(follow_code, "describe", lambda name, value: 1 // 0)
    faults.forget()
    with pytest.raises(GpuError, match=r"\(a bug in gpumagic\): ZeroDivisionError"):
        dry_run(lambda: 1)
    (fault,) = faults.all_kept()
    assert fault.doing == "following the code of a dry run"
    assert "test_forked.py" in fault.error
    faults.forget()


def test_the_copy_computes_although_the_process_has_used_several_threads(gpus):
    before, x = torch.get_num_threads(), torch.ones(2000, 2000)
    torch.set_num_threads(2)
    try:
        x.sin()  # OpenMP starts its threads
        assert follow_code.in_fork(lambda: float(x.sin().sum()), 8.0, 2**20) is not None
    finally:
        torch.set_num_threads(before)
