"""Build the files that Linux would show on a machine: sysfs, procfs and KFD, as its drivers do.

The layout is that of docs.kernel.org (gpu/amdgpu, gpu/drm-usage-stats, ABI/testing of i915 and xe).
"""

from __future__ import annotations

import os
import plistlib
from collections.abc import Mapping
from pathlib import Path

GIB, MIB = 2**30, 2**20
BOOT = "5f0c8a52-6a0e-4b0e-9a3e-2d9f6c1b7e10"
PCI_IDS = """\
# A comment
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t164e  Raphael
\t744c  Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M]
\t\t1002 0e3b  RX 7900 GRE
8086  Intel Corporation
\t4680  AlderLake-S GT1 [UHD Graphics 770]
\te20b  Battlemage G21 [Arc B580]
"""
AMDGPU_IDS = """\
# List of AMDGPU IDs
1.0.0
744C,\tC8,\tAMD Radeon RX 7900 XTX
744C,\tCC,\tAMD Radeon RX 7900 XT
"""


def write(folder: Path, files: Mapping[str, object]) -> None:
    """Files with these texts; the kernel's end with a line feed."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads meanwhile finds all of it.
        whole = path.with_name(f"{path.name}.new")
        whole.write_text(f"{text}\n")
        whole.replace(path)


def link(path: Path, to: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(to, path.parent))


def machine(root: Path) -> Path:
    """What every machine has."""
    write(root, {"proc/sys/kernel/random/boot_id": BOOT, "usr/share/misc/pci.ids": PCI_IDS})
    write(root, {"usr/share/libdrm/amdgpu.ids": AMDGPU_IDS})
    return root


def card(
    root: Path,
    number: int,
    address: str,
    ids: tuple[str, str],
    driver: str,
    files: Mapping[str, object],
) -> Path:
    """A card of a DRM driver on the PCI bus; gives its folder as a PCI device."""
    device = root / "sys/devices/pci0000:00" / address
    vendor, model = ids
    write(device, {"vendor": vendor, "device": model, "class": "0x030000", **files})
    write(device / f"drm/card{number}", {"dev": f"226:{number}"})
    (device / f"drm/card{number}/device").symlink_to(f"../../../{address}")
    link(device / "driver", root / "sys/bus/pci/drivers" / driver)
    link(root / f"sys/class/drm/card{number}", device / f"drm/card{number}")
    # A connector of the same card has no device of its own.
    write(root / f"sys/class/drm/card{number}-DP-1", {"status": "disconnected"})
    link(root / "sys/bus/pci/devices" / address, device)
    write(root, {f"dev/dri/renderD{128 + number}": "", "sys/module/" + driver + "/refcnt": 1})
    return device


def link_speed(now: str, width: int, most: str = "32.0") -> dict[str, object]:
    return {
        "current_link_speed": f"{now} GT/s PCIe",
        "current_link_width": width,
        "max_link_speed": f"{most} GT/s PCIe",
        "max_link_width": 16,
    }


def mi300x(root: Path, count: int = 8) -> list[Path]:
    """A server with MI300X, ROCm, and KFD's list of the GPUs, which is not in PCI's order."""
    write(machine(root), {"opt/rocm/.info/version": "6.2.4-125", "dev/kfd": ""})
    write(root, {"sys/module/amdgpu/version": "6.8.5"})
    devices = []
    for n in range(count):
        bus = 0x0C + 0x11 * n
        sensors = {
            "name": "amdgpu", "temp2_label": "junction", "temp2_input": 41000 + 1000 * n,
            "temp2_crit": 100000, "temp3_label": "mem", "temp3_input": 36000,
            "power1_label": "PPT", "power1_input": 140_000_000, "power1_cap": 750_000_000,
            "freq1_input": 132_000_000, "freq1_label": "sclk",
            "freq2_input": 900_000_000, "freq2_label": "mclk",
        }  # fmt: skip
        files = {
            "product_name": "AMD Instinct MI300X OAM", "unique_id": f"eb9f1a5c0c3d1e{n:02x}",
            "gpu_busy_percent": 10 * n, "mem_busy_percent": n,
            "mem_info_vram_total": 192 * GIB, "mem_info_vram_used": (n + 1) * GIB,
            "mem_info_gtt_total": 755 * GIB, "mem_info_gtt_used": 16 * MIB,
            "pp_dpm_sclk": "0: 132Mhz *\n1: 2100Mhz", "pp_dpm_mclk": "0: 900Mhz *\n1: 1300Mhz",
            "power/runtime_status": "active", "ras/umc_err_count": f"ue: 0\nce: {n}",
            **link_speed("32.0", 16),
            **{f"hwmon/hwmon{n + 4}/{name}": value for name, value in sensors.items()},
        }  # fmt: skip
        ids = ("0x1002", "0x74a1")
        devices.append(card(root, n + 1, f"0000:{bus:02x}:00.0", ids, "amdgpu", files))
    kfd_node(root, 0, 0, "0000:00:00.0")
    for n in range(count):
        # ROCm's first is PCI's last.
        kfd_node(root, n + 1, 1000 + n, f"0000:{0x0C + 0x11 * (count - 1 - n):02x}:00.0")
    return devices


def kfd_node(root: Path, number: int, gpu_id: int, address: str) -> None:
    bus = int(address[5:7], 16)
    properties = f"cpu_cores_count 0\nsimd_count 1216\nlocation_id {bus << 8}\ndomain 0"
    folder = root / "sys/class/kfd/kfd/topology/nodes" / str(number)
    write(folder, {"gpu_id": gpu_id, "properties": properties})


def kfd_process(root: Path, pid: int, held: Mapping[int, int]) -> None:
    """A process that computes: bytes by KFD's number of the GPU."""
    folder = root / "sys/class/kfd/kfd/proc" / str(pid)
    write(folder, {"pasid": 32771, **{f"vram_{gpu}": count for gpu, count in held.items()}})


