"""Faults of CUDA, each in a real kernel on the stand-in CUDA runtime: what every magic then says.

No fault may end the kernel, hang it, or show frames of gpumagic's.
"""

import re
import time

import pytest
import torch
from kernels import Kernel, text
from ours import OURS

from gpumagic.telemetry import state_files

pytestmark = pytest.mark.filterwarnings("ignore")

START = """\
%load_ext gpumagic
import gc, os, torch, standin_cuda, warnings
warnings.filterwarnings("ignore", "uncheckedSetDevice")  # torch's own, of the same error
X, history = torch.randn(40, 30), [0.5]
net = torch.nn.Linear(30, 4).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
z, event = X.cuda(), torch.cuda.Event()
event.record()"""
# What needs CUDA, by the magic that its line of error begins with.
NEEDS_CUDA = [
    "%gpumem",
    "%gpumem net",
    "%gpumem --since",
    "%gpufree",
    "%gpufree z",
    "%ongpu home",
    "%ongpu 0",
    "%%ongpu 0\nx = torch.ones(3)",
    "%%ongpu 1 --back\nX + 1",
    "%%ongpu cpu\nz + 1",
    "%%ongpu 0,1 --split X\nX + 1",
    "%%ongpu 0 --memory\nX + 1",
    "%%ongpu --dry-run 0\nX + 1",
    "%gputime cpu 0 -- X + 1",
    "%%gputime 0\nX + 1",
    "%%gpufit 0 batch=1..4\ntorch.ones(batch)",
]
STAYS = {
    710: "device-side assert",
    700: "illegal memory access",
    214: "uncorrectable ECC error",
    702: "launch timed out",
}
DEAD = re.compile(
    r"CUDA in this kernel is dead \((.+)\): (restart the .+)\. On the host and safe: "
    r'X, history(?:, \w+)?; `torch\.save\(dict\(.+\), "rescue\.pt"\)` saves plain data\. '
    r"Lost: net, optimizer, z, event"
)


class Notebook(Kernel):
    """A kernel, and the text of what each of its cells shows."""

    def __init__(self, folder, **env):
        machine = folder / "machine"
        machine.write_text("gpus=2\ngpu.*.total=17179869184\n")
        self.folder = folder
        env = {"STAND_IN_NVML": str(machine), "GPUMAGIC_RUNTIME_DIR": str(folder)} | env
        super().__init__(**env)
        assert self.cell(START) == ""
        self.pid = int(self.cell("os.getpid()"))

    def cell(self, code):
        found, _ = self.run(code)
        frames = [line for kind, said in found if kind == "error" for line in said["traceback"]]
        assert not [line for line in frames if OURS in line], frames
        shown = text(found)
        assert "gpumagic failed" not in shown
        return shown

    def line(self, code):
        """The line that is all that a cell shows."""
        shown = self.cell(code)
        assert shown.count("\n") == 1, shown
        return shown.rstrip()


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    started = []

    def start(**env):
        started.append(Notebook(tmp_path, **env))
        return started[-1]

    monkeypatch.setenv("GPUMAGIC_RUNTIME_DIR", str(tmp_path))
    yield start
    for one in started:
        try:
            assert int(one.cell("os.getpid()")) == one.pid
        finally:
            one.stop()


@pytest.fixture(scope="module")
def alive(tmp_path_factory):
    """A kernel for faults after which CUDA works."""
    kernel = Notebook(tmp_path_factory.mktemp("alive"))
    yield kernel
    kernel.stop()


def explained(shown, what):
    """The line that tells of the death, in what a cell has shown: once."""
    (line,) = [line for line in shown.splitlines() if line.startswith("→ ")]
    found = DEAD.fullmatch(line.removeprefix("→ "))
    assert found, line
    assert found[1].startswith(what)
    return found


