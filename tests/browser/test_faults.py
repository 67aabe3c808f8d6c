"""Each fault of a driver: the panel says its cause and its cure, and recovers by itself."""

import subprocess
import sys

import pytest
from playwright.sync_api import expect

GIB = 2**30
# What is wrong, and what the panel says of it: the cause, and the cure.
FAULTS = {
    # Of these two the cure is that of the first cause, which is the machine's own: often no card.
    "library missing": (12, "NVIDIA's driver is not installed", "No GPU is visible here"),
    "driver not loaded": (9, "installed but not loaded", "No GPU is visible here"),
    "versions differ": (18, "of different versions", "estart the machine"),
    "devices lost by a container": (999, "Unknown Error", "estart the container"),
}
PARTIAL = {
    "a GPU lost": ({"gpu.1.lost": 1}, "fallen off the bus", "dmesg"),
    "a GPU that cannot be opened": ({"gpu.1.lost": 2}, "(NVML 1)", "dmesg"),
    "all fields failing": ({"gpu.1.fail": 999}, "(NVML 1)", "dmesg"),
    "a stall": ({"stall.nvmlDeviceGetUtilizationRates": 20}, "has not answered", "dmesg"),
}
# Of each of the two lists, the faults that the panel draws alike are slow.
RARE = {"driver not loaded", "versions differ", "a GPU that cannot be opened", "all fields failing"}
FIELDS = (
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetFanSpeed",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetTotalEnergyConsumption",
)


@pytest.fixture
def watched(lab, view):
    """A panel that shows two GPUs."""
    lab.machine({"gpu.*.util": 41})
    view.shows("41 %")
    view.shows("H100")
    return view


def recovers(lab, view, cause):
    lab.machine({"gpu.*.util": 42})
    view.shows("42 %")
    view.shows("H100")
    view.hides(cause)
    expect(view.status).not_to_contain_text("⚠")


def some_slow(faults):
    return [pytest.param(fault, marks=[pytest.mark.slow] * (fault in RARE)) for fault in faults]


@pytest.mark.parametrize("fault", some_slow(FAULTS))
def test_a_driver_that_cannot_be_asked(lab, watched, fault):
    code, cause, cure = FAULTS[fault]
    lab.machine({"fail.*": code, "fail.nvmlInitWithFlags": code})
    watched.shows(cause)
    watched.shows(cure)
    # The first failed check, all checks at a press, and virtual GPUs instead.
    checks = watched.panel.locator(".doctor summary")
    expect(checks).to_be_visible()
    checks.evaluate("line => { line.parentElement.open = true; }")
    watched.shows("state files")
    watched.shows("%gpus --virtual 2")
    watched.hides("H100")
    recovers(lab, watched, cause)
    watched.hides("state files")


@pytest.mark.parametrize("fault", some_slow(PARTIAL))
def test_a_gpu_that_does_not_answer(lab, watched, fault):
    machine, cause, cure = PARTIAL[fault]
    lab.machine(machine)
    watched.shows(cause)
    watched.shows(cure)
    watched.shows("cuda:0")
    expect(watched.status).to_contain_text("⚠")
    recovers(lab, watched, cause)


def test_other_gpus_cut_in_parts_that_tell_nothing(lab, watched):
    """Others, for what a GPU does not support is learnt once, and these tests share a server."""
    other = {"gpus": 3, "gpu.0.mig": 2}
    for index in range(3):
        other |= {f"gpu.{index}.uuid": f"GPU-other-{index}", f"gpu.{index}.name": "Other"}
    lab.machine(other)
    watched.shows("Other")
    watched.shows("MIG")
    lab.machine(other | {f"fail.{function}": 3 for function in FIELDS})
    watched.shows("N/A")
    assert "dmesg" not in watched.says()
    expect(watched.status).not_to_contain_text("⚠")
    lab.machine({"gpu.*.util": 44})
    watched.shows("44 %")
    watched.hides("Other")
    watched.hides("MIG")


def test_pids_that_vanish(lab, watched):
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        holders = f"{process.pid}:{3 * GIB},2147483646:{GIB}"
        machine = {"gpu.1.used": 5 * GIB, "gpu.1.compute": holders}
        lab.machine(machine)
        watched.shows("3.0 GiB")
        watched.shows(f"PID {process.pid}")
    # The driver still lists it.
    lab.machine(machine | {"gpu.*.util": 45})
    watched.shows("45 %")
    watched.shows(f"exited (PID {process.pid})")
    lab.machine()
    watched.hides("3.0 GiB")
