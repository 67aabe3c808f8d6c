"""The pytest plugin, in runs of pytest within this one: its options and its marker."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from gpumagic import virtual
from gpumagic.device import Device
from gpumagic.placement import torch_devices

pytest_plugins = ["pytester"]
PLUGIN = ("-p", "gpumagic.pytest_plugin")


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    """Load no other plugin, and keep what a run imports: torch cannot be imported twice."""
    kept = SimpleNamespace(restore=lambda: None)
    take = "_Pytester__take_sys_modules_snapshot"
    monkeypatch.setattr(pytest.Pytester, take, lambda self: kept)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def run(pytester, kept_kernels):
    """Run some tests in this process."""

    def ran(code, *options, **outcomes):
        pytester.makepyfile("import pytest, torch, unittest\n" + code)
        result = pytester.runpytest_inprocess(*PLUGIN, "-rs", "--strict-markers", *options)
        if outcomes:
            result.assert_outcomes(**outcomes)
        assert not virtual.enabled()
        return result.stdout.str() + result.stderr.str()

    return ran


@pytest.fixture
def real(monkeypatch):
    """Make torch see these GPUs."""

    def seen(*gpus):
        monkeypatch.setattr(torch_devices, "devices", lambda **_: list(gpus))

    return seen


def test_it_is_idle_until_it_is_asked(pytester):
    pytester.makepyfile("def test_it(): pass")
    code = "import sys, pytest; assert pytest.main(['-p', 'gpumagic.pytest_plugin']) == 0; "
    code += "print({'torch', 'numpy', 'psutil', 'pynvml'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr


def test_an_option_makes_gpus_before_a_conftest_looks(run, pytester):
    pytester.makeconftest("import torch\nFOUND = torch.cuda.device_count()")
    code = """
from conftest import FOUND
GPUS = torch.cuda.device_count()
def test_it():
    assert GPUS == FOUND == 3
    assert torch.cuda.get_device_properties(2).total_memory == 2**30
"""
    run(code, "--virtual-gpus", "3", "--virtual-gpu-memory=1GiB", passed=1)


def test_the_ini_file_makes_gpus(run, pytester):
    pytester.makeini("[pytest]\nvirtual_gpus = 2\nvirtual_gpu_memory = 512MiB")
    run("def test_it():\n assert torch.cuda.mem_get_info(1)[1] == 2**29", passed=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--virtual-gpus=two"],
            "virtual GPUs: two requested, 1 to 8 are possible; type for example",
        ),
        (["--virtual-gpus=9"], "virtual GPUs: 9 requested, 1 to 8 are possible; type for example"),
        (["--virtual-gpus=1", "--virtual-gpu-memory=much"], "memory cannot be 'much', 1MiB"),
    ],
)
def test_bad_options_are_refused_in_one_line(run, options, said):
    shown = run("def test_it(): pass", *options)
    assert said in shown
    assert "Traceback" not in shown
    assert "%gpus" not in shown


def test_real_gpus_are_used_where_there_are_some(run, real):
    real(Device("cuda", 0, "GPU-1", name="T4", memory_total=15 * 2**30))
    code = """
def test_option():
    assert not torch.cuda.is_available()
@pytest.mark.gpus(1, memory="15GiB")
def test_enough():
    assert not torch.cuda.is_available()
@pytest.mark.gpus(2)
def test_too_few(): assert False
@pytest.mark.gpus(memory="16GiB")
def test_too_small(): assert False
"""
    shown = run(code, "--virtual-gpus=2", passed=2, skipped=2)
    assert "needs 2 GPUs: cuda:0 has 15.0 GiB; set CUDA_VISIBLE_DEVICES=" in shown
    assert "needs 1 GPU of 16GiB: cuda:0 has 15.0 GiB" in shown


def test_a_marked_test_has_virtual_gpus_and_others_have_none(run):
    code = """
KEPT = []
def test_before():
    assert not torch.cuda.is_available()
@pytest.mark.gpus(2, memory="1GiB")
def test_marked():
    KEPT.append(torch.ones(4, device="cuda:1"))
    assert torch.cuda.mem_get_info(1)[1] == 2**30
@pytest.mark.gpus(2, memory="1GiB")
def test_the_same_gpus():
    assert KEPT.pop().sum() == 4
@pytest.mark.gpus
def test_one():
    assert torch.cuda.device_count() == 1
def test_after():
    assert not torch.cuda.is_available()
@pytest.mark.gpus(9)
def test_too_many(): assert False
@pytest.mark.gpus(memory="8 apples")
def test_a_wrong_size(): pass
"""
    shown = run(code, passed=5, skipped=1, errors=1)
    assert "needs 9 GPUs: virtual GPUs: 9 requested, 1 to 8 are possible" in shown
    assert "'8 apples' is not a size; type for example 512MiB" in shown


def test_a_run_with_too_few_virtual_gpus_says_what_to_type(run):
    code = """
@pytest.mark.gpus(1)
def test_few(): assert torch.cuda.device_count() == 2
@pytest.mark.gpus(3)
def test_many(): assert False
"""
    shown = run(code, "--virtual-gpus=2", "--virtual-gpu-memory=1GiB", passed=1, skipped=1)
    assert "needs 3 GPUs: cuda:0 has 1.0 GiB, cuda:1 has 1.0 GiB; type for example" in shown


UNITTEST = """
@pytest.mark.gpus(1)
class TestIt(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.weights = torch.ones(4, device="cuda")

    def test_a(self):
        self.more = self.weights + 1

    def test_b(self):
        assert self.weights.sum() == 4
"""


def test_unittest_classes(run):
    run(UNITTEST, passed=2)


@pytest.mark.slow
def test_xdist(pytester):
    pytester.makepyfile("import pytest, torch, unittest\n" + UNITTEST)
    options = (*PLUGIN, "-p", "xdist", "-n", "1", "--virtual-gpus", "1")
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=2)


def test_nothing_of_this_process_is_left():
    assert not torch.cuda.is_available()


def test_a_mistake_in_a_marker_is_said_in_one_line(run):
    markers = ('gpus(1, mem="8GiB")', 'gpus("two")', 'gpus(1, memory="8 gigs")')
    code = (f"@pytest.mark.{m}\ndef test_{n}(): pass\n" for n, m in enumerate(markers))
    text = run("".join(code), errors=3)
    for said in (
        "keyword argument 'mem'",
        "'two' is not a number of GPUs",
        "'8 gigs' is not a size",
    ):
        assert said in text
    assert "type for example gpus(2, memory=" in text
    assert "gpumagic/pytest_plugin.py" not in text
