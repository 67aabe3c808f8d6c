"""Look up the name of a model in the list of PCI ids that systems bring along."""

from functools import lru_cache
from pathlib import Path

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
