"""Follow code as if on a card that is not here, and say whether it has room there.

In the forked child a card stands as ``cuda:0``, or as the GPU of a rank, and is empty: what lies on
a GPU of this process is taken off it first.
"""

import time
from types import SimpleNamespace

import psutil

from gpumagic.device import Device
from gpumagic.device.cards import Card
from gpumagic.dryrun.cards_asked import cards_meant
from gpumagic.dryrun.held_memory import Before, HeldMemory
from gpumagic.dryrun.result import OnCard
from gpumagic.errors import GpuError
from gpumagic.placement.torch_devices import find
from gpumagic.virtual import gate


def target_of(on: object) -> tuple[Device | None, tuple[Card, ...]]:
    """The device that `on` names, and no cards; or cards, and what stands for the first of them."""
    if on is None:
        return None, ()
    chosen = cards_meant(on)
    return (stand_in(chosen[0]), chosen) if chosen else (find(on), ())


def stand_in(card: Card, ordinal: int = 0) -> Device:
    """The device that a card is in the forked child."""
    return Device("cuda", ordinal, name=card.name, memory_total=card.total)


def before_on(card: Card, count: int) -> Before:
    """What there is on so many of a card: all of it is free."""
    if problem := gate.static_problem():
        raise GpuError(f"no dry run for a card that is not here: {problem}")
    major, minor = card.capability
    properties = SimpleNamespace(name=card.name, total_memory=card.total, major=major, minor=minor)
    memory: dict[str, tuple[int, int | None]]
    memory = {f"cuda:{n}": (0, card.usable) for n in range(count)}
    memory["cpu"] = (0, int(psutil.virtual_memory().available))
    return Before(time.monotonic(), memory, False, [(properties, 0)] * count)


def on_card(held: HeldMemory, card: Card, device: str) -> OnCard:
    """Whether what was counted on the device has room on a card, and from which line on not."""
    rises = held.rises.get(device, [])
    at = next((line for nbytes, line in rises if nbytes > card.usable), None)
    return OnCard(card, held.most.get(device, 0), at)
