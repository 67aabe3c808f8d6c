"""Retry a call of torch whose tensors were on several devices, once they are on one.

The ledger looks through this file: what reads through it is the user's own doing.
"""

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gpumagic.placement.function_mode import FunctionMode

_MISMATCH = re.compile(
    r"same device|not at the same device|two devices|weight type .* should be the same", re.S
)


class RetryMode(FunctionMode):
    """Catch the error of mixed devices, bring the operands together, and try again."""

    def together(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments of a call on one device; None if they were on one already."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        __tracebackhide__ = True
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not _MISMATCH.search(str(error)) or func is Tensor.backward:
                raise
            together = self.together(func, args, kwargs)
            if together is None:
                raise
        args, kwargs = together
        return func(*args, **kwargs)
