"""The pytest plugin, in runs of pytest within this one: its options, its marker, its fixtures."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from gpumagic import virtual
from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.placement import torch_devices
from gpumagic.pytest_plugin import Bytes

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

    @pytest.fixture(autouse=True)
    def _fixtures(self, gpu_memory, gpu_ledger):
        self.memory, self.ledger = gpu_memory, gpu_ledger

    def test_a(self):
        self.more = self.weights + 1
        assert self.memory.peak(0) == 1024
        assert not self.ledger.implicit

    def test_b(self):
        if self.weights.sum() > 3:
            assert "line 19" in self.ledger.implicit
"""


def test_unittest_classes(run):
    run(UNITTEST, passed=2)


@pytest.mark.slow
def test_xdist(pytester):
    pytester.makepyfile("import pytest, torch, unittest\n" + UNITTEST)
    options = (*PLUGIN, "-p", "xdist", "-n", "1", "--virtual-gpus", "1")
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=2)


def test_code_that_begins_to_wait_fails_with_its_line(run):
    code = """
@pytest.mark.gpus(1)
def test_good(gpu_ledger):
    x = torch.ones(4, device="cuda")
    x.sum().cpu()
    assert not gpu_ledger.implicit
    assert gpu_ledger.watch.ledger.transfers == 1
@pytest.mark.gpus(1)
def test_bad(gpu_ledger):
    x = torch.ones(4, device="cuda")
    for _ in range(3):
        x.sum().item()
    assert not gpu_ledger.implicit
"""
    shown = run(code, passed=1, failed=1)
    assert "assert not '3 waits at" in shown
    assert "line 13: `x.sum().item()`'" in shown
    assert "- implicit copies and waits -" in shown
    assert "waits for cuda:0 (item, implicit)" in shown


def test_memory_has_a_limit(run):
    code = """
@pytest.mark.gpus(2)
def test_good(gpu_memory):
    for _ in range(3):
        torch.ones(2**20, device="cuda:1")
    assert gpu_memory.peak("cuda:0") == 0
    assert gpu_memory.peak("cuda:1") == "4MiB"
    assert "5MiB" > gpu_memory.peak(1) < "1GiB"
@pytest.mark.gpus(2)
def test_bad(gpu_memory):
    x = torch.ones(2**20, device="cuda:1")
    assert gpu_memory.peak("cuda:1") < "1MiB"
"""
    shown = run(code, passed=1, failed=1)
    assert "assert 4.0 MiB < '1MiB'" in shown
    assert "the test leaves" not in shown  # the failed test's traceback holds x


def test_a_leak_fails_with_its_holder(run):
    code = """
KEPT = []
@pytest.fixture
def batch(gpu_memory):
    return torch.ones(4, device="cuda")
@pytest.mark.gpus(1)
def test_good(batch, gpu_memory):
    graph = torch.ones(4, device="cuda")
@pytest.mark.gpus(1)
def test_bad(gpu_memory):
    KEPT.append(torch.ones(2**20, device="cuda"))
@pytest.mark.gpus(1)
def test_allowed(gpu_memory):
    gpu_memory.may_leave = "4MiB"
    KEPT.append(torch.ones(2**20, device="cuda"))
"""
    shown = run(code, passed=3, errors=1)
    assert shown.count("the test leaves 4.0 MiB on cuda:0") == 1
    assert "holds 4.0 MiB, allocated in " in shown
    assert "line 12" in shown


def test_bytes_compare_with_texts_and_numbers():
    half = Bytes("512MiB")
    assert half == 2**29 == half
    assert half == "0.5 GiB"
    assert half != "1GiB"
    assert "1GiB" >= half > 5
    assert {half} == {2**29}
    assert half == pytest.approx(2**29 + 1, rel=0.1)
    assert half not in (None, [half])
    with pytest.raises(GpuError, match="not a size"):
        assert half < "8 gigs"
    assert 1.5 < half < math.inf
    assert repr(half) == "512 MiB"


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
