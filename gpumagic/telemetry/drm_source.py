"""Sample the GPUs of one vendor that a Linux DRM driver has, and who holds their memory.

All of it from files, none of it by a library; what a driver does not tell is None. A GPU that
sleeps (``power/runtime_status``) is not asked what would wake it, and one that was there and is
not, or that tells nothing any more, is lost.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from gpumagic import drm
from gpumagic.telemetry.kept_readings import KeptReadings
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample

_SLOW_S, _PROCESSES_S = 2.0, 3.0
# A mean over longer than this says nothing of now.
_LONGEST_S = 30.0
_GENERATIONS = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_COMPUTES, _DRAWS = ("compute", "ccs"), ("gfx", "render", "rcs")
_Totals = dict[tuple[int, str, str], tuple[int, int | None, int]]


class DrmSource:
    """What AMD's and Intel's have in common; ``root`` is where the file system begins."""

    name: ClassVar[str]
    vendor: ClassVar[str]

    def __init__(
        self, root: Path = Path("/"), monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root
        self._monotonic = monotonic
        self._kept = KeptReadings(monotonic)
        self._known: dict[tuple[str, str], drm.GraphicsCard] = {}
        self._cards: list[drm.GraphicsCard] = []
        self._seen: dict[str, GpuSample] = {}
        self._closed: list[drm.GraphicsCard] = []
        # What engines had done for each process when that was read.
        self._before: tuple[float, _Totals] = (float("-inf"), {})

    # What a vendor's own tell.

    def _fast(self, card: drm.GraphicsCard) -> dict[str, Any]:
        """Utilization and memory."""
        raise NotImplementedError

    def _slow(self, card: drm.GraphicsCard) -> dict[str, Any]:
        """Readings that are asked for less often, and what does not change."""
        raise NotImplementedError

    def _is_held(self, card: drm.GraphicsCard, region: str) -> bool:
        """Whether a region of memory is the GPU's own, of which it has so much."""
        raise NotImplementedError

    def _held_elsewhere(self) -> dict[tuple[int, str], int]:
        """Bytes by pid and PCI address that are told by other means than fdinfo."""
        return {}

    def software(self) -> dict[str, str]:
        """What its GPUs run on, by name: versions."""
        raise NotImplementedError

    # What the collector asks.

    def gpus(self, host: Host, patience: float = 0.0) -> list[GpuSample]:
        """All GPUs, also lost ones; `patience`: how many times its interval a reading may be."""
        self._cards = self._kept.get("cards", _SLOW_S, patience, self._listed)
        if not self._cards and not self._seen:
            return []
        there = {card.uuid for card in self._cards}
        self._kept.keep_only(lambda key: key in (*there, "cards", "processes"))
        self._closed = []
        samples = [self._sample(n, card, host, patience) for n, card in enumerate(self._cards)]
        gone = [_lost(gpu) for uuid, gpu in self._seen.items() if uuid not in there]
        self._seen |= {gpu.uuid: gpu for gpu in samples}
        return samples + gone

    def processes(self, patience: float = 0.0) -> list[ProcessSample]:
        """Who holds memory where; `patience` as in :meth:`gpus`."""
        if not self._cards:
            return []
        return self._kept.get("processes", _PROCESSES_S, patience, self._read_processes)

    def problems(self) -> list[Problem]:
        """The GPUs whose files this user may not read."""
        return [
            Problem(
                "not-permitted",
                f"this user may not read what {card.name or card.address} tells ({card.path})",
                "run %gpus --doctor; in a container, /sys must be mounted readable",
                card.uuid,
            )
            for card in self._closed
        ]

    def chore(self, *, processes: bool, seconds: float) -> None:
        """Read ahead what is due, for at most so long."""
        self._kept.read_ahead(seconds, lambda key: processes or key != "processes")

    def _listed(self) -> list[drm.GraphicsCard]:
        return drm.graphics_cards(self._root, self.vendor, self._known)

    def _sample(self, index: int, card: drm.GraphicsCard, host: Host, patience: float) -> GpuSample:
        asleep = card.device.text("power/runtime_status") == "suspended"
        readings = {} if asleep else self._fast(card)
        facts = GpuSample(card.uuid, card.name, index, vendor=self.vendor, unified=card.integrated)
        known = [value for value in readings.values() if value is not None]
        if not asleep:
            slow = self._kept.get(card.uuid, _SLOW_S, patience, lambda: self._slow(card))
            readings |= slow
            known += [value for value in slow.values() if value is not None]
        if card.integrated:
            readings |= {"memory_total": host.memory_total, "memory_used": host.memory_used}
        if not known and not asleep:
            if any(card.device.is_closed(name) for name in card.device.names()):
                self._closed.append(card)
            elif card.uuid in self._seen:
                return _lost(self._seen[card.uuid])
        return GpuSample(**{**vars(facts), **readings})

    def _read_processes(self) -> list[ProcessSample]:
        cards = {card.address: card for card in self._cards}
        totals: _Totals = {}
        memory: dict[tuple[int, str], int] = {}
        for client in drm.read_clients(self._root):
            card = cards.get(client.address)
            if card is None:
                continue
            own = (count for name, count in client.memory.items() if self._is_held(card, name))
            where = client.pid, card.address
            memory[where] = memory.get(where, 0) + sum(own)
            for engine, (done, of, capacity) in client.engines.items():
                key = (*where, engine)
                totals[key] = totals.get(key, (0, None, 0))[0] + done, of, capacity
        elsewhere = self._held_elsewhere()
        for where, held in elsewhere.items():
            if where[1] in cards:
                memory[where] = max(memory.get(where, 0), held)
        now, (at, before) = self._monotonic(), self._before
        self._before = now, totals
        busy = _busy(totals, before, now - at)
        return [
            ProcessSample(
                uuid=cards[address].uuid,
                pid=pid,
                memory=held,
                kind=_kind(pid, address, totals, computes=(pid, address) in elsewhere),
                utilization=busy.get((pid, address)),
            )
            for (pid, address), held in sorted(memory.items())
            # An engine that has run for it shows that it is at work there, without memory too.
            if held or any(key[:2] == (pid, address) and did[0] for key, did in totals.items())
        ]


