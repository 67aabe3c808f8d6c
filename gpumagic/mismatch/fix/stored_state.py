"""Explain state that is where it was: an optimizer's before a move, a file's on another machine."""

import ast
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gpumagic.mismatch.explanation import Explanation, Operand
from gpumagic.mismatch.fix.edits import Edit, can_precede
from gpumagic.mismatch.read.expressions import arguments, loads_as_saved
from gpumagic.mismatch.read.messages import Message
from gpumagic.mismatch.read.operand import bytes_of
from gpumagic.mismatch.read.operand_rows import expression
from gpumagic.mismatch.read.syntax import loops_around, root, statement, stored
from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.values import full

_COUNTERS = "an optimizer keeps its step counters on the CPU"
_STATE = (
    "the optimizer took its state on before the model moved; move the model first, then make "
    "the optimizer or load its state"
)
_FILE = "the file holds tensors of a GPU that is not here; load them to the CPU, then move"


def for_optimizer(frame: FailedFrame, message: Message) -> Explanation | None:
    """The line that brings the state to the parameters, or the counters back to the CPU."""
    node = frame.failed
    if not isinstance(node, ast.Call):
        return None
    owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    values = {frame.text(n): frame.scope.value(n) for n in [*owner, *arguments(node)]}
    found = [(text, v) for text, v in values.items() if issubclass(type(v), Optimizer)]
    stmt = statement(node)
    if len(found) != 1 or stmt is None or not can_precede(frame, stmt):
        return None
    text, optimizer = found[0]
    parameters: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
    steps = message.kind == "steps"
    away = _away(optimizer, parameters, steps)
    devices, homes = {full(t.device) for t in away}, {full(p.device) for p in parameters}
    if len(devices) != 1 or len(homes) != 1:
        return None
    if steps:
        loop = f"for state in {text}.state.values():"
        edit = Edit(frame, stmt, [f'{loop} state["step"] = state["step"].cpu()'])
    else:
        loops = loops_around(stmt)
        once = loops and can_precede(frame, loops[-1]) and root(text) not in stored(loops[-1])
        # It brings each state to its parameter, whatever the optimizer.
        line = f"{text}.load_state_dict({text}.state_dict())"
        edit = Edit(frame, loops[-1] if once else stmt, [line])
    nbytes = sum(bytes_of(t) or 0 for t in away)
    total = sum(bytes_of(p) or 0 for p in parameters)
    about = f"{len(parameters)} parameters", f"{len(away)} tensors"
    rows = (
        Operand(f"{text}.param_groups", tuple(homes), total, None, None, about[0]),
        Operand(f"{text}.state", tuple(devices), nbytes, None, None, about[1], odd=True),
    )
    why = _COUNTERS if steps else _STATE
    return Explanation(*expression(frame, node), rows, edit.fix(nbytes), why)


def _away(optimizer: Any, parameters: list[Tensor], steps: bool) -> list[Tensor]:
    """The counters that are on a GPU, or the rest of the state that is not with its parameter."""
    found = []
    for parameter in parameters:
        for key, held in dict(optimizer.state.get(parameter, {})).items():
            if issubclass(type(held), Tensor) and (key == "step") == steps:
                wrong = held.is_cuda if steps else held.device != parameter.device
                found += [held] if wrong else []
    return found


def for_load(frame: FailedFrame) -> Explanation | None:
    """`torch.load` of a file from a machine with other GPUs."""
    node = frame.failed
    stmt = statement(node) if node is not None else None
    if not isinstance(node, ast.Call) or stmt is None:
        return None
    if not loads_as_saved(node, frame.scope.value(node.func)):
        return None
    text = frame.text(node)[:-1].rstrip().rstrip(",")
    edit = Edit(frame, stmt, replaced=[(node, f'{text}, map_location="cpu")')])
    return Explanation(*expression(frame, node), (), edit.fix(None), _FILE)
