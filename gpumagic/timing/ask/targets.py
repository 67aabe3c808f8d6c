"""Name the devices that a comparison is over: each alone, or several at the same time."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.frameworks.needed import Needed
from gpumagic.usercode.values import comes_from


@dataclass(frozen=True)
class TimedDevices:
    """One device, or several at the same time."""

    parts: tuple[Device, ...]

    @property
    def where(self) -> str:
        """``"cuda:1"``, or ``"cuda:0+cuda:1"``."""
        return "+".join(str(device) for device in self.parts)

    @property
    def note(self) -> str | None:
        """Why it is not what was asked for."""
        return next((device.note for device in self.parts if device.note), None)


def targets(given: Iterable[object] | str | None, needed: Needed) -> tuple[TimedDevices, ...]:
    """The targets that are named, in that order; the CPU and every GPU if None; or GpuError."""
    if given is None:
        return tuple(TimedDevices((d,)) for d in [needed.find("cpu"), *needed.devices()])
    single = isinstance(given, (str, int, Device)) or comes_from(type(given), "torch.device")
    if single or not isinstance(given, Iterable):
        given = [given]
    found: dict[str, TimedDevices] = {}
    for one in given:
        for target in _named(one, needed):
            if target.where in found:
                said = target.note or found[target.where].note
                raise GpuError(
                    f"{target.where} is named twice{f' ({said})' if said else ''}; type it once"
                )
            found[target.where] = target
    if not found:
        raise GpuError("no device is named; type some, such as cpu 0, or none for all of them")
    return tuple(found.values())


def _named(one: object, needed: Needed) -> list[TimedDevices]:
    if not isinstance(one, str):
        return [TimedDevices((needed.find(one),))]
    made = []
    # A blank beside a comma or a plus is none between two devices.
    for part in re.split(r"\s*,\s*|\s+", re.sub(r"\s*\+\s*", "+", one.strip(" ,"))):
        if part.lower() == "all" and (every := needed.devices()):
            made += [TimedDevices((device,)) for device in every]
        else:
            if "+" in part and not all(part.split("+")):
                raise GpuError(f"a device is missing in {part}; type two or more, such as 0+1")
            parts = tuple(needed.find(name) for name in part.split("+"))
            if len({str(device) for device in parts}) < len(parts):
                raise GpuError(f"{part} names a device twice; type different ones, such as 0+1")
            made.append(TimedDevices(parts))
    return made
