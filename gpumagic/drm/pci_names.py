"""Look up the name of a model in the lists that systems bring along: libdrm's, and of PCI ids."""

from functools import lru_cache
from pathlib import Path

_AMDS = "usr/share/libdrm/amdgpu.ids"
_LISTS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids", "usr/share/pci.ids")


@lru_cache(64)
def pci_name(root: Path, vendor: str, device: str) -> str | None:
    """``"Radeon RX 7900 XTX"`` of ``"1002"`` and ``"744c"``; None where there is no list.

    What stands in brackets is what shops call it: "Navi 31 [Radeon RX 7900 XT/7900 XTX]".
    """
    for name in _LISTS:
        try:
            with (root / name).open(errors="replace") as lines:
                its = False
                for line in lines:
                    if line[:1] not in "\t#\n":
                        its = line.startswith(f"{vendor} ")
                    elif its and line.startswith(f"\t{device} "):
                        model = line[6:].strip()
                        return model.rpartition("[")[2].rstrip("]") or model
        except OSError:
            continue
    return None


@lru_cache(64)
def amd_name(root: Path, device: str, revision: str) -> str | None:
    """``"AMD Radeon RX 7900 XTX"`` of ``"744c"`` and ``"c8"``, which of several that are alike."""
    try:
        with (root / _AMDS).open(errors="replace") as lines:
            for line in lines:
                words = [word.strip() for word in line.split(",", 2)]
                if len(words) == 3 and [w.lower() for w in words[:2]] == [device, revision]:
                    return words[2] or None
    except OSError:
        pass
    return None
