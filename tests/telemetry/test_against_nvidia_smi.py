"""The check of NVML's fields against nvidia-smi, by a machine that plays both."""

from __future__ import annotations

from typing import Any

import pytest
from hardware import nvidia_smi
from snapshots import snapshot_in

MIB = 2**20
MACHINE: dict[str, object] = {
    "gpus": 1,
    "gpu.0.used": 30_000 * MIB,
    "gpu.0.reserved": 600 * MIB,
    "gpu.0.util": 73,
    "gpu.0.memutil": 21,
    "gpu.0.temp": 61,
    "gpu.0.power": 412_500,
    "gpu.0.clock": 1755,
    "gpu.0.throttle": 0x4 | 0x40,
    "gpu.0.fan": 55,
    "gpu.0.pcie_gen": 4,
    "gpu.0.pcie_width": 8,
    "gpu.0.ecc_corrected": 2,
    "gpu.0.compute": f"4242:{1000 * MIB}",
}
# As nvidia-smi -q -x of driver 580 has it, what we do not read left out.
SAID = """<?xml version="1.0" ?>
<nvidia_smi_log><gpu id="00000000:01:00.0">
<product_name>NVIDIA H100 80GB HBM3</product_name>
<uuid>GPU-abc00000-0000-4000-8000-000000000000</uuid>
<fan_speed>55 %</fan_speed>
<pci><pci_gpu_link_info>
<pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>4</current_link_gen></pcie_gen>
<link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width>
</link_widths></pci_gpu_link_info></pci>
<clocks_event_reasons>
<clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
<clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
</clocks_event_reasons>
<fb_memory_usage><total>81920 MiB</total><reserved>600 MiB</reserved><used>30000 MiB</used>
</fb_memory_usage>
<utilization><gpu_util>73 %</gpu_util><memory_util>21 %</memory_util></utilization>
<ecc_errors><volatile><sram_correctable>0</sram_correctable>
<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<dram_correctable>2</dram_correctable><dram_uncorrectable>0</dram_uncorrectable>
</volatile></ecc_errors>
<temperature><gpu_temp>61 C</gpu_temp>
<gpu_temp_slow_threshold>87 C</gpu_temp_slow_threshold></temperature>
<gpu_power_readings><average_power_draw>412.50 W</average_power_draw>
<instant_power_draw>398.10 W</instant_power_draw>
<current_power_limit>700.00 W</current_power_limit></gpu_power_readings>
<clocks><sm_clock>1755 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></clocks>
<max_clocks><sm_clock>1980 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></max_clocks>
<processes><process_info><pid>4242</pid><type>C</type><used_memory>1000 MiB</used_memory>
</process_info></processes>
</gpu></nvidia_smi_log>
"""


@pytest.fixture
def wrong(stand_in: Any) -> Any:
    """Which fields differ between a machine and what nvidia-smi says."""

    def compared(said: str = SAID, **changes: object) -> list[str]:
        machine = MACHINE | {key.replace("__", "."): value for key, value in changes.items()}
        program = "from gpumagic import snapshot\nprint(snapshot().to_json())"
        snapshot = snapshot_in(stand_in.run(program, machine))
        (sample,) = snapshot.gpus
        gpu = nvidia_smi.by_uuid(said)[sample.uuid]
        rows = [
            *nvidia_smi.smi_rows(sample, gpu),
            *nvidia_smi.process_rows(snapshot.processes, gpu),
        ]
        assert len(rows) == 23
        return [row.what for row in rows if row.ok is not True]

    return compared


def test_every_field_agrees(wrong: Any) -> None:
    assert wrong() == []


def test_a_planted_tenth_is_found(wrong: Any) -> None:
    assert wrong(gpu__0__power=453_750) == ["power"]
    assert wrong(gpu__0__used=27_000 * MIB, gpu__0__clock=1930) == ["memory_used", "sm_clock"]
    assert wrong(gpu__0__reserved=660 * MIB, gpu__0__temp=67) == ["memory_reserved", "temperature"]
    assert wrong(gpu__0__compute=f"4242:{1100 * MIB}") == ["memory of a process"]


def test_what_is_not_known_is_no_number_and_none_of_it_is_zero(wrong: Any) -> None:
    assert wrong(fail__nvmlDeviceGetPowerUsage=3) == ["power"]
    assert wrong(SAID.replace("55 %</fan", "N/A</fan")) == ["fan"]
    assert wrong(SAID.replace("412.50 W</average", "N/A</average")) == []  # the next line says it
    assert wrong(SAID.replace(">2</dram_c", ">3</dram_c")) == ["ecc_corrected"]


def test_a_field_that_nvidia_smi_lacks_is_skipped_with_its_reason() -> None:
    sample = snapshot_in({"time": 0, "gpus": [{"uuid": "GPU-1"}]}).gpus[0]
    gpu = nvidia_smi.by_uuid("<log><gpu><uuid>GPU-1</uuid></gpu></log>")["GPU-1"]
    rows = {row.what: row for row in nvidia_smi.smi_rows(sample, gpu)}
    assert rows["power"].ok is None
    assert rows["power"].note == "this nvidia-smi has no such line"
