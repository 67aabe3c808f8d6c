"""Find the first operation that makes NaN or infinity from finite numbers, forward or backward.

An operation whose inputs have NaN passes it on, and is not the one. Infinity that the code writes
itself (a mask of -inf) is an input; NaN that comes of it is made. A `GradScaler` skips a step whose
gradients overflow in float16: that is no error.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gpumagic import faults
from gpumagic.checked.bad_value import first, readable
from gpumagic.checked.failed_call import FailedCall
from gpumagic.ledger.attribute import uncounted
from gpumagic.placement.function_mode import FunctionMode
from gpumagic.usercode.files import expression, in_cell, line_at, unseen, user_frame

_MARK = "gpumagic.check"
# Their results are what is there, or was there before.
_MAKES_NONE = ("__get__", "__set__", "__setitem__", "__deepcopy__", "backward", "set_", "detach")
_NAN, _INFINITY = 1, 2


class MadeNanError(FloatingPointError):
    """An operation made NaN or infinity: found by `gpumagic.check(nan=True)`."""


class NanFinder:
    """Compare the inputs and the results of each operation, while a mode runs."""

    def __init__(self, mode: FunctionMode) -> None:
        self._mode = mode
        self._scaled = False  # a GradScaler has scaled a loss

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of torch; raise `MadeNanError` if it makes NaN or infinity."""
        __tracebackhide__ = True
        name = getattr(func, "__name__", "")
        scales = sys._getframe(2).f_globals.get("__name__") == "torch.amp.grad_scaler"
        self._scaled |= scales
        if scales or name in _MAKES_NONE or "empty" in name or name.startswith("new_"):
            return func(*args, **kwargs)
        given = tree_leaves((args, {key: kwargs[key] for key in kwargs if key != "out"}))
        writes = name.endswith("_")  # to its first argument; or it is an operator
        before, nodes = 0, _nodes(given)
        with faults.kept("reading arguments"), uncounted(), torch._C.DisableTorchFunction():
            before = _flaws(given[:writes])
        result = func(*args, **kwargs)
        text = ""
        with faults.kept("reading results"), uncounted(), torch._C.DisableTorchFunction():
            made = tree_leaves(result)
            self._watch_backward(made, nodes)
            if any(isinstance(each, Tensor) for each in given) and (after := _flaws(made)):
                before |= _flaws(given[writes:])
                if flaw := _new_flaw(before, after):
                    text = _described(made, flaw, before, args, kwargs)
        if text:
            raise MadeNanError(text)
        return result

    def _watch_backward(self, made: Iterable[Any], known: set[Any]) -> None:
        """Have the backward of an operation checked, in the name of the line that runs now."""
        queue = _nodes(made) - known
        if not queue or (frame := user_frame(sys._getframe(2))) is None:
            return
        code, at = in_cell(frame)

        @unseen
        def check_backward(made: Any, given: Any) -> None:
            __tracebackhide__ = True
            text, before = "", 0
            if not self._mode.running:
                return
            with faults.kept("reading gradients"), uncounted(), torch._C.DisableTorchFunction():
                flaw = _new_flaw(before := _flaws(given), _flaws(made))
                half = any(getattr(each, "dtype", None) == torch.float16 for each in made)
                if flaw and not (self._scaled and (before or half)):
                    text = f"{expression(code, at)} ({line_at(code, at).place}): its backward pass "
                    text += f"{_makes(made, flaw)[0]} of a gradient, from finite gradients"
            if text:
                raise MadeNanError(text)

        while queue:
            node: Any = queue.pop()
            if _MARK not in node.metadata:
                node.metadata[_MARK] = True
                node.register_hook(check_backward)
                queue |= {earlier for earlier, _ in node.next_functions} - known - {None}


def _nodes(values: Iterable[Any]) -> set[Any]:
    """Return the nodes of the graph that made tensors."""
    found = set()
    for value in values:
        with suppress(RuntimeError):  # of a view that was changed in place, under `no_grad`
            found.add(value.grad_fn if isinstance(value, Tensor) and value.requires_grad else None)
    return found - {None}


def _flaws(values: Iterable[Any]) -> int:
    """Return whether NaN and infinity are in tensors and numbers, as bits."""
    found = 0
    for value in values:
        if isinstance(value, (float, complex)):
            value = torch.tensor(value, device="cpu")
        elif not readable(value) or not (value.is_floating_point() or value.is_complex()):
            continue
        value = value.detach()
        if not value.isfinite().all().item():
            found |= _NAN * value.isnan().any().item() | _INFINITY * value.isinf().any().item()
    return found


def _new_flaw(before: int, after: int) -> int:
    """Return what results have and inputs had not: NaN, else infinity, or 0."""
    if after & _NAN and not before & _NAN:
        return _NAN
    return _INFINITY if after & _INFINITY and not before else 0


def _makes(made: Iterable[Any], flaw: int) -> tuple[str, Tensor, str]:
    """Return ``"makes nan at [3] (2 of 64)"``, the tensor that has it, and the place."""
    result = next(each for each in made if _flaws([each]) & flaw).detach().cpu()
    place, count, value = first(result, result.isnan() if flaw == _NAN else result.isinf())
    text = f"makes {value} at {place}".removesuffix(" at ")
    return text + (f" ({count} of {result.numel()})" if count > 1 else ""), result, place


def _described(made: Any, flaw: int, before: int, args: Any, kwargs: Any) -> str:
    """Return what was made, and the inputs of the same shape: their value in the same place."""
    call, (text, result, place) = FailedCall(args, kwargs), _makes(made, flaw)
    wrong = result.isnan() if flaw == _NAN else result.isinf()
    read = ""
    for n, each in enumerate(args):
        if readable(each) and each.shape == result.shape and not any(each is one for one in made):
            name, value = call.name((n, "", None)), first(each.detach().cpu(), wrong)[2]
            read += f", {name}{place} = {value:.6g}" if name else ""
    source = "input without NaN" if before else "finite input"
    return f"{call.expression}{text}, from {source}" + read.replace(",", ":", 1)
