"""Poll critical Xid errors as they happen, by NVML's event set, without ever waiting."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any

from gpumagic.nvml.library import Library

_XID_CRITICAL_ERROR = 0x8
_TIMEOUT = 10
# More than these in one go are the same fault again and again.
_MOST = 64
_TRIES = 3


class Xids:
    """The errors of those GPUs that can tell; the set is made anew when the GPUs change."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._set: Any = None
        self._watched: dict[Any, str] = {}
        self._failures = 0
        self._lock = threading.RLock()

    def poll(self, handles: Mapping[str, Any]) -> list[tuple[str, int]]:
        """UUID and Xid of each error since the question before, oldest first; of whole GPUs."""
        found: list[tuple[str, int]] = []
        with self._lock:
            if set(self._watched.values()) != handles.keys():
                self.close()
                self._watched = {_address(handle): uuid for uuid, handle in handles.items()}
            if self._set is None and self._failures < _TRIES:
                self._set = self._make(handles)
                self._failures += self._set is None
            while self._set is not None and len(found) < _MOST:
                try:
                    event = self._library.make("nvmlEventSetWait_v2", self._set, 0)
                except self._library.errors as error:
                    if getattr(error, "value", None) != _TIMEOUT:
                        # One of its GPUs is lost; the next set will be made without it.
                        self._failures += 1
                        self._free()
                    break
                # By its handle: a GPU that is lost does not tell its UUID.
                uuid = self._watched.get(_address(event.device))
                if uuid is not None and event.eventType == _XID_CRITICAL_ERROR:
                    found.append((uuid, int(event.eventData)))
        return found

    def close(self) -> None:
        """Let go of the set; to be called before NVML is shut down."""
        with self._lock:
            self._free()
            self._watched = {}
            self._failures = 0

    def _free(self) -> None:
        if self._set is not None:
            self._library.call("nvmlEventSetFree", self._set)
        self._set = None

    def _make(self, handles: Mapping[str, Any]) -> Any:
        events = self._library.call("nvmlEventSetCreate") if handles else None
        if events is None:
            return None
        registered = 0
        for handle in handles.values():
            able = self._library.call("nvmlDeviceGetSupportedEventTypes", handle) or 0
            if not able & _XID_CRITICAL_ERROR:
                continue
            try:
                self._library.make("nvmlDeviceRegisterEvents", handle, _XID_CRITICAL_ERROR, events)
                registered += 1
            except self._library.errors:
                continue
        if not registered:
            self._library.call("nvmlEventSetFree", events)
            return None
        return events


def _address(handle: Any) -> Any:
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value
    except (ctypes.ArgumentError, TypeError):
        return handle
