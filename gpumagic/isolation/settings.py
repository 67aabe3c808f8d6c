"""Restore the settings and the random state that code changed.

A setting is restored if it affects results or speed, or if notebooks change it (1,668 were read).
"""

import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic import faults
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    import torch


class Setting(NamedTuple):
    name: str
    read: Callable[[], Any]  # returns the value, or a copy if code can change the value in place
    write: Callable[[Any], object]


def _named(owner: Any, names: str) -> Iterator[Setting]:
    """Yield a setting per word in `names`: an attribute, or two functions as ``"read/write"``."""
    for name in names.split():
        read, _, write = name.partition("/")
        if not write:
            yield Setting(name, partial(getattr, owner, name), partial(setattr, owner, name))
        elif hasattr(owner, read) and hasattr(owner, write):  # some versions lack these
            yield Setting(write, getattr(owner, read), getattr(owner, write))


def _of_a_thread() -> Iterator[Setting]:
    if (torch := torch_here()) is not None:
        yield from _named(torch, "is_grad_enabled/set_grad_enabled")
        names = "is_autocast_enabled/set_autocast_enabled get_autocast_dtype/set_autocast_dtype"
        for kind, (_, read, write) in product(("cpu", "cuda", "mps"), [*_named(torch, names)]):
            yield Setting(f"autocast, {kind}", partial(read, kind), partial(write, kind))
    if numpy := sys.modules.get("numpy"):
        yield Setting("numpy.seterr", numpy.geterr, lambda how: numpy.seterr(**how))


_TORCH = (
    "get_default_dtype/set_default_dtype get_num_threads/set_num_threads "
    "get_deterministic_debug_mode/set_deterministic_debug_mode "
    "get_float32_matmul_precision/set_float32_matmul_precision "
    "is_anomaly_enabled/set_anomaly_enabled"
)
_MATMUL = "allow_tf32 allow_bf16_reduced_precision_reduction"


def _of_the_process() -> Iterator[Setting]:
    """Yield process-wide settings of Python, and of torch, matplotlib and JAX if imported."""
    if (torch := torch_here()) is not None:
        yield Setting("the default device", _default_device, torch.set_default_device)
        yield from _named(torch, _TORCH)
        yield from _named(torch.backends.cudnn, "enabled benchmark deterministic allow_tf32")
        yield from _named(torch.backends.cuda.matmul, _MATMUL)
        if torch.cuda.is_initialized():
            yield from _named(torch.cuda, "current_device/set_device current_stream/set_stream")
    yield from _named(sys, "stdout stderr")
    yield _list(sys, "path")
    yield Setting("the root logger's level", lambda: logging.root.level, logging.root.setLevel)
    yield _list(logging.root, "handlers")
    yield Setting("os.environ", os.environ.copy, _set_environment)
    yield Setting("working folder", os.getcwd, os.chdir)
    if plots := sys.modules.get("matplotlib._pylab_helpers"):
        yield Setting("figures", lambda: set(plots.Gcf.figs), partial(_close_new, plots.Gcf))
    if config := getattr(sys.modules.get("jax"), "config", None):
        yield Setting("jax.config", lambda: dict(config.values), partial(_configure, config))


