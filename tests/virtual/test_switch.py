"""On and off: whole or not at all, and nothing left behind."""

import importlib
import os
import subprocess
import sys
import threading
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from gpumagic import virtual
from gpumagic.errors import GpuError
from gpumagic.telemetry import state_files as published
from gpumagic.virtual import switch

KEYS = (
    "CPU",
    "CUDA",
    "AutogradCUDA",
    "SparseCUDA",
    "SparseCsrCUDA",
    "QuantizedCUDA",
    "NestedTensorCUDA",
)
PLACES = {
    "torch.ops": type(torch.ops),
    "loader": ExtensionFileLoader,
    "torch": torch,
    "torch._C": torch._C,
    "torch.cuda": torch.cuda,
    "torch.cuda.nvtx": torch.cuda.nvtx,
    "torch.cuda.nccl": torch.cuda.nccl,
    "torch.backends.cudnn": torch.backends.cudnn,
    "torch.storage": torch.storage,
    "torch.autograd": torch.autograd,
    "torch.autograd.graph": torch.autograd.graph,
}


@pytest.fixture
def gpus(runtime):
    """Two virtual GPUs of which nothing is kept for the next test: that is what is shown here."""
    virtual.enable(2, 2 * 2**30)
    yield
    virtual.disable()


def state():
    names = {
        f"{place}.{name}": id(value)
        for place, module in PLACES.items()
        for name, value in vars(module).items()
    }
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key
    return names, {key: sorted(registrations(key)) for key in KEYS}


def on_and_off():
    virtual.enable(2)
    x = torch.ones(3, device="cuda:1", requires_grad=True)
    (x * 2).sum().backward()
    torch.cuda.manual_seed_all(1)
    virtual.disable()


def test_off_leaves_torch_as_it_was():
    (torch.ones(2, requires_grad=True) * 2).sum().backward()
    on_and_off()  # what torch itself loads at the first use stays
    before = state()
    on_and_off()
    assert state() == before
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_a_failure_while_turning_on_leaves_nothing(monkeypatch, runtime):
    on_and_off()
    before = state()
    monkeypatch.setattr(switch, "cpu_kernels", lambda: {"no such operator": print})
    with pytest.raises(RuntimeError):
        virtual.enable(2)
    monkeypatch.undo()
    assert not virtual.enabled()
    assert state() == before
    assert published.read(runtime) == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_torchscript_does_not_fuse_for_a_gpu_meanwhile():
    before = torch._C._jit_can_fuse_on_gpu()
    virtual.enable(1)
    try:
        scripted = torch.jit.script(_twice_and_more)
        x = torch.ones(4, device="cuda")
        for _ in range(4):  # it is fused at the second call
            assert scripted(x).tolist() == _twice_and_more(x).tolist()
        assert not torch._C._jit_can_fuse_on_gpu()
    finally:
        virtual.disable()
    assert torch._C._jit_can_fuse_on_gpu() == before


def _twice_and_more(t: torch.Tensor) -> torch.Tensor:
    return (t * 2).relu() + t.sigmoid()


LIBRARIES = {
    "by torch": lambda: torch.ops.load_library(torch._C.__file__),
    "as a module": lambda: importlib.reload(sys.modules["psutil._psutil_linux"]),
}


@pytest.mark.parametrize("load", LIBRARIES)
def test_operators_of_a_library_that_is_loaded_later(load, gpus):
    library = torch.library.Library("gpumagic_late", "DEF")
    try:
        for name in ("both", "only"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: pytest.fail("the kernel for a real GPU ran"), "CUDA")
        library.impl("both", lambda x: x + 1, "CPU")
        LIBRARIES[load]()
        x = torch.ones(2, device="cuda:1")
        assert torch.ops.gpumagic_late.both(x).tolist() == [2, 2]
        said = (
            r"^virtual GPUs do not support gpumagic_late::only: it has a kernel for real GPUs only"
        )
        with pytest.raises(NotImplementedError, match=said):
            torch.ops.gpumagic_late.only(x)
        virtual.disable()
    finally:
        library._destroy()


def test_on_twice(gpus):
    uuids = [torch.cuda.get_device_properties(i).uuid for i in range(2)]
    virtual.enable(2)
    assert uuids == [torch.cuda.get_device_properties(i).uuid for i in range(2)]
    said = "3 requested, 2 of 2 GiB already on; type .*%gpus --virtual off first"
    with pytest.raises(GpuError, match=said):
        virtual.enable(3)
    assert torch.cuda.device_count() == 2


def test_another_capacity_is_refused_and_the_same_is_none(gpus):
    virtual.enable(2, "2GiB")
    said = "2 of 1 GiB requested, 2 of 2 GiB already on; type .*%gpus --virtual off first"
    with pytest.raises(GpuError, match=said):
        virtual.enable(2, "1GiB")
    assert torch.cuda.get_device_properties(1).total_memory == 2**31


