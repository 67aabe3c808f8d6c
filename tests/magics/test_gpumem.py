"""`%gpumem`: who holds the memory of the GPUs, shown once, of all, of one, and of a name."""

import gc
import subprocess
import sys
from dataclasses import replace

import pytest


def made(ip):
    gc.collect()  # what other tests left would be a row of its own
    ip.run("%gpus --virtual off\n%gpus --virtual 2 --memory 1GiB")
    ip.run("net = nn.Linear(512, 512, device='cuda:1')\nx = zeros(300, device='cuda:0')")


def test_it_is_shown_once_with_the_largest_first(ip):
    made(ip)
    shown = ip.run("report = %gpumem\nreport").text
    assert shown.count("cuda:1 (virtual): 1.0 MiB of 1.0 GiB allocated") == 1
    assert shown.index("holder") < shown.index("net") < shown.index("parameters")
    assert type(ip.ns["report"]).__name__ == "MemoryReport"
    assert ip.run("before = 1\n%gpumem\nafter = 2").text.count("holder") == 2


def test_of_one_device_and_of_one_name(ip):
    made(ip)
    one = ip.run("%gpumem 1").text
    assert "cuda:1" in one
    assert "cuda:0" not in one
    named = ip.run("%gpumem x net").text
    assert {"x", "net"} <= {line.split()[0] for line in named.splitlines()}
    assert "cuda:0" not in ip.run("%gpumem net cuda:1").text
    ip.run("data = {'x': x}")
    part = ip.run("%gpumem data['x'] net").text
    assert "data['x']  tensor" in part
    assert "also held by" in part
    assert "there is no variable 'dta'; did you mean data?" in ip.run("%gpumem dta net").text


def test_one_name_is_opened(ip):
    made(ip)
    ip.run("data = {'my x': [x]}")
    assert "net: 1.0 MiB on cuda:1" in ip.run("%gpumem net").text
    assert "parameters" in ip.run("opened = %gpumem net").text
    assert type(ip.ns["opened"]).__name__ == "MemoryTree"
    assert "['my x'][0]: 1.5 KiB" in ip.run("%gpumem data['my x'][0]").text
    assert "raises IndexError" in ip.run("%gpumem data['my x'][7]").text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nothing", "there is no variable 'nothing'; %gpus shows what GPUs there are"),
        ("wieghts", "there is no variable 'wieghts'; did you mean weights?"),
        ("weights.0", "weights.0 is neither a variable nor a part of one, such as net or data[0]"),
        ("7", "no GPU 7: there are cuda:0 and cuda:1 (virtual)"),
        ("cpu", "cpu is not a GPU; type 0, 1, or nothing for all of them"),
        ("--sinse", "did you mean --since?"),
        ("weights ip", "there is no variable 'ip'"),
        ("weights 1", "weights holds nothing on cuda:1"),
        ("weights weights.real", "weights and weights.real hold nothing on a GPU"),
    ],
)
def test_what_is_not_there_is_one_line(ip, line, said):
    ip.ns["weights"] = 1
    text = ip.run(f"%gpumem {line}").text.strip()
    assert text.startswith("UsageError: %gpumem: ")
    assert said in text
    assert "\n" not in text


@pytest.mark.parametrize("magic", ["%gpus", "%gpumem", "%gpufree"])
@pytest.mark.parametrize("wrong", ["7", "7?", "cpu"])
def test_an_error_about_a_gpu_offers_what_the_magic_takes(ip, magic, wrong):
    text = ip.run(f"{magic} {wrong}").text.strip()
    offers = text.partition("; type ")[2].removesuffix(", or nothing for all of them").split(", ")
    assert offers == ["0", "1"]
    assert all(ip.run(f"{magic} {offer}").error is None for offer in [*offers, ""])


def test_without_gpus_one_line_says_what_to_type(shell):
    shell.run("import torch")
    shown = shell.run("%gpumem").text
    assert shown.startswith("No GPU in this process; %gpus --virtual 2 makes virtual ones.")


def test_where_torch_can_use_none_the_gpus_are_shown(shell, monkeypatch):
    from gpumagic.telemetry import collect
    from gpumagic.telemetry.snapshot import GpuSample, ProcessSample, Snapshot

    gpu = GpuSample("GPU-0", "H100", 0, 0, memory_total=80 * 2**30, memory_used=30 * 2**30)
    other = ProcessSample("GPU-0", 1, 30 * 2**30, user="grace")
    monkeypatch.setattr(collect, "snapshot", lambda: Snapshot(0.0, gpus=(gpu,), processes=(other,)))
    shell.run("import torch")
    shown = shell.run("%gpumem").text
    assert shown.startswith("torch can use none of these GPUs; %gpus --doctor says why.")
    assert "grace" in shown
    virtual = replace(gpu, name="Virtual GPU", virtual=True)
    theirs = Snapshot(0.0, gpus=(virtual,), processes=(other,))
    monkeypatch.setattr(collect, "snapshot", lambda: theirs)
    assert "these GPUs" not in shell.run("%gpumem").text  # another kernel's are none of ours


def test_without_torch_it_says_so_shows_the_gpus_and_imports_none():
    code = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'gpumagic')\n"
        "shell.run_cell('%gpumem')\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "Neither torch nor JAX is in use here: this notebook has nothing on a GPU."
    assert "No GPU" in done.stdout
    assert lines[-1] == "False"


def test_since_says_what_changed_by_name(ip):
    made(ip)
    first = ip.run("%gpumem --since").text
    assert first.startswith("This is the first %gpumem")
    assert "net" in first
    ip.run("del x\ny = zeros(10**6, device='cuda:1')")
    said = ip.run("%gpumem --since").text
    assert "cuda:1: +3.8 MiB since the last %gpumem" in said
    assert [line.split()[:3] for line in said.splitlines()[3:5]] == [
        ["y", "cuda:1", "+3.8"],
        ["x", "cuda:0", "−1.5"],
    ]
    assert "1 holder unchanged" in said
    assert "unchanged since the last %gpumem" in ip.run("%gpumem --since").text
    assert "--since and net do not combine" in ip.run("%gpumem net --since").text


@pytest.mark.parametrize("words", ["--since --record on", "x --record off"])
def test_record_stands_on_a_line_of_its_own(ip, words):
    said = ip.run(f"%gpumem {words}").text
    assert said.startswith("UsageError: %gpumem: --record ")
    assert "leave out" in said
    assert said.count("\n") == 1


def test_as_much_in_all_is_told_where_names_changed(ip):
    ip.run("x = torch.zeros(1000, device='cuda')")
    ip.run("%gpumem")
    ip.run("del x\ny = torch.zeros(500, device='cuda')\nz = torch.zeros(500, device='cuda')")
    said = ip.run("%gpumem --since").text
    assert said.startswith("the total is unchanged since the last %gpumem\n")
    assert "−4.0 KiB" in said


def test_once_it_was_shown_a_comparison_still_replaces_its_progress_line(ip):
    from IPython.core.formatters import format_display_data

    ip.run("%gpumem")
    ip.run("%%gputime cpu -o made --quiet --max-time 0.01\n1 + 1")
    assert "text/plain" in format_display_data(ip.ns["made"])[0]
