"""Sample the GPUs of one vendor that a Linux DRM driver has, and the processes on them.

Reads files only, no library. A value is None if the driver does not give it. A GPU that sleeps
(``power/runtime_status``) is not asked anything that would wake it. A GPU that has disappeared, or
gives no values any more, is lost.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from gpumagic import drm
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample
from gpumagic.telemetry.source import LONGEST_S, CachedReadings, Source


class EngineShares:
    """The utilization by process, from each client's counters, which may count nanoseconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._looked = float("-inf")
        # By client and engine: the work done, and the work that was possible.
        self._before: dict[tuple[str, int, str], tuple[int, int | None]] = {}

    def look(self, clients: Iterable[drm.Client]) -> dict[tuple[int, str], float]:
        """Return percent by pid and PCI address, of the engine that a process used most since the
        last call. New clients have none, nor has anyone if that call was long ago."""
        now, before, self._before = self._monotonic(), self._before, {}
        passed_s, self._looked = now - self._looked, now
        shares: dict[tuple[int, str, str], float] = {}
        for client in clients:
            for engine, (done, of, capacity) in client.engines.items():
                key = (client.address, client.id, engine)
                was, was_of = before.get(key, (done, None))
                # A counter may decrease for a while; the larger value counts.
                self._before[key] = max(done, was), of
                possible = passed_s * 1e9 if of is None else of - (was_of or of)
                if key in before and 0 < passed_s <= LONGEST_S and possible > 0:
                    its = (client.pid, client.address, engine)
                    share = 100.0 * (max(done, was) - was) / possible / capacity
                    shares[its] = shares.get(its, 0.0) + share
        busy: dict[tuple[int, str], float] = {}
        for (pid, address, _), share in shares.items():
            busy[pid, address] = max(busy.get((pid, address), 0.0), min(share, 100.0))
        return busy


_SLOW_S, _PROCESSES_S = 2.0, 3.0
_GENERATIONS = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_COMPUTES, _DRAWS = ("compute", "ccs"), ("gfx", "render", "rcs")


