"""Read the device that a variable names, and write a device in full."""

from typing import Any

import torch


def device_of(value: Any) -> torch.device | None:
    """A device that a variable holds, as a `torch.device` or in words."""
    if type(value) is torch.device:
        return value
    if type(value) in (str, int):
        try:
            return torch.device(value)
        except (RuntimeError, TypeError):
            return None
    return None


def full(device: torch.device) -> str:
    """``"cuda:0"``: with the number of the current device where there is none."""
    if str(device) == "cuda":
        return f"cuda:{torch.cuda.current_device()}"
    return device.type if device.type == "cpu" else str(device)
