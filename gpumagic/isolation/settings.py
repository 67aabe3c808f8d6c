"""Restore what code changed in the process or its thread: settings and random state.

The settings are listed in known_settings.py. A setting that cannot be read
is not restored. One that cannot be restored is kept as a fault, and the others are restored.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpumagic import faults
from gpumagic.isolation.known_settings import (
    Setting,
    of_a_thread,
    of_ctrl_c,
    of_cuda,
    of_libraries,
    of_numpy,
    of_python,
    of_the_process,
)
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Randomness:
    """The present random state of torch on every initialized device, of `random` and of numpy."""

    def __init__(self) -> None:
        self._devices = _states()
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._tensorflow = _tensorflow_state()
        self._start = self._devices

    def seed_tensorflow(self) -> None:
        """Give TensorFlow a seed until `restore`, if it has none, so that devices draw the same."""
        if self._tensorflow is not None:
            seed, _ = self._tensorflow
            _tensorflow()._set_global_seed(1 if seed is None else seed)

    def restore(self) -> None:
        """Restore everything. A CUDA device initialized since gets the CPU's seed."""
        random.setstate(self._python)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            numpy.random.set_state(self._numpy)
        if self._tensorflow is not None and self._tensorflow != _tensorflow_state():
            seed, drawn = self._tensorflow
            _tensorflow()._set_global_seed(seed)
            if drawn is not None:
                _tensorflow()._rng.setstate(drawn)
        for name, state in self._devices.items():
            _set(name, state)
        for name, generator in _generators().items():
            if name not in self._devices:
                # As `torch.manual_seed` does for a device initialized later.
                generator.manual_seed(torch_here().initial_seed())
        self._start = self._devices

    def same_start(self, devices: Iterable[torch.device]) -> None:
        """Restore everything, and let each of these CUDA devices draw the first one's numbers."""
        self.restore()
        here = [str(d) for d in devices if d.type == "cuda"]
        if here:
            torch_here().cuda.init()  # it will be used, and has no generator yet
        now = _states()
        self._start = dict(now)
        for name in here:
            self._start[name] = now[here[0]]
            _set(name, now[here[0]])

    def drawn(self) -> set[str]:
        """Return the devices on which torch drew random numbers, or was seeded, since the start."""
        return {
            name
            for name, state in _states().items()
            if name not in self._start or not torch_here().equal(state, self._start[name])
        }


def _tensorflow() -> Any:
    """Return TensorFlow's context, which keeps the seed; None if it is not imported."""
    module: Any = sys.modules.get("tensorflow.python.eager.context")
    found = module.context() if hasattr(module, "context") else None
    return found if hasattr(found, "_set_global_seed") and hasattr(found, "_seed") else None


def _tensorflow_state() -> tuple[int | None, Any] | None:
    """Return its seed, and the state of its operations' seeds."""
    found = _tensorflow()
    if found is None:
        return None
    return found._seed, None if found._seed is None else found._rng.getstate()


def _generators() -> dict[str, Any]:
    """Return torch's default generators by device, without initializing CUDA."""
    torch = torch_here()
    if torch is None:
        return {}
    found: dict[str, Any] = {"cpu": torch.default_generator}
    if torch.cuda.is_initialized():
        found |= {f"cuda:{n}": made for n, made in enumerate(torch.cuda.default_generators)}
    return found


def _states() -> dict[str, Tensor]:
    states = {name: generator.get_state() for name, generator in _generators().items()}
    torch = torch_here()
    if torch is not None and torch.backends.mps.is_available():
        states["mps:0"] = torch.mps.get_rng_state()
    return states


def _set(name: str, state: Tensor) -> None:
    if name.startswith("mps"):
        torch_here().mps.set_rng_state(state)
    elif name in (generators := _generators()):
        generators[name].set_state(state)


# A setting, and its value.
_Known = tuple[Setting, Any]


@contextmanager
def kept() -> Iterator[None]:
    """Restore settings that are changed within."""
    ctrl_c = _now([of_ctrl_c()])
    torchs = _of_torch(of_a_thread, of_the_process, of_cuda)
    others = _now(chain(torchs, of_python(), of_libraries()))
    randomness = Randomness()
    try:
        yield
    finally:
        for setting, value in ctrl_c:
            _write(setting, value)
        with deferred():
            for setting, value in others:
                _write(setting, value)
            with faults.kept("putting the random state back"):
                randomness.restore()


@contextmanager
def noted(note: Callable[[int, Any], object], most: int = 1) -> Iterator[None]:
    """Within, call `note` at an interrupt instead of raising; raise at more than `most`."""
    before: Any = signal.getsignal(signal.SIGINT)
    # Only the main thread gets signals. They may be ignored, or set by C code.
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > most:
            before(number, frame)
        note(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def deferred() -> Iterator[None]:
    """Within, defer an interrupt to the end; a second one is raised at once."""
    came: list[tuple[int, FrameType | None]] = []
    with noted(lambda *signaled: came.append(signaled)):
        yield
    if came:
        handler: Any = signal.getsignal(signal.SIGINT)
        handler(*came[0])


def thread_modes() -> Callable[[ExitStack], None]:
    """Return a function that gives another thread this thread's modes of torch and numpy."""
    torch = torch_here()
    inference = torch is not None and torch.is_inference_mode_enabled()
    here = _now(chain(_of_torch(of_a_thread), of_numpy()))

    def follow(stack: ExitStack) -> None:
        if inference:
            stack.enter_context(torch.inference_mode())
        for setting, value in here:
            _write(setting, value)

    return follow


def _of_torch(*lists: Callable[[], list[Setting]]) -> list[Setting]:
    """Return the settings in these lists; empty if torch is not imported."""
    return [] if torch_here() is None else [setting for each in lists for setting in each()]


def _now(settings: Iterable[Setting]) -> list[_Known]:
    found = []
    for setting in settings:
        # torch refuses to read a value that was set in both ways; a folder may be gone; an
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
