"""Name the arguments of the running call of torch as the user's code writes them."""

import ast
import sys
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from gpumagic.checked.bounds import Place
from gpumagic.mismatch.operand import NAMED, tensors_of
from gpumagic.usercode.frames import FailedFrame, failed_frames
from gpumagic.usercode.values import own

_LONG = 80  # shown characters of an expression
_PRIMARY = (*NAMED, ast.Call, ast.List, ast.Tuple, ast.Constant)  # need no parentheses


class FailedCall:
    """The user's expression around a call of torch that runs now, with the call's arguments."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._args, self._kwargs = args, kwargs
        frame: FrameType | None = sys._getframe(1)
        trace: TracebackType | None = None
        while frame is not None:
            trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        self._frame = found = next(iter(failed_frames(trace)), None)
        text = f"{found.text(found.failed)}: " if found and found.failed else ""
        # The user's expression, before what is said of it.
        self.expression = text if len(text) <= _LONG else f"{text[:_LONG]}…: "

    def name(self, place: Place) -> str:
        """Return the user's expression for an argument, which can be indexed; empty if unknown."""
        (position, keyword, item), frame = place, self._frame
        if frame is None:
            return ""
        value = self._args[position] if position < len(self._args) else self._kwargs.get(keyword)
        value = value if item is None else value[item]
        for node in (node for failed in frame.candidates for node in ast.walk(failed)):
            held: Any = frame.scope.value(node) if isinstance(node, NAMED) else None
            if held is value and held is not None:
                return frame.text(node)
            for path, tensor in tensors_of(held) if issubclass(type(held), nn.Module) else ():
                if tensor is value:  # the weight of a module
                    return f"{frame.text(node)}.{path}".removesuffix(".weight")
        if (written := _written(frame, place, len(self._args))) is None:
            return ""
        text = frame.text(written)
        return text if isinstance(written, _PRIMARY) else f"({text})"


def _written(frame: FailedFrame, place: Place, given: int) -> ast.expr | None:
    """Return the expression that is written in the place of an argument of `given` arguments."""
    (position, keyword, item), node = place, frame.failed
    if isinstance(node, ast.Assign):  # x[i] = 0
        node = node.targets[0]
    written: list[ast.expr] = []
    if isinstance(node, ast.Subscript):
        written = [node.value, node.slice]
    elif isinstance(node, ast.BinOp):
        written = [node.left, node.right]
        if isinstance(node.left, ast.Constant):  # torch is given the tensor first
            written.reverse()
    elif isinstance(node, ast.Call):
        if named := [each.value for each in node.keywords if each.arg == keyword]:
            return named[0]
        written = _positional(frame, node, given)
    found = written[position] if position < len(written) else None
    if item is None:
        return found
    items = found.elts if isinstance(found, (ast.Tuple, ast.List)) else []
    return items[item] if item < len(items) else None


def _positional(frame: FailedFrame, node: ast.Call, given: int) -> list[ast.expr]:
    """Return the expressions of the positional arguments; empty if they are not torch's."""
    if not frame.direct or any(isinstance(each, ast.Starred) for each in node.args):
        return []
    function, more = frame.scope.value(node.func), given - len(node.args)
    # An embedding or a loss: torch's function is given what the module is given.
    if more == 0 or (issubclass(type(function), nn.Module) and not own(function)["_modules"]):
        return node.args
    if more == 1 and isinstance(node.func, ast.Attribute):  # a method
        return [node.func.value, *node.args]
    return []