class DrmSource(Source):
    """The common part of AMD's and Intel's sources; ``root`` is the root of the file system."""

    vendor: ClassVar[str]

    def __init__(
        self, root: Path = Path("/"), monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.root = root
        self._kept = CachedReadings(monotonic)
        self._shares = EngineShares(monotonic)
        self._known: dict[tuple[str, str], drm.GraphicsCard] = {}
        self._cards: list[drm.GraphicsCard] = []
        self._seen: dict[str, GpuSample] = {}
        self._closed: list[drm.GraphicsCard] = []

    # Methods of a vendor.

    def _fast(self, card: drm.GraphicsCard) -> dict[str, Any]:
        """Return utilization and memory."""
        raise NotImplementedError

    def _slow(self, card: drm.GraphicsCard) -> dict[str, Any]:
        """Return readings that change slowly or never."""
        raise NotImplementedError

    def _is_held(self, card: drm.GraphicsCard, region: str) -> bool:
        """Whether a region of memory counts as the GPU's."""
        raise NotImplementedError

    def _slept(self, card: drm.GraphicsCard) -> None:
        """Reset the counters of a sleeping GPU, which stand still."""

    def _held_elsewhere(self) -> dict[tuple[int, str], int]:
        """Return bytes by pid and PCI address from other sources than fdinfo."""
        return {}

    # The interface of a source.

    def gpus(self, host: Host, max_age: float = 0.0) -> list[GpuSample]:
        """Return all GPUs, lost ones too; a reading is at most `max_age` of its intervals old."""
        self._cards = self._kept.get("cards", _SLOW_S, max_age, self._listed)
        if not self._cards and not self._seen:
            return []
        there = {card.uuid for card in self._cards}
        self._kept.keep_only(lambda key: key in (*there, "cards", "processes"))
        self._closed = []
        samples = [self._sample(n, card, host, max_age) for n, card in enumerate(self._cards)]
        gone = [_lost(gpu) for uuid, gpu in self._seen.items() if uuid not in there]
        self._seen |= {gpu.uuid: gpu for gpu in samples}
        return samples + gone

    def processes(self, max_age: float = 0.0) -> list[ProcessSample]:
        """Return the processes that hold memory; `max_age` as in :meth:`gpus`."""
        if not self._cards:
            return []
        return self._kept.get("processes", _PROCESSES_S, max_age, self._read_processes)

    def problems(self) -> list[Problem]:
        """Return a problem for each GPU whose files this user may not read."""
        return [
            Problem(
                "not-permitted",
                f"this user may not read the files of {card.name or card.address} ({card.path})",
                "run %gpus --doctor; in a container, /sys must be mounted readable",
                card.uuid,
            )
            for card in self._closed
        ]

    def read_ahead(self, *, processes: bool, seconds: float) -> None:
        """Read values that are due, for at most `seconds`."""
        self._kept.read_ahead(seconds, lambda key: processes or key != "processes")

    def _listed(self) -> list[drm.GraphicsCard]:
        return drm.graphics_cards(self.root, self.vendor, self._known)

    def _sample(self, index: int, card: drm.GraphicsCard, host: Host, max_age: float) -> GpuSample:
        asleep = card.device.text("power/runtime_status") == "suspended"
        readings = {} if asleep else self._fast(card)
        facts = GpuSample(card.uuid, card.name, index, vendor=self.vendor, unified=card.integrated)
        known = [value for value in readings.values() if value is not None]
        if asleep:
            self._slept(card)
        else:
            slow = self._kept.get(card.uuid, _SLOW_S, max_age, lambda: self._slow(card))
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
        clients = [one for one in drm.read_clients(self.root) if one.address in cards]
        memory: dict[tuple[int, str], int] = {}
        ran: dict[tuple[int, str], set[str]] = {}
        for client in clients:
            where, card = (client.pid, client.address), cards[client.address]
            held = [size for name, size in client.memory.items() if self._is_held(card, name)]
            memory[where] = memory.get(where, 0) + sum(held)
            engines = {name for name, (done, _, _) in client.engines.items() if done}
            ran[where] = ran.get(where, set()) | engines
        told = {at: n for at, n in self._held_elsewhere().items() if at[1] in cards}
        for where, size in told.items():
            memory[where] = max(memory.get(where, 0), size)
        busy = self._shares.look(clients)
        return [
            ProcessSample(
                uuid=cards[where[1]].uuid,
                pid=where[0],
                memory=size,
                kind=_kind(ran.get(where, set()), computes=where in told),
                utilization=busy.get(where),
            )
            for where, size in sorted(memory.items())
            # A process without memory counts if an engine has run for it.
            if size or ran.get(where)
        ]


def _lost(gpu: GpuSample) -> GpuSample:
    return GpuSample(gpu.uuid, gpu.name, gpu.index, vendor=gpu.vendor, lost=True)


def _kind(ran: set[str], *, computes: bool) -> str | None:
    kinds = ["compute"] if computes or ran & set(_COMPUTES) else []
    kinds += ["graphics"] if ran & set(_DRAWS) else []
    return "+".join(kinds) or None


def pcie_link(files: drm.Folder) -> dict[str, int | None]:
    """Return the present and the best link of a PCI device: ``"16.0 GT/s PCIe"``."""
    found: dict[str, int | None] = {}
    for field, prefix in (("", "current"), ("_limit", "max")):
        speed = (files.text(f"{prefix}_link_speed") or "").partition(" ")[0]
        width = files.number(f"{prefix}_link_width")
        found[f"pcie_generation{field}"] = _GENERATIONS.get(speed)
        # The kernel writes 0 and 255 for unknown.
        found[f"pcie_width{field}"] = width if width and width <= 32 else None
    return found


def temperatures(sensors: drm.Folder, channels: Iterable[int]) -> Mapping[str, float | None]:
    """Return the temperature of the first existing channel and its throttling limit, in °C."""
    for channel in channels:
        value = sensors.scaled(f"temp{channel}_input", 1000)
        if value is not None:
            limit = sensors.scaled(f"temp{channel}_crit", 1000)
            return {"temperature": value, "temperature_limit": limit}
    return {"temperature": None, "temperature_limit": None}
