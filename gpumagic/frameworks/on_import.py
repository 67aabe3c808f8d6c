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
    """Finds what is waited for as Python would, and has its loader call then."""

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
            run = spec.loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                if then := _waiting.pop(name, None):
                    then()

            spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


_FINDER: Any = _Finder()
