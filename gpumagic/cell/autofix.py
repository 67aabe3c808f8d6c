"""Move operands to the device of the cell and call again, for `%%ongpu … --fix`.

A variable is moved in place and stays the same object. What autograd tracks, and views, are copied
for that one call. Only cells that ask for it pay: this is a mode over all functions of torch, which
adds a microsecond to each call.
"""

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gpumagic.cell.report import Fixed
from gpumagic.cell.retry_mode import RetryMode
from gpumagic.moving.move import has_plain_storage, immovable, move_all, remember
from gpumagic.moving.moved import Origin
from gpumagic.usercode.lines import expression, innermost, line_of, user_frame


class AutoFix(RetryMode):
    """Bring a call's operands together if their devices differ, from `start` to `stop`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._done: dict[tuple[Any, ...], Fixed] = {}

    @property
    def done(self) -> tuple[Fixed, ...]:
        """Return the operands that were brought, each once."""
        return tuple(self._done.values())

    def together(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if len({t.device for t in tensors}) < 2:
            return None
        # What is written to, and cannot move, decides.
        written = tree_leaves(kwargs.get("out"))
        if _writes(func) and (not args or tensors[0] is args[0]):
            written.append(tensors[0])
        fixed = [t.device for t in written if isinstance(t, Tensor) and not _moves(t)]
        home = fixed[0] if fixed else self._device
        user = user_frame(sys._getframe(2))
        known: dict[int, Tensor] = {}
        for tensor in tensors:
            if tensor.device != home and id(tensor) not in known:
                known[id(tensor)] = self._bring(tensor, home, user)
        brought = [known.get(id(x), x) for x in leaves]
        together: tuple[Any, Any] = tree_unflatten(brought, spec)
        return together

    def _bring(self, tensor: Tensor, home: torch.device, user: FrameType | None) -> Tensor:
        source, name = str(tensor.device), _name(tensor, user)
        if _moves(tensor):
            origins: list[tuple[Any, Origin]] = []
            try:
                move_all([(name, tensor)], home, origins=origins)
            finally:
                place = innermost()
                remember(origins, place.label if place else "")
            new = tensor
        else:
            new = tensor.to(home)
        line = None if user is None else line_of(user.f_code, user.f_lasti)
        key = name, source, str(home), line
        before = self._done.get(key, Fixed(name, 0, source, str(home), line, 0))
        self._done[key] = replace(
            before, nbytes=before.nbytes + tensor.nbytes, count=before.count + 1
        )
        return new


def _moves(tensor: Tensor) -> bool:
    """Whether the tensor itself can move: a leaf with memory of its own."""
    return has_plain_storage(tensor) and not immovable(tensor) and not tensor._is_view()


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    dunder = name.startswith("__")
    in_place = name.startswith("__i") if dunder else name.endswith("_")
    return in_place or name == "__setitem__"


def _name(tensor: Tensor, user: FrameType | None) -> str:
    if user is None:
        return "an operand"
    for scope in (user.f_locals, user.f_globals):
        for name, value in list(scope.items()):
            if value is tensor and not name.startswith("_"):
                return str(name)
    code = expression(user.f_code, user.f_lasti)
    return f"an operand of `{code}`" if code else "an operand"
