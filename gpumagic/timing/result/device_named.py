"""A device of a comparison, in any of the spellings that people use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from gpumagic import device as names
from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.timing.ask.sweep import label


def among(where: object, devices: Sequence[str]) -> str:
    """The one of `devices` that `where` names; none of them need be on this machine.

    Raises
    ------
    GpuError
        It is not among them.
    """
    if where in devices:
        return str(where)
    parts = {part for name in devices for part in name.split("+")}
    ordinals = sorted(int(part[5:]) for part in parts if part.startswith("cuda:"))
    known = [Device("cuda", ordinal=ordinal) for ordinal in ordinals]
    with suppress(GpuError):
        asked = [str(names.resolve_one(part.strip(), known)) for part in str(where).split("+")]
        for name in devices:
            if sorted(asked) == sorted(name.split("+")):
                return name
    raise GpuError(f"{label(where)} is not in this comparison; it has {', '.join(devices)}")