def radeon_and_apu(root: Path) -> tuple[Path, Path]:
    """A desktop: Radeon RX 7900 XTX, and the GPU in its Ryzen."""
    machine(root)
    sensors = {
        "name": "amdgpu", "temp1_label": "edge", "temp1_input": 54000, "temp1_crit": 100000,
        "temp2_label": "junction", "temp2_input": 71000, "temp2_crit": 110000,
        "power1_average": 205_000_000, "power1_cap": 327_000_000,
        "fan1_input": 1320, "fan1_max": 3300,
        "freq1_input": 2_365_000_000, "freq2_input": 1_249_000_000,
    }  # fmt: skip
    big = {
        "revision": "0xc8", "unique_id": "35a4f1c2d8e97b60",
        "gpu_busy_percent": 97, "mem_busy_percent": 41,
        "mem_info_vram_total": 24 * GIB, "mem_info_vram_used": 9 * GIB,
        "mem_info_gtt_total": 16 * GIB, "mem_info_gtt_used": GIB,
        "pp_dpm_sclk": "0: 500Mhz\n1: 2365Mhz *\n2: 2526Mhz", "power/runtime_status": "active",
        "pp_dpm_mclk": "0: 96Mhz\n1: 1249Mhz *", **link_speed("16.0", 16, "16.0"),
        **{f"hwmon/hwmon3/{name}": value for name, value in sensors.items()},
    }  # fmt: skip
    small = {
        "gpu_busy_percent": 3, "power/runtime_status": "active",
        "mem_info_vram_total": 512 * MIB, "mem_info_vram_used": 128 * MIB,
        "mem_info_gtt_total": 15 * GIB, "mem_info_gtt_used": 256 * MIB,
        "hwmon/hwmon5/name": "amdgpu", "hwmon/hwmon5/in1_label": "vddnb",
        "hwmon/hwmon5/in1_input": 918, "hwmon/hwmon5/temp1_input": 47000,
        "hwmon/hwmon5/power1_input": 32_000_000, "hwmon/hwmon5/freq1_input": 600_000_000,
    }  # fmt: skip
    return (
        card(root, 1, "0000:03:00.0", ("0x1002", "0x744c"), "amdgpu", big),
        card(root, 0, "0000:11:00.0", ("0x1002", "0x164e"), "amdgpu", small),
    )


def arc(root: Path) -> tuple[Path, Path]:
    """A desktop: Arc B580 with the driver xe, and the GPU in its processor with i915."""
    machine(root)
    gt = "tile0/gt0"
    big = {
        "power/runtime_status": "active", f"{gt}/gtidle/idle_residency_ms": 50_000,
        f"{gt}/freq0/act_freq": 2400, f"{gt}/freq0/max_freq": 2850,
        f"{gt}/freq0/throttle/status": 1, f"{gt}/freq0/throttle/reason_pl1": 1,
        f"{gt}/freq0/throttle/reason_thermal": 0, f"{gt}/freq0/throttle/reason_prochot": 1,
        "hwmon/hwmon2/name": "xe", "hwmon/hwmon2/temp2_label": "pkg",
        "hwmon/hwmon2/temp2_input": 61000, "hwmon/hwmon2/temp3_label": "vram",
        "hwmon/hwmon2/temp3_input": 64000, "hwmon/hwmon2/energy1_input": 90_000_000,
        "hwmon/hwmon2/power1_max": 190_000_000, "hwmon/hwmon2/fan1_input": 1450,
        **link_speed("16.0", 8, "16.0"),
    }  # fmt: skip
    arc_card = card(root, 1, "0000:03:00.0", ("0x8086", "0xe20b"), "xe", big)
    small = card(root, 0, "0000:00:02.0", ("0x8086", "0x4680"), "i915", {})
    gt = "drm/card0/gt/gt0/"
    files = {f"{gt}rc6_residency_ms": 1000, f"{gt}rps_act_freq_mhz": 300}
    write(small, {**files, f"{gt}rps_max_freq_mhz": 1550, "power/runtime_status": "active"})
    return arc_card, small


def opened(root: Path, pid: int, fd: int, address: str, client: int, **lines: object) -> None:
    """A file of a process that is open on a GPU; ``drm_memory_vram="8 MiB"`` is a line of it."""
    told = {"pos": 0, "flags": "02100002", "drm-driver": "a", "drm-pdev": address}
    told |= {"drm-client-id": client} | {n.replace("_", "-"): text for n, text in lines.items()}
    text = "\n".join(f"{key}:\t{value}" for key, value in told.items())
    process = root / "proc" / str(pid)
    write(process / "fdinfo", {str(fd): text})
    target = process / "fd" / str(fd)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.is_symlink():
        target.symlink_to("/dev/dri/renderD128")


def mac(**statistics: object) -> bytes:
    """What ``ioreg -a -r -d 1 -c AGXAccelerator`` prints on an M2 Max, a little shortened."""
    entry = {
        "IOObjectClass": "AGXAcceleratorG14X",
        "IORegistryEntryID": 4294968571,
        "gpu-core-count": 38,
        "model": "Apple M2 Max",
        "PerformanceStatistics": {
            "Alloc system memory": 3 * GIB,
            "In use system memory (driver)": 0,
            "In use system memory": 2 * GIB,
            "Device Utilization %": 34,
            "Renderer Utilization %": 33,
            "Tiler Utilization %": 21,
            **statistics,
        },
    }
    return plistlib.dumps([entry])
