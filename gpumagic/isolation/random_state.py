"""Keep the state of every generator that a cell may draw from, and put it back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Randomness:
    """The random state of now of torch on every started device, of `random` and of numpy."""

    def __init__(self) -> None:
        self._devices = _states()
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._tensorflow = _tensorflow_state()
        self._start = self._devices

    def seed_tensorflow(self) -> None:
        """Until `restore`, give it a seed where it has none: each device draws the same."""
        if self._tensorflow is not None:
            seed, _ = self._tensorflow
            _tensorflow()._set_global_seed(1 if seed is None else seed)

    def restore(self) -> None:
        """Put all of it back. A CUDA device that has started since gets the CPU's seed."""
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
                # As `torch.manual_seed` seeds a device that starts later.
                generator.manual_seed(torch_here().initial_seed())
        self._start = self._devices

    def same_start(self, devices: Iterable[torch.device]) -> None:
        """Put all of it back, and let each of these CUDA devices draw what the first one would."""
        self.restore()
        here = [str(d) for d in devices if d.type == "cuda"]
        if here:
            torch_here().cuda.init()  # it is about to be used, and has no generator before
        now = _states()
        for name in here:
            _set(name, now[here[0]])
        self._start = {**now, **dict.fromkeys(here, now[here[0]])}

    def drawn(self) -> set[str]:
        """The devices that torch has drawn random numbers on, or seeded, since the start."""
        return {
            name
            for name, state in _states().items()
            if name not in self._start or not torch_here().equal(state, self._start[name])
        }


def _tensorflow() -> Any:
    """TensorFlow's own keeper of its seed, where it is imported and has one."""
    module: Any = sys.modules.get("tensorflow.python.eager.context")
    found = module.context() if hasattr(module, "context") else None
    return found if hasattr(found, "_set_global_seed") and hasattr(found, "_seed") else None


def _tensorflow_state() -> tuple[int | None, Any] | None:
    """Its seed, and what it has drawn of that for its operations."""
    found = _tensorflow()
    if found is None:
        return None
    return found._seed, None if found._seed is None else found._rng.getstate()


def _generators() -> dict[str, Any]:
    """Those that torch's own functions draw from, by device; to ask must not start CUDA."""
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
