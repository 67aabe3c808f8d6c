"""Check the arguments of torch calls before the calls run, and find where NaN is made.

`check` is a torch function mode, which adds 1 µs to each call. A dispatch mode would add 6 µs.
Calls on autograd's threads are not checked, because a backward pass reuses checked indices.
"""

import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gpumagic import faults
from gpumagic.checked.bounds import RunningCall, find_bad_value, finders, first, readable
from gpumagic.ledger.attribute import uncounted
from gpumagic.placement import FunctionMode
from gpumagic.usercode import files

# Names of functions whose results are not checked, because no number in them was computed.
_EXEMPT = re.compile("__(get|set|setitem|deepcopy)__|backward|set_|detach|new_.*|.*empty.*")
_NAN, _INFINITY = Tensor.isnan, Tensor.isinf
Flaw = Callable[[Tensor], Tensor]  # `Tensor.isnan` or `Tensor.isinf`


class MadeNanError(FloatingPointError):
    """Raised by `gpumagic.check(nan=True)` for an operation that made NaN or infinity."""


class check(FunctionMode):
    """Raise an ordinary error before a bad index reaches a GPU: ``with gpumagic.check():``.

    Each check waits for the device. Only calls on the thread that entered `check` are checked.

    Parameters
    ----------
    nan : bool, default False
        Also find the first operation that makes NaN or infinity, in the forward or the backward
        pass. Every operation then waits for the device.

    Raises
    ------
    IndexError, ValueError, FloatingPointError
        For a bad index or label, for a bad probability, and for a new NaN or infinity.

    Examples
    --------
    >>> with gpumagic.check():
    ...     loss = F.cross_entropy(net(x), labels)
    IndexError: F.cross_entropy(net(x), labels): labels[17] = 10, but net(x) has 10 classes: 0 … 9
    """

    def __init__(self, *, nan: bool = False) -> None:
        super().__init__()
        self._finders = finders()
        self._nan = NanFinder(self) if nan else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        __tracebackhide__ = True
        kwargs = kwargs or {}
        finds, nan = self._finders.get(func), self._nan
        try:
            if (finds is None and nan is None) or torch.compiler.is_compiling():
                return func(*args, **kwargs)
            wrong, failed = None, None
            try:
                wrong = find_bad_value(finds, args, kwargs) if finds else None
            except Exception as error:  # noqa: BLE001  reported only if torch accepts the arguments
                failed = error
            if wrong is not None:
                raise wrong
            result = nan.call(func, args, kwargs) if nan is not None else func(*args, **kwargs)
            if failed is not None:
                faults.keep("checking the arguments of a call", failed)
            return result
        except BaseException as error:
            files.leave_out_ours(error)
            raise


class NanFinder:
    """Find the operation that makes NaN or infinity. Ignore infinity that a library makes."""

    def __init__(self, mode: FunctionMode) -> None:
        self._mode = mode
        self._scaled = False  # whether a GradScaler has scaled a loss

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of torch; raise `MadeNanError` if it makes NaN or infinity."""
        __tracebackhide__ = True
        name = getattr(func, "__name__", "")
        scales = sys._getframe(2).f_globals.get("__name__") == "torch.amp.grad_scaler"
        self._scaled |= scales
        exempt = scales or _EXEMPT.fullmatch(name)
        if exempt and name != "backward":
            return func(*args, **kwargs)
        given = tree_leaves((args, {**kwargs, "out": None}))
        writes = name.endswith("_")  # as in `add_`; `__add__` also matches, which is harmless
        before, text = set[Flaw](), ""
        with faults.kept("reading arguments"), uncounted(), torch._C.DisableTorchFunction():
            self._watch_backward(given, earlier=True)
            before = _flaws(given[:writes])
        result = func(*args, **kwargs)
        if exempt:
            return result
        with faults.kept("reading results"), uncounted(), torch._C.DisableTorchFunction():
            made = tree_leaves(result)
            self._watch_backward(made)
            if any(isinstance(each, Tensor) for each in given) and (after := _flaws(made)):
                before |= _flaws(given[writes:])
                flaw = _new_flaw(before, after)
                library = _library(sys._getframe(1))
                if flaw is _NAN or (flaw and library is None and not _has_extreme(given)):
                    text = _described(made, flaw, before, library, args, kwargs)
        if text:
            raise MadeNanError(text)
        return result

    def _watch_backward(self, values: Iterable[Any], *, earlier: bool = False) -> None:
        """Check the backward pass of calls that made `values`. `earlier` alters only the error."""
        queue = {node for node in _nodes(values) if self not in node.metadata}
        if not queue or (frame := files.user_frame(sys._getframe(2))) is None:
            return
        code, at = files.in_cell(frame)

        @files.unseen
        def check_backward(name: str, made: Any, given: Any) -> None:
            __tracebackhide__ = True
            text = ""
            if not self._mode.running:
                return
            with faults.kept("reading gradients"), uncounted(), torch._C.DisableTorchFunction():
                flaw = _new_flaw(before := _flaws(given), _flaws(made))
                half = any(getattr(each, "dtype", None) == torch.float16 for each in made)
                if flaw and not (self._scaled and (before or half)):
                    text = f"{name}, whose call came before " if earlier else ""
                    place = files.line_at(code, at).place
                    why = "from finite gradients"
                    if _flaws(_saved(torch._C._current_autograd_node())):
                        why = "from input that already has nan or inf"
                    text += f"{files.expression(code, at)} ({place}): {why}, its "
                    text += f"backward pass {_makes(made, flaw)[0]} of a gradient"
            if text:
                raise MadeNanError(text)

        while queue:
            node: Any = queue.pop()
            if self not in node.metadata:
                node.metadata[self] = True
                node.register_hook(partial(check_backward, node.name()))
                queue |= {before for before, _ in node.next_functions} - {None}


def _nodes(values: Iterable[Any]) -> set[Any]:
    """Return the autograd nodes that made the tensors among `values`."""
    found = set()
    for value in values:
        with suppress(RuntimeError):  # raised for a view that changed under `no_grad`
            found.add(value.grad_fn if isinstance(value, Tensor) and value.requires_grad else None)
    return found - {None}


def _saved(node: Any) -> list[Any]:
    """Return an autograd node's saved input tensors; empty if the node saved its result."""
    found, names = list[Any](), [name for name in dir(node) if name.startswith("_saved_")]
    for name in names if "_saved_result" not in names else ():
        with suppress(Exception):  # a checkpoint's saved tensors can be read only once
            found.append(getattr(node, name))
    return [each for each in found if isinstance(each, Tensor)]