def _default_device() -> Any:
    """Return the device set by `torch.set_default_device`, or None."""
    mode = getattr(torch_here()._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if mode is None else mode.device


def _list(owner: Any, name: str) -> Setting:
    """Return a setting that restores a list in place, so that the list's aliases change too."""

    def write(before: list[Any]) -> None:
        getattr(owner, name)[:] = before

    return Setting(name, lambda: list(getattr(owner, name)), write)


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _close_new(figures: Any, before: set[int]) -> None:
    for number in set(figures.figs) - before:
        figures.destroy(number)


def _configure(config: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        if config.values[name] != value:
            config.update(name, value)


def _values(settings: Iterable[Setting]) -> list[tuple[Setting, Any]]:
    found = []
    for setting in settings:
        # Reading fails if code mixed torch's old and new TF32 API, or deleted the working folder.
        with suppress(Exception):
            found.append((setting, setting.read()))
    return found


def _write(found: list[tuple[Setting, Any]]) -> None:
    for setting, value in found:
        try:
            changed = bool(setting.read() != value)
        except Exception:  # noqa: BLE001  `!=` may run the user's code
            changed = True
        if changed:
            with faults.kept(f"putting back {setting.name}"):
                setting.write(value)


@contextmanager
def kept() -> Iterator[None]:
    """Restore settings and random state after the block."""
    before = _values([*_of_a_thread(), *_of_the_process()])
    randomness = Randomness()
    try:
        yield
    finally:
        with deferred():
            _write(before)
            with faults.kept("putting the random state back"):
                randomness.restore()


def thread_modes() -> Callable[[ExitStack], None]:
    """Save this thread's torch and numpy modes; return a function that sets them in any thread."""
    torch = torch_here()
    inference = torch is not None and torch.is_inference_mode_enabled()
    here = _values(_of_a_thread())

    def follow(stack: ExitStack) -> None:
        if inference:
            stack.enter_context(torch.inference_mode())
        _write(here)

    return follow


@contextmanager
def noted(note: Callable[[int, Any], object], most: int = 1) -> Iterator[None]:
    """For the first `most` interrupts, call `note` and raise nothing. Raise later interrupts."""
    before: Any = signal.getsignal(signal.SIGINT)
    # Only the main thread may set a handler, and `handle` needs a previous handler to call.
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
    """Defer an interrupt to the end of the block; a second interrupt is raised at once."""
    came: list[tuple[int, FrameType | None]] = []
    try:
        with noted(lambda *signaled: came.append(signaled)):
            yield
    finally:
        if came:
            handler: Any = signal.getsignal(signal.SIGINT)
            handler(*came[0])


class Randomness:
    """Save the random state of `random`, numpy, TensorFlow, and torch on initialized devices."""

    def __init__(self) -> None:
        self._devices = self._start = _states()
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._tensorflow = _tensorflow_state()

    def restore(self) -> None:
        """Restore the saved states. CUDA devices without a saved state get the CPU's seed."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._tensorflow is not None and self._tensorflow != _tensorflow_state():
            seed, drawn = self._tensorflow
            _tensorflow()._set_global_seed(seed)
            if drawn is not None:
                _tensorflow()._rng.setstate(drawn)
        # The CPU's state is restored first, because other devices may get the CPU's seed.
        for name, generator in _generators().items():
            if name in self._devices:
                generator.set_state(self._devices[name])
            else:  # as `torch.manual_seed` does for a device initialized later
                generator.manual_seed(torch_here().initial_seed())
        self._start = self._devices

    def same_start(self, devices: "Iterable[torch.device]") -> None:
        """Restore all states. Then give these CUDA devices equal states, and seed TensorFlow."""
        self.restore()
        if here := [str(d) for d in devices if d.type == "cuda"]:
            torch_here().cuda.init()  # creates the devices' generators
        self._start, generators = _states(), _generators()
        for name in here:
            self._start[name] = self._start[here[0]]
            generators[name].set_state(self._start[name])
        if self._tensorflow is not None:
            seed, _ = self._tensorflow
            _tensorflow()._set_global_seed(1 if seed is None else seed)

    def drawn(self) -> set[str]:
        """Return the devices where torch drew random numbers since the last save or restore."""
        return {
            name
            for name, state in _states().items()
            if name not in self._start or not torch_here().equal(state, self._start[name])
        }


def _tensorflow() -> Any:
    """Return TensorFlow's context, which holds the global seed; None if unavailable."""
    module: Any = sys.modules.get("tensorflow.python.eager.context")
    found = module.context() if hasattr(module, "context") else None
    return found if hasattr(found, "_set_global_seed") and hasattr(found, "_seed") else None


def _tensorflow_state() -> tuple[int | None, Any] | None:
    """Return TensorFlow's global seed, and the state of its generator for operation seeds."""
    if (found := _tensorflow()) is None:
        return None
    return found._seed, None if found._seed is None else found._rng.getstate()


def _generators() -> dict[str, Any]:
    """Return torch's default generators by device, without initializing CUDA."""
    if (torch := torch_here()) is None:
        return {}
    found: dict[str, Any] = {"cpu": torch.default_generator}
    if torch.cuda.is_initialized():
        found |= {f"cuda:{n}": made for n, made in enumerate(torch.cuda.default_generators)}
    if torch.backends.mps.is_available():
        found["mps:0"] = torch._C._mps_get_default_generator()
    return found


def _states() -> "dict[str, torch.Tensor]":
    return {name: generator.get_state() for name, generator in _generators().items()}
