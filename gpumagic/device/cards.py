"""Look up the memory of a card (a GPU model) by its name.

`_KNOWN` has each card's memory as torch reports it: the smallest of the values that public texts of
2020 to 2026 quote from torch. If no text was found, `_KNOWN` has the maker's figure.
"""

import os
import re
import shlex
from dataclasses import dataclass
from difflib import get_close_matches

from gpumagic.errors import GpuError

CONTEXT = 512 * 2**20  # bytes that CUDA uses before the first tensor; on real GPUs 300 to 600 MiB
_HOPPER = (9, 0)

# Cards by CUDA capability. "L4 24GB=22558" means that torch reports 22558 MiB for an L4 of 24 GB.
_KNOWN = {
    (12, 0): """RTX PRO 6000 96GB=97250, RTX 5090 32GB=32089, RTX 5060 Ti 16GB=15841,
        RTX 5080 16GB, RTX 5070 Ti 16GB, RTX 5070 12GB, RTX 5060 8GB""",
    (10, 0): "B200 180GB=182631",
    _HOPPER: "H200 141GB=143156, H100 80GB=81008, H20 96GB=97285, H100 NVL 94GB, GH200 96GB",
    (8, 9): """L4 24GB=22558, L40S 48GB=45589, RTX 4090 24GB=24217, RTX 4080 16GB=16049,
        L40 48GB, RTX 6000 Ada 48GB, RTX 4080 Super 16GB, RTX 4070 Ti Super 16GB,
        RTX 4070 Ti 12GB, RTX 4070 12GB, RTX 4060 Ti 16GB, RTX 4060 Ti 8GB, RTX 4060 8GB""",
    (8, 6): """A10 24GB=22517, A10G 24GB=22587, A40 48GB=45416, RTX A6000 48GB=48676,
        RTX A5000 24GB=24114, RTX 3090 24GB=24259, RTX 3060 12GB=11938, A16 16GB, A2 16GB,
        RTX A4000 16GB, RTX 3090 Ti 24GB, RTX 3080 Ti 12GB, RTX 3080 12GB, RTX 3080 10GB,
        RTX 3070 Ti 8GB, RTX 3070 8GB, RTX 3060 Ti 8GB""",
    (8, 0): "A100 80GB=81050, A100 40GB=40326, A30 24GB",
    (7, 5): """T4 16GB=15079, RTX 2080 Ti 11GB=11019, RTX 2060 Super 8GB=7974,
        Quadro RTX 8000 48GB, Quadro RTX 6000 24GB, TITAN RTX 24GB, RTX 2080 8GB,
        RTX 2070 8GB, RTX 2060 6GB, GTX 1660 Ti 6GB""",
    (7, 0): "V100 32GB=32510, V100 16GB=16130",
    (6, 1): "GTX 1080 Ti 11GB=11178, GTX 1080 8GB=8116, GTX 1060 6GB",
    (6, 0): "P100 16GB=16280",
    (3, 7): "K80 12GB",
}


@dataclass(frozen=True)
class Card:
    """A card (a GPU model), which need not be in this machine."""

    name: str
    total: int  # bytes, including CUDA's context and cuBLAS's workspace
    capability: tuple[int, int] = (8, 0)  # CUDA capability, such as (9, 0)
    reported: bool = False  # whether `total` is torch's figure, not the maker's or the user's

    @property
    def workspace(self) -> int:
        """Estimated bytes of a cuBLAS workspace. torch makes a workspace per thread and stream."""
        # torch's defaults, as :KiB:count pairs (aten/src/ATen/cuda/CublasHandlePool.cpp).
        default = ":4096:8" if self.capability >= _HOPPER else ":4096:2:16:8"
        asked = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        pairs = re.findall(r":(\d+):(\d+)", asked) or re.findall(r":(\d+):(\d+)", default)
        return sum(int(kib) * int(count) for kib, count in pairs) * 1024

    @property
    def usable(self) -> int:
        """Bytes available for tensors."""
        return max(self.total - CONTEXT - self.workspace, 0)


def _card(text: str, capability: tuple[int, int]) -> Card:
    name, _, mib = text.strip().partition("=")
    total = int(mib) * 2**20 if mib else int(name.rsplit(" ", 1)[1][:-2]) * 2**30
    return Card(name, total, capability, bool(mib))


CARDS = tuple(
    _card(text, capability) for capability, texts in _KNOWN.items() for text in texts.split(",")
)


def card(given: str) -> Card:
    """Return the card for a name or a size (``24GiB``). An unknown name raises GpuError."""
    given = given.strip()
    if (size := bytes_in(given)) is not None:
        return Card(given, size)
    wanted = _plain(given)
    known: dict[str, list[Card]] = {}
    for one in CARDS:
        for name in (one.name, one.name.rpartition(" ")[0]):
            known.setdefault(_plain(name), []).append(one)
    found = known.get(wanted, [])
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(shlex.quote(one.name) for one in found)  # quoted for a command line
        raise GpuError(f"{given} may be {names}; type one of them")
    near = get_close_matches(wanted, known, 1, 0.7)
    question = f"did you mean {shlex.quote(known[near[0]][0].name)}? " if near else ""
    listed = "type a name such as H100, 'A100 80GB' or T4, or a size: 24GiB"
    raise GpuError(f"no card {given!r} is known; {question}{listed}")


def cards(given: str) -> tuple[Card, ...]:
    """Return the cards for names separated by commas, without repeats."""
    return tuple(dict.fromkeys(card(part) for part in given.split(",")))


_UNITS = {"BYTES": 1, **{unit: 1000**n for n, unit in enumerate(("B", "KB", "MB", "GB", "TB"))}}
_UNITS |= {unit: 1024**n for n, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), start=1)}


def bytes_in(text: str) -> int | None:
    """Return the bytes of a size such as ``"16GiB"`` or ``"512 bytes"``; None for other texts."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B|BYTES)\s*", text.upper())
    return round(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None


def _plain(name: str) -> str:
    """Normalize a name for comparison: ``"NVIDIA A100-SXM4-80GB"`` becomes ``"a10080"``."""
    ignored = r"nvidia|geforce|tesla|quadro|generation|rtx|gtx|sxm\d?|pcie?|hbm\d\w?|gpu"
    words = re.sub(r"\b(\d+)\s*g(i?b)?\b", r"\1", re.sub(ignored, " ", name.lower()))
    # "Ada" and "PRO" are not ignored, because "6000 Ada", "PRO 6000" and "A6000" are three cards.
    return re.sub(r"[^a-z0-9]", "", words)
