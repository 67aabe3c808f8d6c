"""Call a function when a module has been imported, before anybody can use it."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, Callable[[], object]] = {}


def when_imported(module: str, then: Callable[[], object]) -> None:
    """Call `then` after the import of `module`; now, if that has been."""
    if module in sys.modules:
        then()
        return
    _waiting[module] = then
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def forget() -> None:
    """Wait for no import any more."""
    _waiting.clear()
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


class _Finder:
    """Finds what is waited for as Python would, and has its loader say when it is done."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting or self._asking:
            return None
        self._asking = True  # the others are asked by way of all, this one included
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name)  # type: ignore[assignment]
        return spec


class _Loader:
    """A loader like the one within, which calls what waits for its module."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # What asks a module for its loader, as pkgutil does, is to find its own.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        if then := _waiting.pop(self._name, None):
            then()


_FINDER: Any = _Finder()
