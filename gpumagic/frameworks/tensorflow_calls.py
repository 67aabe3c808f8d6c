"""Find the user's call that led to an operation of TensorFlow's."""

import os
from types import CodeType, FrameType
from typing import NamedTuple

import tensorflow as tf

from gpumagic.ledger.via import LIBRARY, USER, kinds, locate
from gpumagic.usercode.files import is_ours, module_of

_TENSORFLOW = os.path.join(os.path.dirname(os.path.abspath(tf.__file__)), "")
_COUNTING = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tensorflow_")

# Functions of TensorFlow's that stand around its others.
_AROUND = {"error_handler", "op_dispatch_handler", "wrapper", "wrapped"}


class Call(NamedTuple):
    """Where an operation was called from."""

    user: FrameType | None
    inner: FrameType  # the first frame that is not TensorFlow's
    how: int
    function: str  # TensorFlow's, that was called there

    def codes(self) -> list[CodeType | None]:
        """The code of both frames, without which its address may come to be another's."""
        return [None if frame is None else frame.f_code for frame in self[:2]]

    def at(self) -> list[tuple[int, int] | None]:
        """Where both frames are."""
        return [None if frame is None else (id(frame.f_code), frame.f_lasti) for frame in self[:2]]

    def library(self, of_tensors: set[str]) -> str:
        """The library's module that read by itself; TensorFlow does in what is none of these."""
        file = self.inner.f_code.co_filename
        if self.how == LIBRARY and kinds[file] != USER:
            return module_of(file)
        return "" if self.function in of_tensors else f"tensorflow.{self.function}"


def called_from(frame: FrameType | None) -> Call | None:
    """Who called an operation, or None where gpumagic itself did."""
    function = ""
    while frame is not None and frame.f_code.co_filename.startswith((_TENSORFLOW, _COUNTING)):
        name = frame.f_code.co_name
        function = function if name in _AROUND else name
        frame = frame.f_back
    if frame is None or is_ours(frame.f_code.co_filename):
        return None
    user, how = locate(frame)
    return Call(user, frame, how, function)