@pytest.mark.parametrize("error", STAYS)
def test_an_error_that_stays(notebook, error):
    kernel, what = notebook(), STAYS[error]
    shown = kernel.cell(f"%%ongpu 0\ny = z + 1\ndel y\nstandin_cuda.plant({error})\nz + 1")
    assert shown.count("CUDA error: ") == 1
    assert explained(shown, what)[1] == f"{what} in In [3], line 5 or before"
    assert re.search(r"^cuda:0 · AcceleratorError after [^·]+( · peak [^·]+)?$", shown, re.M)
    assert kernel.cell("1 + 1") == "2\n"
    for code in NEEDS_CUDA:
        magic = code.split()[0]
        magic = "%ongpu home" if code == "%ongpu home" else magic
        line = kernel.line(code)
        assert line.startswith(f"UsageError: {magic}: "), line
        assert DEAD.fullmatch(line.removeprefix(f"UsageError: {magic}: ")), line
    explained(kernel.cell("z.sum().item()"), what)
    assert kernel.cell("%%ongpu cpu\nfloat((X * 0).sum())").startswith("0.0\ncpu · ")
    assert f"CUDA in this kernel is dead ({what} in" in kernel.cell("%gpus")
    doctor = kernel.cell("%gpus --doctor")
    assert re.search(r"✗ CUDA +CUDA in this kernel is dead", doctor)
    assert "no internal errors in this kernel" in doctor
    kernel.cell("%gpuwatch on")
    assert kernel.cell("X.shape[0]") == "40\n"
    (problem,) = state_files.VirtualSource().problems()  # as a Jupyter server reads it
    assert f"process {kernel.pid}" in problem.cause
    assert problem.cure.startswith("restart the kernel")


def test_what_is_on_the_host_can_be_saved(notebook):
    """The error is between two lines, and no call of CUDA's follows: the cell's end notices it."""
    kernel = notebook()
    kernel.cell(f"import os; os.chdir({str(kernel.folder)!r})\nlock = (n for n in X)")
    kernel.cell("class Kept:\n    def __init__(self): self.x = X\nkept, both = Kept(), [X, z]")
    kernel.cell("torch.save(net.state_dict(), 'net.pt')")
    line = kernel.line("standin_cuda.plant(710)\nmore = 2")
    assert line.startswith("→ CUDA in this kernel is dead (device-side assert in In [6] or before)")
    assert re.search(r"Lost: net, optimizer, z, event and 1", line)
    assert "torch.save(dict(X=X, history=history, more=more)" in line
    assert kernel.cell(re.search(r"torch\.save\(.+?\"\)", line)[0]) == ""
    found = torch.load(kernel.folder / "rescue.pt")
    assert (found["X"].shape, found["history"], found["more"]) == ((40, 30), [0.5], 2)


def test_an_error_between_two_lines_of_a_placed_cell(notebook):
    kernel = notebook()
    report, line = kernel.cell("%%ongpu 0\nstandin_cuda.plant(710)\nb = 2").splitlines()
    assert "the device reports: CUDA error: device-side assert triggered" in report
    assert line.startswith("→ CUDA in this kernel is dead (device-side assert in In [3] or before)")
    assert kernel.cell("1 + 1") == "2\n"


def test_a_magic_that_is_the_first_to_meet_it(notebook):
    kernel = notebook()
    # Two streams, which a kernel sends in any order.
    shown = kernel.cell("standin_cuda.plant(702)\n%gputime 0 -- X + 1")
    line, again = sorted(shown.splitlines())
    assert line.startswith("UsageError: %gputime: CUDA in this kernel is dead (launch timed out")
    assert again.startswith("→ CUDA in this kernel is dead")


def test_a_timed_cell_that_ends_it(notebook):
    """The events of its stopwatch are in the traceback, the code's own are garbage: to destroy one
    of them would end the kernel."""
    kernel = notebook()
    kernel.cell("n = 0; gc.disable()")
    code = "loop = [torch.cuda.Event()]; loop[0].record(); loop.append(loop)\nn += 1"
    shown = kernel.cell(f"%%gputime 0\n{code}\nif n > 5: standin_cuda.plant(702)\n(z + 1).sum()")
    explained(shown, "launch timed out in In [4], line ")
    assert kernel.cell("1 / 0").startswith("ZeroDivisionError")  # the traceback goes


def test_a_copy_that_ends_it(notebook):
    """The event before a timed copy is of the ledger's."""
    kernel = notebook()
    kernel.cell("%gpuwatch on")
    shown = kernel.cell("X.cuda(); h = z.cpu(); del h\nstandin_cuda.plant(214)\nz.cpu()")
    explained(shown, "uncorrectable ECC error in In [4], line 3")
    assert kernel.cell("1 / 0").startswith("ZeroDivisionError")
    assert kernel.cell("gc.collect() >= 0") == "True\n"


