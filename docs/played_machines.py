"""Play machines for the pictures: what their GPUs read, second by second."""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from machines import kfd_process, mi300x, write

GIB = 2**30
CARD = "NVIDIA H100 80GB HBM3"


def training(train: int, explore: int, other: int) -> Callable[[float], dict[str, object]]:
    """Two GPUs: one that trains hard and grows hot, one that is hardly used."""

    def machine(now: float) -> dict[str, object]:
        epoch = 0 <= now % 13 < 9.6
        busy = (94 + 4 * math.sin(3 * now)) if epoch else 38 + 8 * math.sin(5 * now)
        held = int((18 + min(now, 26) * 0.65 + (1.5 if epoch else 0)) * GIB)
        idle = 14 + 10 * math.sin(now / 2) + 8 * math.sin(1.7 * now)
        hot = {
            "util": int(busy),
            "memutil": int(busy * 0.6),
            "temp": 71 if epoch else 62,
            "power": (1000 * (560 if epoch else 210)),
            "clock": 1755,
            "used": held,
            "throttle": 4,
        }
        cool = {
            "util": max(0, int(idle)),
            "memutil": 4,
            "temp": 41,
            "power": 118_000,
            "clock": 1200,
            "used": int(30.4 * GIB),
            "throttle": 0,
        }
        return {
            "gpus": 2,
            "gpu.*.name": CARD, "gpu.*.total": 80 * GIB, "gpu.*.reserved": 640 * 2**20,
            "gpu.*.limit": 700_000, "gpu.*.pcie_gen": 5, "gpu.*.pcie_width": 16,
            **{f"gpu.0.{key}": value for key, value in cool.items()},
            **{f"gpu.1.{key}": value for key, value in hot.items()},
            "gpu.0.compute": f"{explore}:{6 * GIB + 300 * 2**20},{other}:{22 * GIB}",
            "gpu.1.compute": f"{train}:{held - 500 * 2**20}",
            "gpu.0.busy": f"{other}:{cool['util']}",
            "gpu.1.busy": f"{train}:{hot['util']}",
        }  # fmt: skip

    return machine


def two_cards(pids: Mapping[str, int]) -> Callable[[float], dict[str, object]]:
    """A machine with two cards: somebody else has most of the first; the second one trains."""

    def machine(now: float) -> dict[str, object]:
        busy = int(91 + 5 * math.sin(3 * now)) if now > 4 else 3
        idle = int(24 + 9 * math.sin(now))
        train, explore, other = (pids.get(name, 1) for name in ("train", "explore", "other"))
        held = int(min(now * 0.7, 2.6) * GIB)
        return {
            "gpus": 2, "gpu.*.name": "NVIDIA GeForce RTX 4070", "gpu.*.total": 12 * GIB,
            "gpu.*.reserved": 300 * 2**20, "gpu.*.limit": 200_000,
            "gpu.0.util": idle, "gpu.0.temp": 52, "gpu.0.power": 1000 * (60 + idle),
            "gpu.0.used": int(8.9 * GIB), "gpu.0.clock": 1900,
            "gpu.0.compute": f"{explore}:{650 * 2**20},{other}:{8 * GIB}",
            "gpu.1.util": busy, "gpu.1.temp": 71, "gpu.1.power": 1000 * (90 + busy),
            "gpu.1.used": held + 500 * 2**20, "gpu.1.clock": 2475,
            "gpu.1.compute": f"{train}:{held + 200 * 2**20}",
            "gpu.1.busy": f"{train}:{busy}", "gpu.0.busy": f"{other}:{idle}",
        }  # fmt: skip

    return machine


def workstation(other: int) -> Callable[[float], dict[str, object]]:
    """One GPU, of which somebody else uses a little."""

    def machine(now: float) -> dict[str, object]:
        busy = max(0, int(9 + 7 * math.sin(now) + 5 * math.sin(2.3 * now)))
        return {
            "gpus": 1, "gpu.0.name": "NVIDIA RTX 6000 Ada Generation", "gpu.0.total": 48 * GIB,
            "gpu.0.reserved": 400 * 2**20, "gpu.0.limit": 300_000, "gpu.0.util": busy,
            "gpu.0.used": int(6.2 * GIB), "gpu.0.temp": 44, "gpu.0.power": 1000 * (60 + 2 * busy),
            "gpu.0.compute": f"{other}:{6 * GIB}",
        }  # fmt: skip

    return machine


def many(count: int, pids: Mapping[str, int]) -> Callable[[float], dict[str, object]]:
    """So many GPUs: this notebook's, another notebook's, others', full ones and free ones."""
    own = min(3, count - 1)

    def machine(now: float) -> dict[str, object]:
        found: dict[str, object] = {
            "gpus": count, "gpu.*.name": CARD, "gpu.*.total": 80 * GIB, "gpu.*.limit": 700_000,
            "gpu.*.reserved": 640 * 2**20,
        }  # fmt: skip
        for n in range(count):
            wave = math.sin(now / (2 + n % 5) + n)
            busy = max(0, min(100, 55 + 9 * (n % 6) + 22 * wave))
            held = (9 + (n * 29) % 62) * GIB
            holders = {"other": held - GIB // 2}
            if n == own:
                held = int((14 + min(now, 24)) * GIB)
                holders, busy = {"train": held - GIB // 2}, 95 + 3 * wave
            elif n % 7 == 2:
                holders = {"explore": held // 4, "other": held // 2}
            elif n % 7 == 6:
                held, holders = int(78.4 * GIB), {"other": 77 * GIB}
            elif n % 7 == 4:
                held, holders, busy = 0, {}, 0
            found |= {
                f"gpu.{n}.util": int(busy),
                f"gpu.{n}.used": held,
                f"gpu.{n}.temp": int(34 + busy * 0.38),
                f"gpu.{n}.power": int(1000 * (80 + 5.4 * busy)),
                f"gpu.{n}.busy": ",".join(f"{pids[k]}:{int(busy)}" for k in [*holders][:1]),
                f"gpu.{n}.compute": ",".join(f"{pids[k]}:{v}" for k, v in holders.items()),
            }
        return found

    return machine


def instincts(root: Path) -> Callable[[float, Mapping[str, int]], None]:
    """Eight MI300X, whose files lie below a folder: what they tell after so many seconds."""
    devices = mi300x(root)

    def play(now: float, pids: Mapping[str, int]) -> None:
        for n, device in enumerate(devices):
            busy = 0 if n == 5 else max(0, min(100, 62 + 7 * n % 30 + 24 * math.sin(now / 2 + n)))
            used = 0.3 if n == 5 else 150 - 17 * n + (min(now, 20) if n == 1 else 0)
            held = {"train": used - 2} if n < 2 else {"explore": 20.0, "other": used - 24}
            sensors = next(device.glob("hwmon/*"))
            write(
                device,
                {
                    "gpu_busy_percent": int(busy),
                    "mem_busy_percent": int(busy * 0.6),
                    "mem_info_vram_used": int(used * GIB),
                },
            )
            write(
                sensors,
                {
                    "temp2_input": 1000 * int(36 + 0.4 * busy),
                    "power1_input": 1_000_000 * int(140 + 5.6 * busy),
                    "freq1_input": 1_000_000 * int(132 + 19 * busy),
                },
            )
            for name, size in held.items() if n != 5 else ():
                # Its node in ROCm's list is counted from the other end.
                node = 1000 + len(devices) - 1 - n
                kfd_process(root, pids[name], {node: int(size * GIB)})

    return play
