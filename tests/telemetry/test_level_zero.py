"""The memory of Intel's GPUs by Level Zero, whose module is a stand-in here."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_int32, c_uint32, c_uint64, c_void_p, cast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machines import GIB, arc

from gpumagic.telemetry import Host
from gpumagic.telemetry.level_zero import LevelZero
from gpumagic.telemetry.other_vendors import IntelSource


class Address(Structure):
    _fields_ = [(name, c_uint32) for name in ("domain", "bus", "device", "function")]


class Pci(Structure):
    _fields_ = [("stype", c_int32), ("pNext", c_void_p), ("address", Address)]


class State(Structure):
    _fields_ = [
        ("stype", c_int32),
        ("pNext", c_void_p),
        ("health", c_int32),
        ("free", c_uint64),
        ("size", c_uint64),
    ]


class Handle(c_void_p):
    pass


def zes(fails: str = "") -> Any:
    """As pyzes 0.1.3: a driver, a device at 0000:03:00.0, two modules of 6 GiB, 1 and 2 used."""

    def listed(name: str, *values: int) -> Any:
        def ask(*arguments: Any) -> int:
            *_, count, found = arguments
            if name == fails:
                return 0x78000003
            count = cast(count, POINTER(c_uint32)).contents
            for n in range(count.value if found is not None else 0):
                found[n] = Handle(values[n])
            count.value = len(values)
            return 0

        return ask

    def pci(device: Handle, told: Any) -> int:
        told = cast(told, POINTER(Pci)).contents
        assert (device.value, told.stype) == (21, 2)
        told.address.bus = 3
        return int(fails == "pci")

    def state(module: Handle, told: Any) -> int:
        told = cast(told, POINTER(State)).contents
        assert told.stype == 0x1E
        told.size, told.free = 6 * GIB, (5 if module.value == 31 else 4) * GIB
        return int(fails == "state" and module.value == 32)

    return SimpleNamespace(
        zesInit=lambda flags: int(fails == "init"),
        zesDriverGet=listed("driver", 11),
        zesDeviceGet=listed("device", 21),
        zesDeviceEnumMemoryModules=listed("memory", 31, 32),
        zesDevicePciGetProperties=pci,
        zesMemoryGetState=state,
        zes_driver_handle_t=Handle,
        zes_device_handle_t=Handle,
        zes_mem_handle_t=Handle,
        zes_pci_properties_t=Pci,
        zes_mem_state_t=State,
        ZES_STRUCTURE_TYPE_PCI_PROPERTIES=2,
        ZES_STRUCTURE_TYPE_MEM_STATE=0x1E,
    )


def test_the_memory_of_all_modules_of_a_gpu() -> None:
    told = LevelZero(zes)
    assert told.memory("0000:03:00.0") == (12 * GIB, 3 * GIB)
    assert told.memory("0000:04:00.0") is None


def test_an_arc_has_it(tmp_path: Path) -> None:
    arc(tmp_path)
    source = IntelSource(tmp_path, integrated=False, level_zero=LevelZero(zes))
    (gpu,) = source.gpus(Host())
    assert (gpu.memory_total, gpu.memory_used) == (12 * GIB, 3 * GIB)


@pytest.mark.parametrize("fails", ["init", "driver", "device", "pci", "memory", "state"])
def test_what_it_does_not_tell_is_not_known(fails: str) -> None:
    assert LevelZero(lambda: zes(fails)).memory("0000:03:00.0") is None


@pytest.mark.parametrize("error", [ImportError, OSError, AttributeError, KeyError])
def test_a_module_without_its_loader(error: type[Exception]) -> None:
    def load() -> Any:
        raise error("libze_loader.so.1: cannot open shared object file")

    assert LevelZero(load).memory("0000:03:00.0") is None
