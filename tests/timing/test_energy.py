"""Joules, where every GPU has a counter, and None anywhere else."""

import late as lates
import pytest

from gpumagic.device import CPU, Device
from gpumagic.nvml import Gpu
from gpumagic.timing import compare, measurement
from gpumagic.timing.runner import joules

ONE, TWO = Device("cuda", 0, "GPU-1"), Device("cuda", 1, "GPU-2")


class Door:
    """NVML with counters in millijoules."""

    def __init__(self, **counters):
        self.counters = {f"GPU-{name[1:]}": value for name, value in counters.items()}

    def gpus(self):
        return tuple(Gpu(n, uuid, "a GPU", None, None, n) for n, uuid in enumerate(self.counters))

    def ask(self, gpu, questions, *, alive=False):
        assert list(questions.values()) == [("nvmlDeviceGetTotalEnergyConsumption",)]
        return dict.fromkeys(questions, self.counters[gpu.uuid])


def test_the_joules_of_all_devices_together():
    assert joules([ONE, TWO], Door(n1=5000, n2=100)) == pytest.approx(5.1)


@pytest.mark.parametrize(
    ("devices", "counters"),
    [
        ([ONE], {"n1": None}),
        ([ONE, TWO], {"n1": 5, "n2": None}),
        ([ONE, TWO], {"n1": 5}),
        ([CPU], {"n1": 5}),
        ([Device("cuda", 0, "GPU-1", virtual=True)], {"n1": 5}),
        ([CPU, ONE], {"n1": 5}),
    ],
)
def test_where_one_has_no_counter_it_is_not_known(devices, counters):
    assert joules(devices, Door(**counters)) is None


@pytest.mark.parametrize(
    ("counters", "joules_of_a_run"),
    [([5.0, 8.0], True), ([5.0, 0.1], False), ([5.0, None], False), ([None], False)],
)
def test_a_run_has_joules_unless_a_counter_failed_or_began_anew(
    gpus, monkeypatch, counters, joules_of_a_run
):
    left = list(counters)
    monkeypatch.setattr(measurement, "joules", lambda devices: left.pop(0))
    late = lates.begin()
    space = {"late": lates}
    made = compare("late.work(0.05)", ["cpu"], namespace=space, stopwatch=late.stopwatch)
    (timing,) = made.timings
    assert left == []
    if joules_of_a_run:
        assert 0 < timing.energy < 3.0 / len(timing.seconds)
    else:
        assert timing.energy is None
