"""Enter and leave a mode over torch's functions, in any order among other modes."""

from typing import Any

from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)


class FunctionMode(TorchFunctionMode):
    """A mode over torch's functions on one thread, from `start` to `stop`, or in a `with`."""

    running = 0  # how often it was started and not stopped

    def start(self) -> None:
        """Enter the mode on this thread."""
        _push_mode(self)
        self.running += 1

    def stop(self) -> None:
        """Leave the mode, whatever other modes were entered since and not left."""
        if self not in _get_current_function_mode_stack():
            return
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        self.running -= 1

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