def test_a_gpu_that_is_lost(notebook):
    kernel = notebook()
    shown = kernel.cell("%%ongpu 0\nstandin_cuda.lose(0)\nz + 1")
    found = explained(shown, "GPU lost in In [3], line 3 or before")
    assert found[2] == "restart the machine (sudo dmesg shows Xid 79)"
    assert "CUDA in this kernel is dead (GPU lost" in kernel.line("%gpumem")
    assert "CUDA in this kernel is dead (GPU lost" in kernel.line("%%ongpu 1\nX + 1")
    shown = kernel.cell("%gpus")
    assert "has fallen off the bus" in shown
    assert "CUDA in this kernel is dead (GPU lost" in shown


def test_less_memory_than_nvml_says(notebook):
    kernel = notebook(STANDIN_CUDA_MEMORY="1024")
    shown = kernel.cell("%%ongpu 0\nbig = torch.empty(2**29)")
    why = "this process may have 1.0 GiB of the 16.0 GiB that cuda:0 has, by a limit of MPS, of its"
    assert f"why: {why}" in re.sub(r"\s+", " ", shown)
    assert "set_per_process_memory_fraction" not in shown
    assert kernel.cell("float((z * 0).sum())") == "0.0\n"


def test_an_error_that_passes(alive):
    kernel = alive
    kernel.cell("standin_cuda.plant(46)")
    shown = kernel.cell("z + 1")
    assert shown.count("CUDA error: ") == 1
    assert "→ the GPU is busy or unavailable: another process may have exclusive use of it" in shown
    kernel.cell("standin_cuda.mend()")
    assert kernel.cell("%%ongpu 0\nfloat((z * 0).sum())").startswith("0.0\ncuda:0 · ")
    assert "z  " in kernel.cell("%gpumem")
    kernel.cell("standin_cuda.plant(46)")
    line = kernel.line("%gputime 0 -- X + 1")
    assert line.startswith("UsageError: %gputime: the GPU is busy or unavailable")


def test_a_slow_allocation_is_waited_for(alive):
    kernel = alive
    kernel.cell("standin_cuda.slow(malloc_ms=400)")
    start = time.monotonic()
    shown = kernel.cell("%%ongpu 0\nbig = torch.empty(2**26)")
    assert time.monotonic() - start > 0.4
    assert re.fullmatch(r"cuda:0 · \d\d\d ms · peak 25\d MiB\n", shown)
    kernel.cell("standin_cuda.slow(); del big; torch.cuda.empty_cache()")


def test_cublas_workspace_has_a_name_and_is_given_back(alive):
    kernel = alive
    kernel.cell("del net, optimizer; z = z @ z.T")
    assert re.search(r"held by cuBLAS or C\+\+ code +32\.0 MiB", kernel.cell("%gpumem"))
    freed = kernel.line("%gpufree")
    assert freed.startswith("freed 32.0 MiB (cuBLAS workspace: 32.0 MiB on cuda:0) · ")
    assert "cuBLAS" not in kernel.cell("%gpumem")
    assert kernel.cell("(z @ z).shape[0]") == "40\n"


def test_torchs_gpus_have_rows_where_nvml_is_missing(alive):
    kernel = alive
    kernel.cell(
        "import pynvml\nfrom gpumagic import nvml\n"
        "def missing(*_): raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)\n"
        "pynvml.nvmlDeviceGetCount = pynvml.nvmlInitWithFlags = missing; nvml.shared_nvml().retry()"
    )
    shown = kernel.cell("%gpus")
    assert re.search(r"cuda:0 +Stand-in H100 .* \d\.\d / 16\.0 GiB", shown)
    assert re.search(r"cuda:1 +Stand-in H100 .* N/A / 16\.0 GiB", shown)
    assert "NVML is missing: only the names and memory" in shown
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in shown
    assert kernel.cell("%%ongpu 1\nX.shape[0]").startswith("40\ncuda:1 · ")
    assert kernel.cell("%%ongpu free\nX.shape[0]").startswith("40\ncuda:")
