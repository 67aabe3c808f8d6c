"""`%gpus` in an IPython shell."""

import inspect
import json
import re

import pytest
from IPython.core.error import UsageError

from gpumagic import device
from gpumagic.telemetry import GpuSample, Snapshot, collect

CAPTION = "RAM"  # each table has one caption, and it names the host's memory


@pytest.fixture
def ip(gpus, shell):
    return shell


def test_the_table_is_shown_once_and_the_value_is_the_snapshot(ip):
    done = ip.run("%gpus")
    assert done.text.count(CAPTION) == 1
    assert isinstance(done.result, Snapshot)
    assert ip.ns["_"] is done.result
    assert ip.run("_").text.count(CAPTION) == 1  # asked for again, it is shown again
    assert [g.ordinal for g in done.result.gpus] == [0, 1]


def test_it_is_shown_wherever_it_stands(ip):
    assert ip.run("%gpus\nx = 1").text.count(CAPTION) == 1
    assert ip.run("if True:\n    %gpus").text.count(CAPTION) == 1
    assert ip.run("%gpus\n%gpus").text.count(CAPTION) == 2
    assert ip.run("snapshot = %gpus\nsnapshot").text.count(CAPTION) == 1
    assert ip.run("snapshot").text.count(CAPTION) == 1
    assert ip.run("import gpumagic; gpumagic.snapshot()").text.count(CAPTION) == 1


def test_one_gpu_and_processes(ip):
    done = ip.run("%gpus 1")
    assert [g.ordinal for g in done.result.gpus] == [1]
    assert "cuda:0" not in done.text
    assert {p.uuid for p in done.result.processes} == {done.result.gpus[0].uuid}
    done = ip.run("%gpus --processes")
    assert "PID" in done.text
    assert json.loads(done.result.to_json())["gpus"][0]["virtual"] is True


def test_one_gpu_of_another_vendor(shell, monkeypatch):
    xpus = [device.Device("xpu", n, f"PCI-0000:0{n}:00.0") for n in (3, 4)]
    gpus = tuple(GpuSample(one.uuid, "Arc", vendor="intel", ordinal=one.ordinal) for one in xpus)
    monkeypatch.setattr(device, "here", lambda **_: xpus)
    monkeypatch.setattr(collect, "snapshot", lambda: Snapshot(0.0, gpus=gpus))
    assert shell.run("%gpus xpu:4").result.gpus == gpus[1:]
    assert shell.run("%gpus 3").result.gpus == gpus[:1]


def test_memory_of_this_kernel(ip):
    ip.run("import torch; held = torch.empty(2**28, dtype=torch.uint8, device='cuda:1')")
    done = ip.run("%gpus")
    assert done.result.gpus[1].memory_used == 2**28
    assert "256 MiB" in done.text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("asked", ["-h", "--help", "help", "1 --help"])
@pytest.mark.parametrize("magic", ["gpus", "ongpu", "gpuwatch", "gputime"])
def test_help_is_what_the_question_mark_shows(shell, magic, asked):
    done = shell.run(f"%{magic} {asked}")
    assert done.success
    help_ = inspect.getdoc(shell.ip.find_line_magic(magic))
    assert done.text == f"{help_}\n"
    assert "Usage::" in help_


@pytest.mark.parametrize("magic", ["ongpu", "gputime"])
def test_a_cell_whose_line_asks_for_help_does_not_run(shell, magic):
    done = shell.run(f"%%{magic} 1 --help\n1 / 0")
    assert done.text == f"{inspect.getdoc(shell.ip.find_line_magic(magic))}\n"


def test_turning_virtual_gpus_on_and_off(shell):
    from gpumagic import virtual

    assert "%gpus --virtual 2" in shell.run("%gpus").text
    assert shell.run("%gpus").text.partition("Out[")[0].count("No GPU") == 1
    done = shell.run("%gpus --virtual 3 --memory 2GiB")
    try:
        assert [g.memory_total for g in done.result.gpus] == [2 * 2**30] * 3
        assert "virtual" in done.text
        assert shell.run("%gpus --virtual 3").success  # again: nothing happens
        assert "off first" in shell.run("%gpus --virtual 2").text
        assert "are off" in shell.run("%gpus --virtual off").text
        assert not virtual.enabled()
        assert "virtual GPUs were not on" in shell.run("%gpus --virtual off").text
    finally:
        virtual.disable()


def test_the_doctor(ip):
    assert "torch" in ip.run("%gpus --doctor").text
    assert "torch" in ip.run("%gpus --doctor\nx = 1").text  # wherever it stands


def test_live_in_a_terminal_is_a_table_and_a_word_about_notebooks(gpus, ip):
    done = ip.run("%gpus --live")
    assert "cuda:1" in done.text
    assert "needs a notebook" in done.text
    assert done.result is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%gpus 0 --live", "--live and 0 do not combine; leave out one of them"),
        ("%gpus --virtual 99", "1 to 8"),
        ("%gpus --virtual 0", "1 to 8"),
        ("%gpus --virtual x", "--virtual x"),
        ("%gpus --virtual", "--virtual"),
        ("%gpus --virtual 2 --memory lots", "lots"),
        ("%gpus --memory 2GiB", "--virtual"),
        ("%gpus 7", "can see; type %gpus --virtual 2 for virtual ones"),
        ("%gpus cpu", "cpu is not a GPU; type %gpus --virtual 2"),
        ("%gpus --nope", "--nope"),
        ("%gpus 1 2", "did you mean 1,2?"),
    ],
)
def test_bad_input_is_one_line(shell, line, says):
    done = shell.run(line)
    assert isinstance(done.error, UsageError)
    assert done.text.startswith("UsageError: %gpus: ")
    assert done.text.count("\n") == 1
    assert says in done.text
    assert re.search("type|leave out|did you mean", done.text)
