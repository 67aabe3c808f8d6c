"""Tell which errors are about devices, in the words of PyTorch 2.6 to 2.15.

The text says which kind of error it is and often which devices it is about; who is to blame is
never taken from it.
"""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Message:
    """What the text of an error tells."""

    # mixed, index, numpy, generator, load, host (an argument that must be on the CPU), steps (an
    # optimizer's counters) or worker (of a loader, whose dataset is on a GPU)
    kind: str
    # "cuda:0", "cpu", or "cuda" where it has no number
    devices: frozenset[str] = frozenset()
    text: str = field(default="", repr=False)


_DEVICE = re.compile(r"\b(?:cuda|xpu|mps)(?::\d+)?\b|\bcpu\b|\bcpu(?::0)\b")
_TYPES = re.compile(r"(?:Input|input) type \((\S+?)\) and (?:weight|bias) type \((\S+?)\)")
_KINDS = (
    ("numpy", r"can't convert \S+ device type tensor to numpy"),
    ("index", r"indices should be either on .{1,20} or on the same device as the indexed tensor"),
    ("generator", r"Expected an? '\S+' (?:device type for generator|generator device) but found"),
    ("load", r"Attempting to deserialize object on (?:a )?CUDA device"),
    ("host", r"'lengths' argument should be a 1D CPU int64 tensor, but got 1D (?!cpu)"),
    ("host", r"legacy constructor expects device type: cpu but device type: \w+ was passed"),
    ("steps", r"state_steps should not be CUDA tensors"),
    ("mixed", r"\bsame devices?\b|\bsame device type\b|\bsame GPU\b|\bsame type of device\b"),
    ("mixed", r"\w+ must be a CUDA tensor"),  # torchvision's
    ("mixed", r"found two different devices|\bon different devices\b|on a different device"),
    ("mixed", r"must have its parameters and buffers on device"),
    ("mixed", r"Expected object of (?:device type|backend) \w+ but got"),
    (
        "mixed",
        r"to be on (?:GPU|CPU) \(while checking|but expected (?:it|them) to be on (?:GPU|CPU)",
    ),
    ("mixed", r"^invalid gradient at index \d+ - expected device \S+ but got"),
    ("mixed", r"Tensor on device \S+ is not on the expected device"),
)
_WORKER = re.compile(
    r"in DataLoader worker process.*(?:Cannot re-initialize CUDA in forked subprocess"
    r"|CUDA error: initialization error|Storage device not recognized: cuda)",
    re.DOTALL,
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _KINDS)


def read(error: BaseException) -> Message | None:
    """What `error` says, or None if it is not about devices."""
    if not isinstance(error, (RuntimeError, TypeError, ValueError, AssertionError)):
        return None
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  an exception class of the user's own
        return None
    if _WORKER.search(text):
        return Message("worker")
    # Another thread's or process's words: its frames are not this error's.
    if len(text) > 20_000 or "Original Traceback" in text:
        return None
    if found := _TYPES.search(text):
        kinds = {_device_of_type(name) for name in found.groups()}
        return Message("mixed", frozenset(kinds)) if len(kinds) > 1 else None
    for kind, pattern in _COMPILED:
        if found := pattern.search(text):
            # "either on cpu or …" speaks of no tensor.
            told = text[found.end() :] if kind == "index" else text
            return Message(kind, frozenset(_DEVICE.findall(told)), text)
    return None


def _device_of_type(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) == 3 else "cpu"


def agree(named: frozenset[str], seen: frozenset[str]) -> bool:
    """Whether every device that a message names is among those that were seen."""
    return all(any(d == s or s.startswith(f"{d}:") for s in seen) for d in named)
