"""Joules, where every GPU has a counter, and None anywhere else."""

import pytest

from gpumagic.device import CPU, Device
from gpumagic.nvml import Gpu
from gpumagic.timing.measure.energy import EnergyMeter

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
    door = Door(n1=5000, n2=100)
    meter = EnergyMeter([ONE, TWO], door)
    assert meter.supported
    meter.start()
    door.counters = {"GPU-1": 7500, "GPU-2": 1100}
    assert meter.joules() == pytest.approx(3.5)


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
    meter = EnergyMeter(devices, Door(**counters))
    meter.start()
    assert not meter.supported
    assert meter.joules() is None


def test_a_driver_that_was_loaded_anew_is_no_negative_energy():
    door = Door(n1=5000)
    meter = EnergyMeter([ONE], door)
    meter.start()
    door.counters = {"GPU-1": 10}
    assert meter.joules() is None
