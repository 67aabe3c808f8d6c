"""Tell whether what a dry run is asked for are cards that are not here, or a device that is."""

from collections.abc import Iterable

from gpumagic.device import is_where
from gpumagic.device.cards import Card, card, cards
from gpumagic.errors import GpuError


def cards_meant(on: object) -> tuple[Card, ...]:
    """The cards that `on` names; none where it names a device."""
    if isinstance(on, Card):
        return (on,)
    if isinstance(on, str):
        return () if is_where(on) else _known(on)
    if isinstance(on, Iterable):
        return tuple(c if isinstance(c, Card) else card(c) for c in on)
    return ()


def _known(on: str) -> tuple[Card, ...]:
    try:
        return cards(on)
    except GpuError as error:
        raise GpuError(f"{error}; a device is 1, cuda:1, cpu, free") from None
