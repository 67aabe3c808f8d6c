"""Resolve a WHERE (devices as the user spells them) to devices."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import index
from platform import machine

from gpumagic.device.discover import CPU, Device, here
from gpumagic.errors import GpuError, as_typed, meant

_NUMBER = r"(?P<number>[0-9]{1,9})"
_KIND = r"(?P<kind>gpu|cuda|xpu)(?::(?P<after>[0-9]{1,9}))?"
_GPU = re.compile(rf"{_NUMBER}|(?:/device:|/)?{_KIND}", re.I)
_CPU = re.compile(r"(?:/device:|/)?cpu(?::(?P<after>[0-9]{1,9}))?", re.I)
_MPS = re.compile(r"mps(?::0)?", re.I)
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-z/-]+|PCI-[0-9a-f:.-]+", re.I)

SPELLINGS = "1, gpu:1, cuda:1, cuda, xpu:1, cpu, mps, GPU-<uuid>, free, all, or 0,1"


def resolve(
    where: object, devices: Sequence[Device] | None = None, *, current: int = 0, cpu: bool = True
) -> list[Device]:
    """Return the devices that a WHERE names, in the WHERE's order; the list is never empty.

    A WHERE is a text (see docs/magics.md), an integer, a Device, or a ``torch.device``. A missing
    device becomes the CPU, with a ``note``, if its name ends in ``?``. ``cuda``, ``xpu`` or ``gpu``
    without a number means the GPU number `current`. ``1`` and ``gpu:1`` mean a GPU of any kind.
    Raises GpuError if the WHERE is invalid or ambiguous, if a device is missing or named twice, or
    if the CPU is named and `cpu` is False.
    """
    found: list[Device] = []
    try:
        text = _spell(where)
        if devices is None:  # for the CPU alone, do not call the driver, which may be slow
            devices = [] if _CPU.fullmatch(text.strip()) else here()
        for part in text.split(","):
            for device in _resolve_part(part.strip(), text, devices, current, cpu):
                if device in found:
                    twice = f"{device} is named twice in {_quote(text)}"
                    raise GpuError(f"{twice}; name each device once")
                found.append(device)
    except _NotADevice as error:
        numbered = [f"{kind}:{d.ordinal}" for d in devices or [] for kind in (d.kind, "gpu")]
        question = meant(str(where), ["cpu", "free", "all", "mps", *numbered])
        raise GpuError(f"{error} is not a device; {question}type {SPELLINGS}") from None
    return found


def is_where(text: str) -> bool:
    """Whether `text` is a valid WHERE; the device need not exist."""
    parts = [part.strip().removesuffix("?").rstrip() for part in text.split(",")]
    kinds = (_GPU, _CPU, _MPS, _UUID)
    return all(p.lower() in ("all", "free") or any(k.fullmatch(p) for k in kinds) for p in parts)


def resolve_one(
    where: object, devices: Sequence[Device] | None = None, *, current: int = 0
) -> Device:
    """Return the device of a WHERE that must name exactly one device; see :func:`resolve`."""
    found = resolve(where, devices, current=current)
    if len(found) > 1:
        raise GpuError(f"{_quote(where)} names {_list(found)}; type only one of them")
    return found[0]


def complete(prefix: str, devices: Sequence[Device] | None = None) -> list[str]:
    """Complete the last device of an unfinished WHERE. Likely completions come first."""
    devices = here(memory=False) if devices is None else devices
    head, _, last = prefix.rpartition(",")
    start = last.lstrip()
    before = prefix[: len(prefix) - len(start)]
    numbers = [str(device.ordinal) for device in devices]
    offers = [*numbers, *map(str, devices), "cpu", *(("free", "all") if devices else ())]
    if start:  # offer longer names only if the user has typed a part of them
        offers += [f"gpu:{number}" for number in numbers]
        offers += [device.uuid or "" for device in devices]
    taken = {part.strip() for part in head.split(",")} | {""}
    return [before + o for o in offers if o.lower().startswith(start.lower()) and o not in taken]


def _spell(where: object) -> str:
    if isinstance(where, str):
        return where
    if isinstance(where, Device):
        return where.uuid or str(where)
    if isinstance(getattr(where, "type", None), str):
        return str(where)
    try:
        # True is an int in Python, but not the number of a GPU.
        return str(index(None if isinstance(where, bool) else where))  # type: ignore[arg-type]
    except TypeError:
        raise _NotADevice(_quote(where)) from None


def _resolve_part(
    part: str, whole: str, devices: Sequence[Device], current: int, cpu: bool
) -> list[Device]:
    asked = part.removesuffix("?").rstrip()
    if not asked:
        raise GpuError(f"a device is missing in {_quote(whole)}; type {_choices(devices, cpu)}")
    try:
        found = _find(asked, devices, current)
    except _NotHere as error:
        if not part.endswith("?") or not cpu:
            raise GpuError(f"no {error}; {_cure(asked, devices, cpu)}") from None
        return [replace(CPU, note=f"asked for {error.asked}, which is not here")]
    if not cpu and CPU in found:
        raise GpuError(f"{asked} is not a GPU; {_cure(asked, devices, cpu)}")
    return found


class _NotADevice(Exception):
    """Raised for a value that is not a valid WHERE."""


class _NotHere(Exception):
    """Raised for a valid WHERE whose device is missing."""

    def __init__(self, asked: str, there_is: str) -> None:
        super().__init__(f"{asked}: {there_is}")
        self.asked = asked


def _find(asked: str, devices: Sequence[Device], current: int) -> list[Device]:
    word = asked.lower()
    if match := _GPU.fullmatch(asked):
        return [_gpu(match, current, devices)]
    if match := _CPU.fullmatch(asked):
        if int(match["after"] or 0):
            raise GpuError(f"no {asked}: the CPU is one device; type cpu")
        return [CPU]
    if _UUID.fullmatch(asked):
        return [_by_uuid(asked, devices)]
    if _MPS.fullmatch(asked):
        if sys.platform == "darwin" and machine() == "arm64":
            return [Device("mps")]
        raise _NotHere("mps", "it is the GPU of Macs with Apple silicon")
    if word not in ("all", "free"):
        raise _NotADevice(_quote(asked))
    if not devices:
        raise _NotHere("GPU", there_is(devices))
    return list(devices) if word == "all" else [_freest(devices)]


def _gpu(match: re.Match[str], current: int, devices: Sequence[Device]) -> Device:
    """Return the GPU that `match` names. The kind "gpu", or no kind, means any kind."""
    digits, kind = match["number"] or match["after"], (match["kind"] or "gpu").lower()
    ordinal = current if digits is None else int(digits)
    for device in devices:
        if device.ordinal == ordinal and kind in ("gpu", device.kind):
            return device
    there = devices[0].kind if devices else "cuda"
    name = f"{there if kind == 'gpu' else kind}:{ordinal}"
    raise _NotHere(f"GPU {ordinal}" if match["number"] else name, there_is(devices))


def _by_uuid(asked: str, devices: Sequence[Device]) -> Device:
    found = [d for d in devices if (d.uuid or "").lower().startswith(asked.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        uuids = " and ".join(str(device.uuid) for device in found[:2])
        raise GpuError(f"{asked} matches {len(found)} UUIDs: {uuids}; type more of the UUID")
    uuids = ", ".join(f"{device.label} is {device.uuid}" for device in devices if device.uuid)
    raise _NotHere(asked, uuids or there_is(devices))


def _freest(devices: Sequence[Device]) -> Device:
    known = [device for device in devices if device.memory_free is not None]
    if not known:
        raise GpuError(f"free: no GPU reports its free memory; type {_choices(devices)}")
    return max(known, key=lambda device: device.memory_free or 0)


def _list(devices: Sequence[Device]) -> str:
    labels = [str(device) for device in devices]
    text = " and ".join(filter(None, [", ".join(labels[:-1]), labels[-1]]))
    names = ["virtual" if device.virtual else device.name for device in devices]
    models = ", ".join(dict.fromkeys(filter(None, names)))
    return f"{text} ({models})" if models else text


def there_is(devices: Sequence[Device]) -> str:
    """Return a text such as ``there are cuda:0 and cuda:1``."""
    if not devices:
        return "this machine has no GPU that this process can see"
    return f"there {'is only' if len(devices) == 1 else 'are'} {_list(devices)}"


def _choices(devices: Sequence[Device], cpu: bool = True) -> str:
    return " or ".join(filter(None, [", ".join(str(d.ordinal) for d in devices), "cpu" * cpu]))


def _cure(asked: str, devices: Sequence[Device], cpu: bool) -> str:
    if not devices:
        return f"type {'cpu, or ' * cpu}{as_typed('%gpus --virtual 2')} for virtual ones"
    if not cpu:
        return f"type {_choices(devices, cpu)}, or nothing for all of them"
    choices = _choices(devices).replace(" or cpu", ", cpu")
    return f"type {choices}, or {asked}? to fall back to the CPU"


def _quote(given: object) -> str:
    """Return the `repr` of an object, shortened to at most 60 characters."""
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}…"