@pytest.mark.parametrize(
    ("host", "number", "each"),
    [(64, 2, 16 * 2**30), (24, 2, 12 * 2**30), (23.5, 2, 11 * 2**30), (1, 2, 2**29)],
)
def test_by_default_they_hold_what_the_host_can(monkeypatch, runtime, host, number, each):
    memory = SimpleNamespace(total=int(host * 2**30))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setenv("GPUMAGIC_CGROUP", "/no/such/folder")
    virtual.enable(number)
    try:
        assert torch.cuda.get_device_properties(1).total_memory == each
    finally:
        virtual.disable()


def test_off_twice_and_on_again(gpus):
    virtual.disable()
    virtual.disable()
    assert not virtual.enabled()
    virtual.enable(8)
    assert torch.ones(2, device="cuda:7").sum().item() == 2


def test_a_tensor_that_outlives_them_raises_and_dies_quietly(gpus):
    x, pinned = torch.ones(3, device="cuda:1"), torch.ones(3).pin_memory()
    virtual.disable()
    for use in ("__neg__", "cpu", "__repr__"):
        with pytest.raises((RuntimeError, AssertionError)):
            getattr(x, use)()
    del x, pinned
    virtual.enable(2)
    assert torch.cuda.memory_allocated(1) == 0


def test_from_another_thread(gpus):
    x = torch.ones(3, device="cuda:1")
    thread = threading.Thread(target=virtual.disable)
    thread.start()
    thread.join()
    assert not virtual.enabled()
    del x


def test_cpu_operators_are_untouched(gpus):
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.device.type == "cpu"
    assert x.detach().numpy().tolist() == [1, 1, 1]
    assert torch.cuda.memory_allocated() == 0


def test_the_state_file_goes(gpus, runtime):
    assert len(published.read(runtime)) == 2
    assert len(list(runtime.iterdir())) == 1
    virtual.disable()
    assert published.read(runtime) == []
    assert list(runtime.iterdir()) == []


def child(code, given=()):
    command = [sys.executable, "-c", code, *given]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_importing_it_imports_no_torch():
    code = (
        "import sys, gpumagic.virtual as v; print(v.enabled(), v.disable(), 'torch' in sys.modules)"
    )
    assert child(code).stdout.split() == ["False", "None", "False"]


LOST = """
import torch
from gpumagic import virtual
virtual.enable(2)
lost, kept = torch.ones(3, device="cuda:1", requires_grad=True), torch.ones(3)
virtual.disable()
for use in (lambda: lost * 2, lambda: torch.nn.functional.linear(kept, lost), lost.sum):
    try:
        use()
    except RuntimeError as error:
        print("CUDA" in str(error) or "cuda" in str(error))
"""


def test_a_parameter_that_was_given_up_is_an_error_and_does_not_end_the_process():
    done = child(LOST)
    assert done.stdout.split() == ["True"] * 3, done.stderr


START = """
import threading, torch
from pathlib import Path
from gpumagic import virtual
from gpumagic.telemetry.state_files import read
"""
LIVE = """
virtual.enable(2)
net = torch.nn.Linear(3, 3).cuda(1)
x = net(torch.ones(2, 3, device="cuda:1"))
cycle = [x]; cycle.append(cycle)
print(len(list(Path(os.environ["GPUMAGIC_RUNTIME_DIR"]).rglob("*.state"))))
"""
FORKED = """
torch.set_num_threads(1)  # others do not live on in a child
virtual.enable(2)
kept = torch.ones(2**20, device="cuda:1")
pid = os.fork()
if not pid:
    del kept
    virtual.disable()
    os._exit(0)
print(os.waitpid(pid, 0)[1], [state.sample.memory_used for state in read()])
"""
PROCESSES = {
    "the end": (LIVE, "1\n"),
    "in a thread": (LIVE + "threading.Thread(target=lambda: x.sum().backward()).start()", "1\n"),
    "off": (LIVE + "virtual.disable()", "1\n"),
    "a forked child does not count": (FORKED, f"0 [0, {20 * 2**20}]\n"),
}
# Each is a fork of one process that has done nothing but import, which is what takes long.
EACH = """
for number, code in enumerate(sys.argv[1:]):
    process = os.fork()
    if not process:
        for to, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), to)
        exec(code)
        break  # and ends as every process does
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), list(Path().rglob("*.state")))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_ends_well_with_live_tensors_and_a_forked_child_does_not_count(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = child(f"import os, sys\n{START}{EACH}", [code for code, _ in PROCESSES.values()])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["0 []"] * len(PROCESSES)
    for number, (_, said) in enumerate(PROCESSES.values()):
        assert Path(f"{number}.out").read_text() == said
        assert Path(f"{number}.err").read_text() == ""


def test_compiling_is_refused_for_a_gpu_alone_and_until_off(runtime, monkeypatch):
    class Backend:
        def __call__(self, model, inputs, **options):
            return "compiled", options

    compiled = ("compiled", {"name": 1})
    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Backend)
    model, here = torch.fx.symbolic_trace(lambda x: x * 2), torch.ones(3)
    virtual.enable(2, 2**30)
    try:
        with pytest.raises(NotImplementedError, match=r"no compiled kernels.*aot_eager"):
            Backend()(model, [here.to("cuda:1")])
        assert Backend()(model, [here], name=1) == compiled
    finally:
        virtual.disable()
    assert Backend()(model, [here], name=1) == compiled
