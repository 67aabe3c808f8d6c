"""Check the arguments of torch's functions before they run.

A mode over torch's functions: it costs a microsecond a call, a dispatch mode six, and the kernels
that the ledger replaces are of one device and never the CPU's. It sees the calls of its own
thread; a backward pass uses no index that no forward pass had.
"""

from collections.abc import Callable
from typing import Any

import torch

from gpumagic import faults
from gpumagic.checked.bad_value import find_bad_value
from gpumagic.checked.bounds import Find, finders
from gpumagic.checked.made_nan import NanFinder
from gpumagic.placement.function_mode import FunctionMode
from gpumagic.usercode.files import leave_out_ours


class check(FunctionMode):
    """Raise an ordinary error before a bad index reaches a GPU: ``with gpumagic.check():``.

    Each check waits for the device. Only calls on the thread that entered are checked.

    Parameters
    ----------
    nan : bool, default False
        Also find the first operation that makes NaN or infinity, forward or backward. Every
        operation then waits for the device.

    Raises
    ------
    IndexError, ValueError, FloatingPointError
        For an index or a label; a probability; with `nan`, an operation that made NaN or infinity.

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
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        __tracebackhide__ = True
        try:
            finds, failed = self._finders.get(func), None
            if finds is None and self._nan is None:  # the usual case, at the least cost
                return func(*args, **kwargs) if kwargs else func(*args)
            kwargs = kwargs or {}
            if torch.compiler.is_compiling():
                return func(*args, **kwargs)
            if finds:
                failed = _check_values(finds, args, kwargs)
            elif finds is not None:  # a sparse tensor: torch names the bad index itself
                kwargs = {"check_invariants": True, **kwargs}
            nan = self._nan
            result = nan.call(func, args, kwargs) if nan is not None else func(*args, **kwargs)
            if failed is not None:
                faults.keep("checking the arguments of a call", failed)
            return result
        except BaseException as error:
            leave_out_ours(error)
            raise


def _check_values(finds: list[Find], args: Any, kwargs: Any) -> Exception | None:
    """Raise the error for a bad value; return a failure of the check itself.

    Arguments that torch refuses may make it fail, and torch then says so.
    """
    __tracebackhide__ = True
    try:
        error = find_bad_value(finds, args, kwargs)
    except Exception as failed:  # noqa: BLE001  kept if torch takes the arguments
        return failed
    if error is not None:
        raise error
    return None
