"""Put back what code has set for the whole process or its thread, from one list.

The list is torch_settings.py and python_settings.py, and the random states. What cannot be read is
not put back; what cannot be put back does not keep the rest from it, and is kept as a fault.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from types import FrameType
from typing import Any

from gpumagic import faults
from gpumagic.isolation.python_settings import of_libraries, of_numpy, of_python, of_signals
from gpumagic.isolation.random_state import Randomness
from gpumagic.isolation.setting import Setting
from gpumagic.usercode.torch_classes import torch_here

# A setting, and its value.
_Known = tuple[Setting, Any]
# These are imported bit by bit, and set nothing then.
_NEVER = {"torch", "gpumagic", *sys.stdlib_module_names}


@contextmanager
def kept() -> Iterator[None]:
    """Put back what is set within, whatever happens there."""
    signals = _now(of_signals())
    torchs = _of_torch("of_a_thread", "of_the_process", "of_cuda")
    others = _now(chain(torchs, of_python(), of_libraries()))
    randomness, modules = Randomness(), set(sys.modules)
    try:
        yield
    finally:
        for setting, value in signals:
            _write(setting, value)
        with deferred():
            for setting, value in _adopted(others, modules):
                _write(setting, value)
            with faults.kept("putting the random state back"):
                randomness.restore()


class Growth:
    """What a program that runs ten thousand times may add to as often, as it is now."""

    def __init__(self) -> None:
        every = (*_of_torch("of_the_process"), *of_python())
        self._settings = _now(setting for setting in every if setting.grows)
        self._modules = set(sys.modules)

    def put_back(self) -> None:
        """Between two blocks of runs: soon over where nothing has grown."""
        self._settings = _adopted(self._settings, self._modules)
        self._modules = set(sys.modules)
        for setting, value in self._settings:
            _write(setting, value)


def _adopted(settings: list[_Known], modules: set[str]) -> list[_Known]:
    """Taken over is what a library has set for itself when it was imported."""
    if len(sys.modules) == len(modules):
        return settings
    libraries = {name.partition(".")[0] for name in sys.modules.keys() - modules} - _NEVER
    return [
        (setting, setting.adopt(value, setting.read(), libraries))
        if libraries and setting.adopt is not None
        else (setting, value)
        for setting, value in settings
    ]


@contextmanager
def deferred() -> Iterator[None]:
    """An interrupt within is raised at the end; a second one at once, in case it never ends."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread only
        return
    before: Any = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, or not set by Python
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            before(number, frame)
        came.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])


def thread_modes() -> Callable[[ExitStack], None]:
    """What gives another thread, until a stack is closed, the modes of torch and numpy here."""
    torch = torch_here()
    inference = torch is not None and torch.is_inference_mode_enabled()
    here = _now(chain(_of_torch("of_a_thread"), of_numpy()))

    def follow(stack: ExitStack) -> None:
        if inference:
            stack.enter_context(torch.inference_mode())
        for setting, value in here:
            _write(setting, value)

    return follow


def _of_torch(*lists: str) -> list[Setting]:
    """Those lists of torch_settings.py; nothing where torch is not imported."""
    if torch_here() is None:
        return []
    from gpumagic.isolation import torch_settings

    return [setting for name in lists for setting in getattr(torch_settings, name)()]


def _now(settings: Iterable[Setting]) -> list[_Known]:
    found = []
    for setting in settings:
        # torch does not tell what was set in its new way and in its old; a folder may be gone; an
        # older version does not have all.
        with suppress(Exception):
            found.append((setting, setting.read()))
    return found


def _write(setting: Setting, value: Any) -> None:
    try:
        if _is_changed(setting, value):
            setting.write(value)
    except Exception as error:  # noqa: BLE001  it must not keep the rest from being put back
        faults.keep(f"putting back {setting.name}", error)


def _is_changed(setting: Setting, value: Any) -> bool:
    try:
        return bool(setting.read() != value)
    except Exception:  # noqa: BLE001  a value may be the user's, and compare as it likes
        return True