def _flaws(values: Iterable[Any]) -> set[Flaw]:
    """Return the flaws in tensors and numbers: NaN, infinity or both."""
    found = set[Flaw]()
    for value in values:
        if isinstance(value, (float, complex)):
            value = torch.tensor(value, device="cpu")
        elif not readable(value) or not (value.is_floating_point() or value.is_complex()):
            continue
        value = value.detach()
        if not value.isfinite().all().item():
            found |= {flaw for flaw in (_NAN, _INFINITY) if flaw(value).any().item()}
    return found


def _has_extreme(values: Iterable[Any]) -> bool:
    """Whether a tensor contains the largest or lowest number of its dtype, as masks often do."""
    found = (each.detach() for each in values if readable(each) and each.is_floating_point())
    return any((each.abs() == torch.finfo(each.dtype).max).any().item() for each in found)


def _library(frame: FrameType | None) -> FrameType | None:
    """Return the library's frame that calls torch; None if no library calls torch."""
    while frame is not None and (
        files.stands_in(frame.f_code.co_filename) or files.is_torchs(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return frame if frame is not None and files.module_of(frame.f_code.co_filename) else None


def _new_flaw(before: set[Flaw], after: set[Flaw]) -> Flaw | None:
    """Return the flaw in `after` (results) that `before` (inputs) does not explain, or None."""
    if _NAN in after - before:
        return _NAN
    return _INFINITY if _INFINITY in after and not before else None


def _makes(made: Iterable[Any], flaw: Flaw) -> tuple[str, Tensor, str]:
    """Return the text ``"makes nan at [3] (2 of 64)"``, a mask of wrong numbers, and a position."""
    result = next(each for each in made if flaw in _flaws([each])).detach().cpu()
    wrong = flaw(result)
    place, count, value = first(result, wrong)
    text = f"makes {value} at {place}".removesuffix(" at ")
    return text + (f" ({count} of {result.numel()})" if count > 1 else ""), wrong, place


def _described(
    made: Any, flaw: Flaw, before: set[Flaw], library: FrameType | None, args: Any, kwargs: Any
) -> str:
    """Describe the first wrong number, and the inputs' numbers at the same position."""
    call, (text, wrong, place), read = RunningCall(args, kwargs), _makes(made, flaw), ""
    if library is not None:
        code = library.f_code
        where = f"{files.module_of(code.co_filename)}, line {library.f_lineno}"
        text = f"{files.expression(code, library.f_lasti)} in {where}, {text}"
    for each in args:
        if readable(each) and each.shape == wrong.shape and not any(each is one for one in made):
            name, value = call.name(each), first(each.detach().cpu(), wrong)[2]
            read += f", {name}{place} = {value:.6g}" if name else ""
    source = "input without NaN" if before else "finite input"
    return f"{call.expression}{text}, from {source}" + read.replace(",", ":", 1)