def _lost(gpu: GpuSample) -> GpuSample:
    return GpuSample(gpu.uuid, gpu.name, gpu.index, vendor=gpu.vendor, lost=True)


def _busy(totals: _Totals, before: _Totals, passed_s: float) -> dict[tuple[int, str], float]:
    """Percent by process and GPU: of the engine that it kept busiest since before."""
    busy: dict[tuple[int, str], float] = {}
    for key, (done, of, capacity) in totals.items():
        if key not in before or not 0 < passed_s <= _LONGEST_S:
            continue
        was, was_of, _ = before[key]
        possible = passed_s * 1e9 if of is None or was_of is None else of - was_of
        if possible > 0:
            # A value may fall for a while: then nothing is known to have been done.
            share = max(done - was, 0) / possible / capacity
            where = key[:2]
            busy[where] = max(busy.get(where, 0.0), min(100.0 * share, 100.0))
    return busy


def _kind(pid: int, address: str, totals: _Totals, *, computes: bool) -> str | None:
    ran = {
        engine
        for (its_pid, at, engine), (done, _, _) in totals.items()
        if (its_pid, at) == (pid, address) and done
    }
    kinds = ["compute"] if computes or ran & set(_COMPUTES) else []
    kinds += ["graphics"] if ran & set(_DRAWS) else []
    return "+".join(kinds) or None


def pcie_link(files: drm.Folder) -> dict[str, int | None]:
    """The link of a PCI device as it is, and the most that it can be: ``"16.0 GT/s PCIe"``."""
    found: dict[str, int | None] = {}
    for field, prefix in (("", "current"), ("_limit", "max")):
        speed = (files.text(f"{prefix}_link_speed") or "").partition(" ")[0]
        width = files.number(f"{prefix}_link_width")
        found[f"pcie_generation{field}"] = _GENERATIONS.get(speed)
        # 0 and 255 are what the kernel says where it does not know.
        found[f"pcie_width{field}"] = width if width and width <= 32 else None
    return found


def first_known(values: Iterable[Any]) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def temperatures(sensors: drm.Folder, channels: Iterable[int]) -> Mapping[str, float | None]:
    """The first of these channels that there is, and where the GPU slows down, in °C."""
    for channel in channels:
        value = sensors.scaled(f"temp{channel}_input", 1000)
        if value is not None:
            limit = sensors.scaled(f"temp{channel}_crit", 1000)
            return {"temperature": value, "temperature_limit": limit}
    return {"temperature": None, "temperature_limit": None}
