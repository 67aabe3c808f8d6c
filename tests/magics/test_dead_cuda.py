"""CUDA is dead in this kernel: one line where it was noticed, one at each magic that needs it."""

import json
import re

import pytest
import torch

import gpumagic
from gpumagic import faults
from gpumagic.device import cuda_state
from gpumagic.telemetry import state_files
from gpumagic.telemetry.state_files import state_folder

ASSERT = "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in …"
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
START = """\
X, history = torch.ones(3), [0.5]
net = nn.Linear(3, 3).to("cuda")
z = X.to("cuda")"""
LINE = (
    r"CUDA in this kernel is dead \(device-side assert in In \[3\], line 2 or before\): restart the"
    r" kernel; %%ongpu 0 --check as the cell's first line names the bad index\. On the"
    r" host and safe: X, history; `torch\.save\(dict\(X=X, history=history\), \"rescue\.pt\"\)`"
    r" saves plain data\. Lost: net, z"
)


def fail(*_):
    raise RuntimeError(ASSERT)


@pytest.fixture
def dead(ip, monkeypatch):
    """A cell has failed, and from then on CUDA says so to whoever asks."""
    ip.run(START)
    monkeypatch.setattr(torch.cuda.Stream, "query", fail)
    ip.failed = ip.run(f"h = 1; del h\nraise RuntimeError({ASSERT!r})").text
    yield ip
    monkeypatch.undo()


def test_the_cell_that_failed_has_a_line_below_its_error(dead):
    (line,) = [line for line in dead.failed.splitlines() if line.startswith("→ ")]
    assert re.fullmatch(LINE, line.removeprefix("→ "))
    assert dead.run("1 + 1").text == "Out[4]: 2\n"


@pytest.mark.parametrize(
    "code",
    [
        "%gpumem",
        "%gpumem net",
        "%gpufree",
        "%ongpu home",
        "%ongpu 1",
        "%%ongpu 1\nX + 1",
        "%%ongpu 0,1 --split X\nX + 1",
        "%%ongpu --dry-run 0\nX + 1",
        "%gputime cpu -- X + 1",
        "%%gpufit 0 batch=1..4\nzeros(batch)",
    ],
)
def test_a_magic_that_needs_cuda_says_it_in_one_line(dead, code):
    magic = "%ongpu home" if code == "%ongpu home" else code.split()[0]
    assert re.fullmatch(rf"UsageError: {magic}: {LINE}\n", dead.run(code).text)


def test_cells_on_the_cpu_the_table_and_the_doctor_work(dead):
    assert "cpu · " in dead.run("%%ongpu cpu\nX + 1").text
    assert re.search(r"^CUDA in this kernel is dead \(device-side", dead.run("%gpus").text, re.M)
    doctor = dead.run("%gpus --doctor").text
    assert re.search(r"✗ CUDA +CUDA in this kernel is dead", doctor)
    assert "no internal errors in this kernel" in doctor


def test_calls_of_the_library_raise_it_too(dead):
    for call in (gpumagic.memory, gpumagic.free_memory, lambda: gpumagic.on(1)):
        with pytest.raises(gpumagic.GpuError, match=r"^CUDA in this kernel is dead \(device-side"):
            call()


def test_other_processes_are_told_while_this_one_lives(dead):
    cuda_state.forget()
    (problem,) = state_files.VirtualSource().problems()
    assert re.search(r"kernel of .*process \d+\)? is dead: device-side assert in In", problem.cause)
    assert (
        problem.cure
        == "restart the kernel; %%ongpu 0 --check as the cell's first line names the bad index"
    )
    (file,) = state_folder().glob("*.dead")
    gone = file.with_name("999999999.dead")
    gone.write_text(json.dumps({**json.loads(file.read_text()), "pid": 999999999}))
    file.write_text("{")
    assert state_files.VirtualSource().problems() == []
    assert not gone.exists()


def test_it_is_no_fault_of_ours(dead):
    faults.keep("waiting for a copy", RuntimeError(ASSERT))
    faults.keep("reading memory", cuda_state.CudaDead("CUDA in this kernel is dead"))
    assert faults.all_kept() == []


def test_the_line_that_saves_what_is_on_the_host_works_as_it_stands(dead, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dead.run("lines, net.n = (n for n in X), 1")
    said = dead.run("%%ongpu 0\nX + 1").text
    assert "X, history, lines; `torch.save(dict(X=X, history=history), " in said
    (line,) = re.findall(r"torch\.save\(.+?\"\)", said)
    assert dead.run(line).error is None
    assert torch.load("rescue.pt").keys() == {"X", "history"}


def test_it_is_noticed_at_the_end_of_a_cell_that_did_not_fail(ip, monkeypatch):
    ip.run(START)
    monkeypatch.setattr(torch.cuda.Stream, "query", fail)
    told = [ip.run("1;").text for _ in range(2)]
    monkeypatch.undo()
    assert told[0].startswith("→ CUDA in this kernel is dead (device-side assert in In [3] or bef")
    assert told[1] == ""


def test_the_text_of_an_error_alone_is_not_believed(ip):
    """A rank of a cluster may have raised it, or a library that has caught its own."""
    shown = ip.run(f"z = zeros(3, device='cuda')\nraise RuntimeError({ASSERT!r})").text
    assert "→" not in shown
    assert "In [3]" not in ip.run("%gpumem").text
    faults.keep("something else", RuntimeError(ASSERT))
    assert len(faults.all_kept()) == 1


def test_an_error_that_does_not_stay_has_advice(ip):
    shown = ip.run(f"zeros(3, device='cuda')\nraise RuntimeError({BUSY!r})").text
    assert "→ the GPU is busy or unavailable: another process may have exclusive use of it" in shown
    assert "cuda:0 (virtual) " in ip.run("%%ongpu 0\nzeros(3)").text
