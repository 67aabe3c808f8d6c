"""Leave functions of ours that stand in for torch's out of the tracebacks of errors.

When an error leaves a function, Python adds its frame to the traceback, unless it leaves by a bare
`raise`. So it is from Python 3.11 on; before, one frame of ours stays, which a notebook leaves out.
"""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gpumagic.usercode.files import stands_in

P = ParamSpec("P")
R = TypeVar("R")


def leave_out_ours(error: BaseException) -> None:
    """Take the function that calls this out of an error's traceback, and those of ours below it.

    It is called in an `except` that ends with a bare `raise`. `python -X dev` keeps the frames.
    """
    trace = error.__traceback__
    while trace is not None and stands_in(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if not sys.flags.dev_mode:
        error.__traceback__ = trace


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, of which no traceback has a frame."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise

    return call
