"""Copy the operands of a failed torch call to one device and repeat the call, for `--fix`.

`AutoFix` adds a microsecond to each torch call, so only cells of `%%ongpu … --fix` use `AutoFix`.
"""

import re
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gpumagic.mismatch.operation import read
from gpumagic.placement import FunctionMode

_WRITES = re.compile("__i|__setitem__|(?!__).*_$")  # names of functions that write to an operand


class AutoFix(FunctionMode):
    """Repeat a torch call that failed because it mixes devices, with all operands on one device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        __tracebackhide__ = True
        kwargs = kwargs or {}
        # batch_norm updates its statistics before it can fail, so copy operands before the call.
        if getattr(func, "__name__", "") == "batch_norm":
            together = self._together(func, args, kwargs)
            return _call(func, (args, kwargs), together or (args, kwargs), statistics=True)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            message = read(error) if func is not Tensor.backward else None
            if message is None or message.kind not in ("mixed", "index"):
                raise
            failed = error
        # This code is outside `except`, so that its errors do not show `failed` as their context.
        if (together := self._together(func, args, kwargs)) is None:
            raise failed
        return _call(func, (args, kwargs), together)

    def _together(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with all tensors on one device; None if copies cannot help."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if len({tensor.device for tensor in tensors}) < 2:
            return None
        # A copy cannot replace a tensor that the call writes to, so use that tensor's device.
        first = (args[:1] or tensors[:1]) if _WRITES.match(getattr(func, "__name__", "")) else ()
        written = tree_leaves((kwargs.get("out"), first))
        homes = {x.device for x in written if isinstance(x, Tensor)} or {self._device}
        if len(homes) > 1:
            return None
        home = homes.pop()
        copies = {id(tensor): tensor.to(home) for tensor in tensors}
        return cast(tuple[Any, Any], tree_unflatten([copies.get(id(x), x) for x in leaves], spec))


def _call(func: Any, given: Any, together: Any, *, statistics: bool = False) -> Any:
    """Call `func` with the copies in `together`, and write changed copies back to the operands."""
    # batch_norm does not increment `_version` of its statistics, so always copy these back.
    __tracebackhide__ = True
    pairs = zip(tree_leaves(given), tree_leaves(together), strict=True)
    copies = [(t, c, c._version) for t, c in pairs if t is not c and not c.is_inference()]
    result = func(*together[0], **together[1])
    with torch.no_grad():
        for tensor, copy, version in copies:
            running = statistics and copy.dim() == 1 and not copy.requires_grad
            if running or copy._version != version:
                tensor.copy_(copy)
    return result
