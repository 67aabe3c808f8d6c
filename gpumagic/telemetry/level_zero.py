"""Ask Level Zero how much memory Intel's GPUs have, where ``pyzes`` and its loader are installed.

``zesMemoryGetState`` of its system management (Sysman),
https://oneapi-src.github.io/level-zero-spec/level-zero/latest/sysman/api.html.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_uint32
from functools import cached_property
from typing import Any


class LevelZero:
    """The memory of each GPU, by PCI address; ``load`` imports its module, once."""

    def __init__(self, load: Callable[[], Any] = lambda: __import__("pyzes")) -> None:
        self._load = load

    def memory(self, address: str) -> tuple[int, int] | None:
        """Bytes that there are, and that are used; None where it does not tell."""
        states = [self._state(module) for module in self._modules.get(address, ())]
        known = [state for state in states if state is not None]
        if not known or len(known) < len(states):
            return None
        total = sum(int(state.size) for state in known)
        return total, total - sum(int(state.free) for state in known)

    @cached_property
    def _zes(self) -> Any:
        try:
            zes = self._load()
            return zes if zes.zesInit(0) == 0 else None
        except (ImportError, OSError, AttributeError, KeyError):
            return None

    @cached_property
    def _modules(self) -> dict[str, list[Any]]:
        """The handles of each GPU's memory modules."""
        zes, found = self._zes, {}
        if zes is None:
            return {}
        for driver in _every(zes.zesDriverGet, zes.zes_driver_handle_t):
            for device in _every(zes.zesDeviceGet, zes.zes_device_handle_t, driver):
                told = zes.zes_pci_properties_t()
                told.stype = zes.ZES_STRUCTURE_TYPE_PCI_PROPERTIES
                if zes.zesDevicePciGetProperties(device, byref(told)) == 0:
                    at = told.address
                    where = f"{at.domain:04x}:{at.bus:02x}:{at.device:02x}.{at.function}"
                    modules = zes.zesDeviceEnumMemoryModules, zes.zes_mem_handle_t
                    found[where] = _every(*modules, device)
        return found

    def _state(self, module: Any) -> Any:
        state = self._zes.zes_mem_state_t()
        state.stype = self._zes.ZES_STRUCTURE_TYPE_MEM_STATE
        return None if self._zes.zesMemoryGetState(module, byref(state)) else state


def _every(ask: Callable[..., int], handle: Any, *of: Any) -> list[Any]:
    """All handles of a kind: first how many there are is asked, and then for them."""
    count = c_uint32(0)
    if ask(*of, byref(count), None) or not count.value:
        return []
    found = (handle * count.value)()
    return [] if ask(*of, byref(count), found) else list(found)
